"""Which task comes next: a function of the seed and the position, and of weights where an algorithm has them.

Notable:
- Environments are drawn by weight. Each then walks through a fresh permutation of its tasks per epoch; or, where the
  algorithm weighs prompts, every draw is of its own: by those weights, from the seed and the position alone.
- So a stream's state is its position, and a run that is restored with its algorithm goes on with the same tasks.
- Weighted draws need no list of weights: a task drawn evenly is kept with its weight as the probability, else again.
- Seeds of sampling requests come from (run seed, group, sample, turn) by hashing: no state, no order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.environments.protocol import Environment
from services.config.orchestrator import EnvConfig


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to roll out `group_size` times."""

    group: int
    """position in the run's stream of tasks"""
    env: Environment
    config: EnvConfig
    index: int

    @property
    def task_id(self) -> str:
        """Printable name."""
        return self.env.task_id(self.index)


class TaskStream:
    """The endless, seeded stream of tasks."""

    def __init__(
        self,
        environments: list[tuple[Environment, EnvConfig]],
        seed: int,
        prompt_weight: Callable[[str], float] | None = None,
    ) -> None:
        """Begin at position 0.

        Args:
            environments: with their `[[env]]` sections.
            seed: the run's.
            prompt_weight: a prompt's weight in (0, 1], asked at each draw; None = every task once an epoch.
        """
        self._environments = environments
        self._seed = seed
        self._prompt_weight = prompt_weight
        self._weights = np.array([config.weight for _, config in environments])
        self._begin()

    def _begin(self) -> None:
        self._rng = np.random.default_rng([self._seed, 0])
        self._orders: list[list[int]] = [[] for _ in self._environments]
        self._epochs = [0] * len(self._environments)
        self._position = 0

    def next(self) -> Task:
        """The next task."""
        which = int(self._draw_environments(None))
        env, config = self._environments[which]
        index = self._next_in_order(which) if self._prompt_weight is None else self._drawn_by_weight(which)
        task = Task(self._position, env, config, index)
        self._position += 1
        return task

    def describe(self, task: Task) -> list[int]:
        """A task of this stream as three numbers: position, environment, index."""
        which = next(which for which, (_, config) in enumerate(self._environments) if config is task.config)
        return [task.group, which, task.index]

    def again(self, described: list[int]) -> Task:
        """The task that `describe` described: the same prompt, whatever prompts weigh by now.

        Raises:
            ValueError: no task of these environments.
        """
        group, which, index = described
        if not (0 <= which < len(self._environments) and 0 <= index < self._environments[which][0].num_tasks):
            raise ValueError(f"task {group} is number {index} of environment {which}, which is not there")
        env, config = self._environments[which]
        return Task(group, env, config, index)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a stream of the same seed and environments was."""
        self._begin()
        self._position = int(state["position"])
        drawn = self._draw_environments(self._position)
        if self._prompt_weight is not None:
            return
        for which, count in enumerate(np.bincount(drawn, minlength=len(self._environments)).tolist()):
            num_tasks = self._environments[which][0].num_tasks
            self._epochs[which], taken = divmod(count, num_tasks)
            if taken:
                self._start_epoch(which)
                del self._orders[which][num_tasks - taken :]

    def _draw_environments(self, num: int | None) -> Any:
        """One environment, or an array of as many as `num` calls for one would draw."""
        return self._rng.choice(len(self._environments), size=num, p=self._weights / self._weights.sum())

    def _next_in_order(self, which: int) -> int:
        if not self._orders[which]:
            self._start_epoch(which)
        return self._orders[which].pop()

    def _start_epoch(self, which: int) -> None:
        num_tasks = self._environments[which][0].num_tasks
        order = np.random.default_rng([self._seed, 1, which, self._epochs[which]]).permutation(num_tasks)
        self._orders[which] = order.tolist()[::-1]
        self._epochs[which] += 1

    def _drawn_by_weight(self, which: int) -> int:
        env, config = self._environments[which]
        assert self._prompt_weight is not None
        rng = np.random.default_rng([self._seed, 2, which, self._position])
        while True:
            index = int(rng.integers(env.num_tasks))
            weight = self._prompt_weight(prompt_id_of(config.type, env.task_id(index)))
            assert 0.0 < weight <= 1.0, f"a weight of {weight} is no probability"
            if rng.random() < weight:
                return index


def prompt_id_of(env_type: str, task_id: str) -> str:
    """What an algorithm knows a prompt by: the same in any epoch."""
    return f"{env_type}:{task_id}"


def request_seed(run_seed: int, *parts: int) -> int:
    """A 31-bit seed of one sampling request."""
    text = ":".join(map(str, (run_seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
