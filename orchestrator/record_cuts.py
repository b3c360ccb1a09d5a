"""Prefixes of rollouts that were just recorded, as tasks: each episode begins anew where one was cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.environments.prefixed import Prefix, continue_from
from orchestrator.environments.protocol import Environment, Episode, RestorableEnvironment
from orchestrator.prefix_replay import turn_boundaries
from orchestrator.producer import Group
from orchestrator.tasks import Task, TaskStream
from services.config.orchestrator import EnvConfig

FIRST_CUT_GROUP = 2**40
"""Numbers of continued groups, which seed their sampling: no whole rollout has such a one."""
_CUT = 23
"""Keeps the draw of cuts apart from other draws of the same seed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A prefix to be continued."""

    name: str
    task: Task
    token_ids: np.ndarray
    """[P] u32"""
    action_mask: np.ndarray
    """[P] bool"""


class CutEnvironment:
    """One task: a recorded episode from its cut on, under the name of the whole one."""

    num_tasks = 1

    def __init__(self, environment: RestorableEnvironment, cut: Cut) -> None:
        self._environment, self._cut = environment, cut

    def task_id(self, index: int) -> str:
        """Return that of the task that was cut."""
        return self._cut.task.task_id

    def start(self, index: int, seed: int) -> Episode:
        """Restore the episode.

        Raises:
            PrefixMismatch: it did not get to where the recorded one was.
        """
        prefix = Prefix(0, self._cut.task.index, self._cut.token_ids, self._cut.action_mask)
        return continue_from(self._environment, prefix, seed, name=self._cut.name)


class CutTasks(TaskStream):
    """Prefixes as tasks, each once."""

    def __init__(self, cuts: list[Cut]) -> None:
        self._cuts = cuts
        self._num_taken = 0

    @property
    def num_left(self) -> int:
        """Prefixes that no group has taken."""
        return len(self._cuts) - self._num_taken

    def cut_of(self, group_id: str) -> Cut:
        """What a group continued."""
        return self._cuts[int(group_id) - FIRST_CUT_GROUP]

    def next(self) -> Task:
        """The next prefix."""
        cut, group = self._cuts[self._num_taken], FIRST_CUT_GROUP + self._num_taken
        self._num_taken += 1
        environment: RestorableEnvironment = cut.task.env  # pyright: ignore[reportAssignmentType] - checked at the start
        return Task(group, CutEnvironment(environment, cut), cut.task.config, 0)


class KnownTasks(TaskStream):
    """A stream that remembers what it gave."""

    def __init__(self, environments: list[tuple[Environment, EnvConfig]], seed: int) -> None:
        super().__init__(environments, seed)
        self.given: dict[str, Task] = {}
        """by group, until somebody takes it away"""

    def next(self) -> Task:
        """The next task."""
        task = super().next()
        self.given[str(task.group)] = task
        return task


def cuts_of(group: Group, task: Task, *, seed: int) -> list[Cut]:
    """A prefix of each rollout that has a second turn: one of its turn boundaries, all as likely.

    Args:
        group: Recorded rollouts of one task.
        task: That task.
        seed: Of the run.
    """
    cuts: list[Cut] = []
    for number, trace in enumerate(group.traces):
        branch = trace.branches[0]
        boundaries = turn_boundaries(branch.action_mask)
        if len(boundaries):
            at = int(np.random.default_rng([seed, _CUT, task.group, number]).choice(boundaries))
            cuts.append(
                Cut(f"{trace.trace_id}@{at}", task, branch.token_ids[:at].copy(), branch.action_mask[:at].copy())
            )
    return cuts
