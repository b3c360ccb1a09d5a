"""The method itself, top to bottom: generate, admit, score, credit, pack, send, wait, publish.

Notable:
- `critic_first`: the critic's grid is applied before the policy's is sent; the policy then trains while the next batch
  is already being rolled out, so generation runs at most `max_off_policy_steps` versions behind.
- `value.refresh = "refreshed"`: between the two, the batch is scored again and its advantages follow the new values.
- In critic-only steps the policy gets no grid and its version stays.
- Step numbers of the policy's grids are its versions; the critic's are the run's steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from orchestrator.admission import Outcomes
from orchestrator.algorithms import Algorithm
from orchestrator.evaluate import Evaluator
from orchestrator.metrics import JsonLines, Metrics, rollout_row, trace_row
from orchestrator.producer import Group, Producer
from orchestrator.publisher import Publisher
from orchestrator.refresh import refresh_advantages
from orchestrator.telemetry import Telemetry
from orchestrator.trainers import TrainClient
from services.config.context import RunContext
from services.config.schema import Config
from services.config.train import PackingConfig
from services.packing.cost import cost_of_role
from services.packing.grid import build_grid
from services.transport.grid_sender import GridSender
from services.transport.score_client import ScoreClient
from services.wire.samples import Trace, TrainingSample


@dataclass
class Parts:
    """What the loop conducts."""

    algorithm: Algorithm
    producer: Producer
    outcomes: Outcomes
    publisher: Publisher
    policy: TrainClient
    critic: TrainClient | None
    scorer: ScoreClient | None
    policy_sender: GridSender
    critic_sender: GridSender | None
    evaluators: list[Evaluator]
    metrics: Metrics
    traces: JsonLines
    telemetry: Telemetry


class Clock:
    """Which version each step trains, and whether a rollout started now can still be fresh in its batch."""

    def __init__(self, config: Config) -> None:
        self._config = config.orchestrator
        self.critic_only_steps = config.value.warmup.critic_only_steps if config.value else 0
        self.step = 0
        """the step whose batch is being made up"""
        self.num_taken = 0
        """traces that batch holds already"""

    def version_at(self, step: int) -> int:
        """The policy version that step trains."""
        return max(0, step - self.critic_only_steps)

    def may_start(self, num_pending: int, engine_version: int) -> bool:
        """May another group start, given traces pending and the version the engines serve."""
        step = self.step + (self.num_taken + num_pending) // self._config.batch_size
        if step >= self._config.max_steps:
            return False
        return self.version_at(step) - engine_version <= self._config.max_off_policy_steps


def drop_stale(group: Group, version: int, config: Config, outcomes: Outcomes) -> Group | None:
    """The part of a group that is fresh enough to train `version`; None where that is too small a group."""
    limit = config.orchestrator.max_off_policy_steps
    fresh = [trace for trace in group.traces if version - trace.oldest_version <= limit]
    if len(fresh) < len(group.traces):
        outcomes.drop("stale", len(group.traces) - len(fresh))
    if len(fresh) < config.algorithm.min_group:
        if fresh:
            outcomes.drop("group_too_small", len(fresh))
        return None
    kept = {trace.trace_id for trace in fresh}
    return Group(fresh, [sample for sample in group.samples if sample.trace_id in kept])


class Loop:
    """One run."""

    def __init__(self, config: Config, context: RunContext, parts: Parts, clock: Clock) -> None:
        self._config = config
        self._context = context
        self._parts = parts
        self._clock = clock

    async def run(self) -> None:
        """Train `max_steps` steps."""
        await self._evaluate(0, always=True)
        for step in range(self._config.orchestrator.max_steps):
            groups = await self._collect(step)
            samples = self._credit(step, groups)
            await self._train_critic(step, groups, samples)
            await self._train_policy(step, samples)
            await self._evaluate(step + 1, always=False)
        await self._parts.publisher.wait_for(self._clock.version_at(self._config.orchestrator.max_steps))
        await self._evaluate(self._config.orchestrator.max_steps, always=True)

    async def _collect(self, step: int) -> list[Group]:
        """Take finished groups until the batch holds `batch_size` valid traces that are fresh enough."""
        self._parts.telemetry.enter("rollouts")
        self._clock.step, self._clock.num_taken = step, 0
        self._parts.producer.poke()
        version, started = self._clock.version_at(step), time.monotonic()
        admitted: list[Group] = []
        finished: list[Trace] = []
        while self._clock.num_taken < self._config.orchestrator.batch_size:
            group = await self._parts.producer.next_group()
            finished += group.traces
            fresh = drop_stale(group, version, self._config, self._parts.outcomes)
            if fresh is not None:
                admitted.append(fresh)
                self._clock.num_taken += len(fresh.traces)
            self._parts.producer.poke()
        row = rollout_row(finished, admitted, version)
        row |= {f"rollout/dropped/{cause}": float(n) for cause, n in self._parts.outcomes.take_counts().items()}
        row["time/rollout_wait_s"] = time.monotonic() - started
        row |= await self._parts.telemetry.take_rates()
        self._parts.metrics.add("rollout", step, row)
        self._clock.step, self._clock.num_taken = step + 1, 0
        self._parts.producer.poke()
        return admitted

    def _credit(self, step: int, groups: list[Group]) -> list[TrainingSample]:
        """Turn rewards and values into advantages and targets; keep a few traces for people."""
        self._parts.telemetry.enter("credit")
        row = self._parts.algorithm.credit([group.samples for group in groups])
        self._parts.metrics.add("credit", step, row)
        traces = {trace.trace_id: trace for group in groups for trace in group.traces}
        samples = [sample for group in groups for sample in group.samples]
        for sample in samples[: self._config.monitor.traces_per_step]:
            self._parts.traces.write(trace_row(step, traces[sample.trace_id], sample))
        return samples

    async def _train_critic(self, step: int, groups: list[Group], samples: list[TrainingSample]) -> None:
        """Send the critic's grid, wait until its `/status` says the step is done, refresh advantages where asked to."""
        if self._parts.critic is None or self._parts.critic_sender is None:
            return
        value = self._config.value
        assert value is not None
        self._parts.telemetry.enter(f"critic step {step}")
        started, deadline_s = time.monotonic(), self._config.orchestrator.step_deadline_s
        items = build_grid(
            samples,
            stream="critic",
            seq_len=value.model.seq_len,
            num_data_ranks=self._config.deployment.num_value_gpus,
            step=step,
            loss_name=value.loss.type,
            loss_constants=value.loss.loss_constants(),
            **self._balance(value.packing, has_vocabulary=False),
            **self._identity(step),
        )
        await self._parts.critic_sender.send(items, deadline_s=deadline_s)
        row = await self._parts.critic.wait_step(step, deadline_s=deadline_s)
        row = row | {"time/critic_s": time.monotonic() - started}
        if value.refresh == "refreshed" and step >= self._clock.critic_only_steps and self._parts.scorer is not None:
            self._parts.telemetry.enter("refreshed values")
            deadline_s = self._config.orchestrator.score_deadline_s
            row |= await refresh_advantages(groups, self._parts.algorithm, self._parts.scorer, deadline_s=deadline_s)
        self._parts.metrics.add("critic", step, row)

    async def _train_policy(self, step: int, samples: list[TrainingSample]) -> None:
        """Send the policy's grid; the publisher takes it from there."""
        if step < self._clock.critic_only_steps:
            return
        version = self._clock.version_at(step)
        self._parts.telemetry.enter(f"policy to take step {step}")
        items = build_grid(
            samples,
            stream="policy",
            seq_len=self._config.policy.model.seq_len,
            num_data_ranks=self._config.deployment.num_policy_gpus,
            step=version,
            loss_name=self._config.algorithm.policy_loss,
            loss_constants=self._config.algorithm.loss_constants(),
            num_mini_batches=self._config.policy.mini_batches,
            denominator=self._config.policy.denominator,
            denominator_tokens=self._config.policy.denominator_tokens or 0,
            **self._balance(self._config.policy.packing, has_vocabulary=True),
            **self._identity(step),
        )
        await self._parts.policy_sender.send(items, deadline_s=self._config.orchestrator.step_deadline_s)
        self._parts.publisher.expect(version + 1)

    def _identity(self, step: int) -> dict:
        return {
            "run_id": self._context.run_id,
            "epoch": self._context.epoch,
            "policy_version": self._clock.version_at(step),
            "temperature": self._config.orchestrator.temperature,
        }

    def _balance(self, packing: PackingConfig, *, has_vocabulary: bool) -> dict:
        cost = cost_of_role(packing, Path(self._context.model_dir), has_vocabulary=has_vocabulary)
        return {"cost": cost, "max_samples": packing.max_samples}

    async def _evaluate(self, step: int, *, always: bool) -> None:
        last = step == self._config.orchestrator.max_steps
        for evaluator in self._parts.evaluators:
            if always or (evaluator.is_due(step) and not last):
                self._parts.telemetry.enter(f"evaluation of {evaluator.config.type}")
                version = self._parts.publisher.version
                row = await evaluator.run()
                self._parts.metrics.add("eval", step, row | {"eval/version": version})
                logger.info("evaluation after {} steps: {}", step, row)
