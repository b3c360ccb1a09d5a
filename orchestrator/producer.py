"""The stream of scored groups: starts rollouts while they can still be fresh, admits, scores each group once.

Notable:
- A rollout is started only if, used in the batch it will fall into, it is within `max_off_policy_steps` of the version
  trained then. So staleness is bounded by how far generation runs ahead; 0 gives a fully on-policy run.
- Rollouts go on while trainers work and while weights change under them.
- When a group's last trace ends, its admitted traces become samples, their rewards are shaped as `[env.reward]` says,
  and ONE scoring request carries all of them.
- Waiting for a group has an end even where `max_bad_fraction` allows everything: see `next_group`.
- A commit keeps finished groups as they are, and of those in flight the tasks. These are rolled out anew, under their
  old numbers: so no task is lost, and none is trained twice. What a rollout that is done twice had already counted as
  dropped is counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from loguru import logger

from orchestrator.admission import Outcomes, cause_of_invalid
from orchestrator.algorithms.shaping import shape
from orchestrator.environments.protocol import PrefixMismatch
from orchestrator.rollout import MAX_TOKEN_ID, Engine, EnvironmentFailed, PromptTooLong, Sampling, roll_out
from orchestrator.tasks import Task, TaskStream, prompt_id_of
from orchestrator.threads import Threads
from services.config.orchestrator import OrchestratorConfig
from services.transport.score_client import ScoreClient
from services.wire.errors import DeadlineExceeded
from services.wire.rollouts import Group
from services.wire.samples import Trace, TrainingSample

__all__ = ["Group", "GroupSource", "Producer", "samples_of", "score_group", "score_groups"]

ENVIRONMENT_THREADS = 16


class GroupSource(Protocol):
    """Where the loop's groups come from: rollouts of now, or recorded ones."""

    num_sampled_tokens: int

    @property
    def num_in_flight(self) -> int:
        """Traces being rolled out or scored."""
        ...

    @property
    def num_ready(self) -> int:
        """Traces in finished groups that no batch has taken yet."""
        ...

    def poke(self) -> None:
        """Something has changed that new rollouts depend on."""
        ...

    async def run(self) -> None:
        """Work for ever; ends by cancellation or by the first failure."""
        ...

    async def ready(self) -> bool:
        """Wait until there is a group to take; may be cancelled and called again."""
        ...

    async def next_group(self) -> Group:
        """The next finished group."""
        ...

    def pending(self) -> list[Group]:
        """Finished groups that no batch has taken, in order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Whatever else a later start needs to go on from here, as JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any], pending: list[Group]) -> None:
        """Go on from there; before `run`."""
        ...


class Producer:
    """Keeps rollouts in flight and hands out finished groups."""

    def __init__(
        self,
        config: OrchestratorConfig,
        tasks: TaskStream,
        engines: list[Engine],
        scorer: ScoreClient | None,
        outcomes: Outcomes,
        *,
        seed: int,
        max_tokens: int,
        min_group: int,
        may_start: Callable[[int], bool],
        max_token_id: int = MAX_TOKEN_ID,
    ) -> None:
        """Build the producer.

        Args:
            config: the `[orchestrator]` section.
            tasks: the stream of prompts.
            engines: inference engines, used in turn.
            scorer: the value service's client, or None without a critic.
            outcomes: where drops are counted.
            seed: the run's seed.
            max_tokens: longest trainable branch.
            min_group: valid traces a group must keep.
            may_start: given the number of traces pending (in flight or ready), may another group start now.
            max_token_id: greatest id that the models know; an environment that gives a greater one fails.
        """
        self._config = config
        self._tasks = tasks
        self._engines = engines
        self._scorer = scorer
        self._outcomes = outcomes
        self._max_tokens = max_tokens
        self._min_group = min_group
        self._may_start = may_start
        self._sampling = Sampling(config.temperature, seed, config.rollout_deadline_s, max_token_id)
        self._threads = Threads(ENVIRONMENT_THREADS, name="environment")
        self._under_way: dict[int, Task] = {}  # by position
        self._again: deque[Task] = deque()  # were under way when the run was committed
        self._in_flight = 0
        self._wake = asyncio.Event()
        self._held = False
        self._ended = asyncio.Event()
        self._ready: deque[Group] = deque()
        self._has_ready = asyncio.Event()
        self._num_ready = 0
        self._num_ended = 0  # rollouts, valid or not
        self._num_scored = 0  # groups, over the whole run
        self.num_sampled_tokens = 0

    @property
    def num_in_flight(self) -> int:
        """Traces being rolled out or scored."""
        return self._in_flight

    @property
    def num_ready(self) -> int:
        """Traces in finished groups that no batch has taken yet."""
        return self._num_ready

    def poke(self) -> None:
        """Something that `may_start` looks at has changed."""
        self._wake.set()

    def hold(self) -> None:
        """Start no more rollouts until `go_on`: the engines are about to sleep."""
        self._held = True

    def go_on(self) -> None:
        """Start rollouts again."""
        self._held = False
        self.poke()

    async def at_rest(self) -> bool:
        """Wait until no rollout is under way; may be cancelled and called again."""
        while self._in_flight:
            self._ended.clear()
            await self._ended.wait()
        return True

    async def run(self) -> None:
        """Start rollouts for ever; ends by cancellation, or by the first error that is not a trace's own."""
        size = self._config.group_size
        async with asyncio.TaskGroup() as group:
            while True:
                while self._has_room and self._may_start(self._in_flight + self._num_ready):
                    self._in_flight += size
                    task = self._again.popleft() if self._again else self._tasks.next()
                    self._under_way[task.group] = task
                    group.create_task(self._produce(task))
                self._wake.clear()
                await self._wake.wait()

    @property
    def _has_room(self) -> bool:
        """For one more group of rollouts."""
        size = self._config.group_size
        return not self._held and self._in_flight + size <= max(self._config.max_concurrent_rollouts, size)

    async def next_group(self) -> Group:
        """The next finished group, in order of completion; at once where one is ready.

        Raises:
            DeadlineExceeded, BadData: see `ready`.
        """
        await self.ready()
        group = self._ready.popleft()
        if not self._ready:
            self._has_ready.clear()
        self._num_ready -= len(group.traces)
        return group

    async def ready(self) -> bool:
        """Wait until there is a group to take.

        A rollout may take `rollout_deadline_s`, scoring its group `score_deadline_s`. The wait is looked at each time
        that both have passed. It starts anew where nothing was in flight at its beginning, since then it is for the
        weights, which the publisher waits for; and where invalid rollouts ended, unless these are enough to judge by.

        Raises:
            DeadlineExceeded: rollouts were in flight all the time, and no group of them ended.
            BadData: `bad_window` rollouts ended meanwhile, and no valid group among them.
        """
        deadline_s, at_first = self._config.rollout_deadline_s + self._config.score_deadline_s, self._num_ended
        while True:
            num_ended, was_idle = self._num_ended, self._in_flight == 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    return await self._has_ready.wait()
            if self._num_ended - at_first >= self._config.bad_window:
                self._outcomes.fruitless(self._num_ended - at_first, deadline_s)
            if self._num_ended == num_ended and not was_idle:
                raise DeadlineExceeded(
                    f"a group to end and be scored, of {self._in_flight} rollouts in flight", deadline_s
                )

    def pending(self) -> list[Group]:
        """Finished groups that no batch has taken, in order."""
        return list(self._ready)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream of tasks is, which of its tasks are under way, and how many groups were scored."""
        under_way = [*self._under_way.values(), *self._again]
        return {
            "tasks": self._tasks.state_dict(),
            "under_way": sorted(self._tasks.describe(task) for task in under_way),
            "num_scored": self._num_scored,
        }

    def load_state_dict(self, state: dict[str, Any], pending: list[Group]) -> None:
        """Go on from there: what was under way comes first, and is rolled out anew."""
        self._tasks.load_state_dict(state["tasks"])
        self._again.extend(self._tasks.again(described) for described in state["under_way"])
        self._num_scored = int(state["num_scored"])
        for group in pending:
            self._hand_out(group)

    def _hand_out(self, group: Group) -> None:
        self._num_ready += len(group.traces)
        self._ready.append(group)
        self._has_ready.set()

    async def _produce(self, task: Task) -> None:
        size = self._config.group_size
        try:
            finished = await asyncio.gather(*(self._one(task, sample) for sample in range(size)))
            traces = [trace for trace in finished if trace is not None]
            if len(traces) < self._min_group:
                if traces:
                    self._outcomes.drop("group_too_small", len(traces))
                return
            reward = task.config.reward
            group = Group(traces, [sample for trace in traces for sample in shape(samples_of(trace), trace, reward)])
            if self._scorer is not None:
                await score_group(group, self._scorer, deadline_s=self._config.score_deadline_s)
            group.order, self._num_scored = self._num_scored, self._num_scored + 1
            self._hand_out(group)
        finally:
            del self._under_way[task.group]
            self._in_flight -= size
            self._num_ended += size
            self._ended.set()
            self._wake.set()

    async def _one(self, task: Task, sample: int) -> Trace | None:
        engine = self._engines[(task.group + sample) % len(self._engines)]
        trace_id = f"{task.task_id} (group {task.group}, sample {sample})"
        try:
            async with asyncio.timeout(self._config.rollout_deadline_s):
                trace = await roll_out(task, sample, engine, self._sampling, self._threads)
        except EnvironmentFailed as error:
            return self._reject("env_error", f"{trace_id}: {error}")
        except PrefixMismatch as error:
            return self._reject("prefix_mismatch", str(error))
        except PromptTooLong as error:
            return self._reject("over_long", str(error))
        except (TimeoutError, DeadlineExceeded):
            return self._reject("deadline", f"{trace_id}: no end within {self._config.rollout_deadline_s:g} s")
        self.num_sampled_tokens += trace.num_action_tokens
        cause = cause_of_invalid(trace, max_tokens=self._max_tokens)
        if cause is not None:
            return self._reject(cause, trace_id)
        self._outcomes.good()
        return trace

    def _reject(self, cause: str, example: str) -> None:
        logger.debug("dropped a trace: {}: {}", cause, example)
        self._outcomes.bad(cause, example)


def samples_of(trace: Trace) -> list[TrainingSample]:
    """One training sample per trainable branch, in the trace's order."""
    return [
        TrainingSample(
            trace.trace_id,
            trace.group_id,
            branch,
            trace.reward,
            trace.stop_reason,
            prompt_id=prompt_id_of(trace.env, trace.task_id),
        )
        for branch in trace.branches
        if branch.num_action_tokens
    ]


async def score_group(group: Group, scorer: ScoreClient, *, deadline_s: float) -> None:
    """Score every trainable branch of a group by one request; values come back in the branches' order."""
    reply = await scorer.score([s.branch.token_ids.tolist() for s in group.samples], deadline_s=deadline_s)
    for sample, values, bootstrap in zip(group.samples, reply.values, reply.bootstrap_values, strict=True):
        sample.values = np.array(values, dtype=np.float64)
        sample.bootstrap_value = bootstrap
        sample.critic_step = reply.critic_step


async def score_groups(groups: list[Group], scorer: ScoreClient, *, deadline_s: float) -> None:
    """Score groups, one request each and all at once, so that the service packs them together."""
    await asyncio.gather(*(score_group(group, scorer, deadline_s=deadline_s) for group in groups))
