"""The stream of scored groups: starts rollouts while they can still be fresh, admits, scores each group once.

Notable:
- A rollout is started only if, used in the batch it will fall into, it is within `max_off_policy_steps` of the version
  trained then. So staleness is bounded by how far generation runs ahead; 0 gives a fully on-policy run.
- Rollouts go on while trainers work and while weights change under them.
- When a group's last trace ends, its admitted traces become samples and ONE scoring request carries all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from loguru import logger

from orchestrator.admission import Outcomes, cause_of_invalid
from orchestrator.rollout import Engine, EnvironmentFailed, PromptTooLong, Sampling, roll_out
from orchestrator.tasks import Task, TaskStream
from orchestrator.threads import Threads
from services.config.orchestrator import OrchestratorConfig
from services.transport.score_client import ScoreClient
from services.wire.errors import DeadlineExceeded
from services.wire.samples import Trace, TrainingSample

ENVIRONMENT_THREADS = 16


@dataclass(slots=True)
class Group:
    """The valid traces of one prompt, with their samples in order."""

    traces: list[Trace]
    samples: list[TrainingSample]


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
        """
        self._config = config
        self._tasks = tasks
        self._engines = engines
        self._scorer = scorer
        self._outcomes = outcomes
        self._max_tokens = max_tokens
        self._min_group = min_group
        self._may_start = may_start
        self._sampling = Sampling(config.temperature, seed, config.rollout_deadline_s)
        self._threads = Threads(ENVIRONMENT_THREADS, name="environment")
        self._running: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._wake = asyncio.Event()
        self._ready: asyncio.Queue[Group] = asyncio.Queue()
        self._num_ready = 0
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

    async def run(self) -> None:
        """Start rollouts for ever; ends by cancellation, or by the first error that is not a trace's own."""
        size = self._config.group_size
        async with asyncio.TaskGroup() as group:
            while True:
                while self._in_flight + size <= max(self._config.max_concurrent_rollouts, size) and self._may_start(
                    self._in_flight + self._num_ready
                ):
                    self._in_flight += size
                    group.create_task(self._produce(self._tasks.next()))
                self._wake.clear()
                await self._wake.wait()

    async def next_group(self) -> Group:
        """The next finished group, in order of completion."""
        group = await self._ready.get()
        self._num_ready -= len(group.traces)
        return group

    async def _produce(self, task: Task) -> None:
        size = self._config.group_size
        try:
            finished = await asyncio.gather(*(self._one(task, sample) for sample in range(size)))
            traces = [trace for trace in finished if trace is not None]
            if len(traces) < self._min_group:
                self._outcomes.drop("group_too_small", len(traces))
                return
            group = Group(traces, [sample for trace in traces for sample in samples_of(trace)])
            if self._scorer is not None:
                await score_group(group, self._scorer, deadline_s=self._config.score_deadline_s)
            self._num_ready += len(traces)
            self._ready.put_nowait(group)
        finally:
            self._in_flight -= size
            self._wake.set()

    async def _one(self, task: Task, sample: int) -> Trace | None:
        engine = self._engines[(task.group + sample) % len(self._engines)]
        trace_id = f"{task.task_id} (group {task.group}, sample {sample})"
        try:
            async with asyncio.timeout(self._config.rollout_deadline_s):
                trace = await roll_out(task, sample, engine, self._sampling, self._threads)
        except EnvironmentFailed as error:
            return self._reject("env_error", f"{trace_id}: {error}")
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
            prompt_id=f"{trace.env}:{trace.task_id}",
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
