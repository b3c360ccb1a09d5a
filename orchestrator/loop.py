"""The method itself, top to bottom: generate, admit, score, credit, pack, send, wait, publish.

Notable:
- `critic_first`: the critic's grid is applied before the policy's is sent; the policy then trains while the next batch
  is already being rolled out, so generation runs at most `max_off_policy_steps` versions behind.
- `overlap`: both grids go at once, and the policy never waits for the critic's work on the same batch. Before the grids
  of step s the critic must be done with step s - 1 - `max_critic_lag`: with 0 the two train side by side and meet after
  each step, above 0 the critic may fall behind. Its metrics rows come when its steps are done, all before the run ends.
- Where roles share devices, each phase begins by taking its turn (`orchestrator.turns`): rollouts end, then the critic
  scores the whole batch, one request a group, trains and sleeps, then the policy trains and sleeps.
- `value.refresh = "refreshed"`, with `critic_first` only: between the two, the batch is scored again and its advantages
  follow the new values.
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
from orchestrator.checkpointer import Checkpointer
from orchestrator.critic_grids import CriticGrids
from orchestrator.evaluate import Evaluator
from orchestrator.first_fit import check_first_fit
from orchestrator.metrics import JsonLines, Metrics, rollout_row, scoring_row, trace_row
from orchestrator.producer import Group, GroupSource, score_groups
from orchestrator.publisher import Publisher
from orchestrator.recorder import Recorder
from orchestrator.refresh import refresh_advantages
from orchestrator.telemetry import Telemetry
from orchestrator.turns import Turns
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
    producer: GroupSource
    outcomes: Outcomes
    recorder: Recorder | None
    checkpointer: Checkpointer
    publisher: Publisher
    scorer: ScoreClient | None
    policy_sender: GridSender
    critic_grids: CriticGrids | None
    evaluators: list[Evaluator]
    metrics: Metrics
    traces: JsonLines
    telemetry: Telemetry
    turns: Turns
    is_replay: bool = False
    """recorded batches train as they are, whatever version comes next; scoring waits for nothing but its turn"""


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


def fresh_traces(group: Group, version: int, config: Config) -> list[Trace]:
    """Traces of a group that are fresh enough to train `version`."""
    limit = config.orchestrator.max_off_policy_steps
    return [trace for trace in group.traces if version - trace.oldest_version <= limit]


def drop_stale(group: Group, version: int, config: Config, outcomes: Outcomes) -> Group | None:
    """The part of a group that is fresh enough to train `version`; None where that is too small a group."""
    fresh = fresh_traces(group, version, config)
    if len(fresh) < len(group.traces):
        outcomes.drop("stale", len(group.traces) - len(fresh))
    if len(fresh) < config.algorithm.min_group:
        if fresh:
            outcomes.drop("group_too_small", len(fresh))
        return None
    kept = {trace.trace_id for trace in fresh}
    return Group(fresh, [sample for sample in group.samples if sample.trace_id in kept], group.order)


class Loop:
    """One run."""

    def __init__(self, config: Config, context: RunContext, parts: Parts, clock: Clock) -> None:
        self._config = config
        self._context = context
        self._parts = parts
        self._clock = clock
        self.taken: list[Group] = []
        """groups of the batch that is being made up"""
        self.evaluated_at = -1
        """finished steps when the evaluations ran last"""

    @property
    def lacks_evaluation(self) -> bool:
        """Is the evaluation after the last step still to be made."""
        return bool(self._parts.evaluators) and self.evaluated_at < self._config.orchestrator.max_steps

    async def run(self) -> None:
        """Train until `max_steps` steps are done, or a commit was requested and made."""
        max_steps, overlap = self._config.orchestrator.max_steps, self._config.orchestrator.schedule == "overlap"
        first_step = self._parts.checkpointer.committed or 0
        await self._evaluate(first_step, always=first_step == 0)
        for step in range(first_step, max_steps):
            groups = await self._collect(step)
            if groups is None:
                await self._commit(step)
                return
            await self._score(groups)
            await self._record(step, groups)
            samples = self._credit(step, groups)
            check_first_fit(self._config, step, samples)
            if overlap:
                await self._critic_done(step - 1 - self._config.orchestrator.max_critic_lag)
                self._send_critic(step, samples)
            else:
                self._send_critic(step, samples)
                await self._critic_done(step)
                await self._refresh(step, groups)
            await self._send_policy(step, samples)
            self._write_turns(step)
            await self._evaluate(step + 1, always=False)
            if step + 1 < max_steps and self._parts.checkpointer.is_due(step + 1):
                await self._commit(step + 1)
        await self._critic_done(max_steps - 1)
        await self._published(self._clock.version_at(max_steps))
        await self._evaluate(max_steps, always=True)
        await self._commit(max_steps)

    async def _collect(self, step: int) -> list[Group] | None:
        """Take finished groups until the batch holds `batch_size` valid traces that are fresh enough.

        Returns:
            Them; or None as soon as a commit is requested, what was taken so far in `taken`.
        """
        await self._parts.turns.take("critic" if self._parts.is_replay else "inference")
        self._parts.telemetry.enter("rollouts")
        self._clock.step, self._clock.num_taken = step, 0
        self._parts.producer.poke()
        version, started = self._clock.version_at(step), time.monotonic()
        while self._clock.num_taken < self._config.orchestrator.batch_size:
            if not await self._parts.checkpointer.unless_requested(self._parts.producer.ready):
                return None
            group = await self._parts.producer.next_group()  # at once: no rollout starts between here and the count
            self.taken.append(group)
            self._clock.num_taken += self._num_training(group, version)
            self._parts.producer.poke()
        finished = [trace for group in self.taken for trace in group.traces]
        admitted = self._admitted(version)
        row = rollout_row(finished, admitted, version)
        row |= {f"rollout/dropped/{cause}": float(n) for cause, n in self._parts.outcomes.take_counts().items()}
        row["time/rollout_wait_s"] = time.monotonic() - started
        row |= await self._parts.telemetry.take_rates()
        self._parts.metrics.add("rollout", step, row)
        self._clock.step, self._clock.num_taken = step + 1, 0
        self._parts.producer.poke()
        return admitted

    def _num_training(self, group: Group, version: int) -> int:
        """Traces of a group that its batch will hold."""
        if self._parts.is_replay:
            return len(group.traces)
        num_fresh = len(fresh_traces(group, version, self._config))
        return num_fresh if num_fresh >= self._config.algorithm.min_group else 0

    def _admitted(self, version: int) -> list[Group]:
        """The fresh part of what was taken, which is a batch from now on; the rest is counted."""
        taken, self.taken = self.taken, []
        if self._parts.is_replay:
            return taken
        fresh = [drop_stale(group, version, self._config, self._parts.outcomes) for group in taken]
        return [group for group in fresh if group is not None]

    async def _score(self, groups: list[Group]) -> None:
        """Score the batch, one request a group, where the critic had to wait for its turn to do so."""
        turns, scorer = self._parts.turns, self._parts.scorer
        # engines that share are held at once: no rollout starts between the end of the batch and here
        await turns.take("critic" if turns.includes("critic") else "policy")
        if scorer is None or not turns.includes("critic") or self._parts.is_replay:  # a replay scores what it takes
            return
        self._parts.telemetry.enter("values of the batch")
        deadline_s = self._config.orchestrator.score_deadline_s
        await score_groups(groups, scorer, deadline_s=deadline_s)

    async def _commit(self, step: int) -> None:
        """Commit the run after `step` steps, once both trainers and the engines are where these have led."""
        if self._parts.checkpointer.committed == step:
            return
        await self._critic_done(step - 1)
        await self._published(self._clock.version_at(step))
        self._parts.telemetry.enter(f"commit of step {step}")
        await self._parts.checkpointer.commit(step)

    async def _record(self, step: int, groups: list[Group]) -> None:
        """Keep the batch as it was scored, for `counterpoint replay`."""
        if self._parts.recorder is not None:
            self._parts.telemetry.enter("record of rollouts")
            await self._parts.recorder.record(step, groups, policy_version=self._clock.version_at(step))

    def _credit(self, step: int, groups: list[Group]) -> list[TrainingSample]:
        """Turn rewards and values into advantages and targets; keep a few traces for people."""
        self._parts.telemetry.enter("credit")
        row = self._parts.algorithm.credit([group.samples for group in groups])
        traces = {trace.trace_id: trace for group in groups for trace in group.traces}
        samples = [sample for group in groups for sample in group.samples]
        self._parts.metrics.add("credit", step, row | scoring_row(step, samples))
        for sample in samples[: self._config.monitor.traces_per_step]:
            self._parts.traces.write(trace_row(step, traces[sample.trace_id], sample))
        return samples

    def _send_critic(self, step: int, samples: list[TrainingSample]) -> None:
        """Hand the critic's grid over; `critic_grids` takes it from there."""
        if self._parts.critic_grids is None:
            return
        value = self._config.value
        assert value is not None
        items = build_grid(
            samples,
            stream="critic",
            seq_len=value.model.seq_len,
            num_data_ranks=self._config.num_value_data_ranks,
            step=step,
            loss_name=value.loss.type,
            loss_constants=value.loss.loss_constants(),
            num_mini_batches=value.mini_batches,
            **self._balance(value.packing, has_vocabulary=False),
            **self._identity(step),
        )
        self._parts.critic_grids.send(items)

    async def _critic_done(self, step: int) -> None:
        """Wait until the critic's `/status` says that `step` is done; steps before the first always are."""
        if self._parts.critic_grids is not None and not self._parts.critic_grids.is_done(step):
            self._parts.telemetry.enter(f"critic step {step}")
            await self._parts.critic_grids.wait_done(step)

    async def _refresh(self, step: int, groups: list[Group]) -> None:
        """Score the batch again where asked to, and take its advantages from the new values."""
        value, scorer = self._config.value, self._parts.scorer
        if value is None or scorer is None or value.refresh != "refreshed" or step < self._clock.critic_only_steps:
            return
        self._parts.telemetry.enter("refreshed values")
        deadline_s = self._config.orchestrator.score_deadline_s
        row = await refresh_advantages(
            groups, self._parts.algorithm, scorer, deadline_s=deadline_s, one_at_a_time=self._parts.is_replay
        )
        self._parts.metrics.add("refresh", step, row)

    async def _send_policy(self, step: int, samples: list[TrainingSample]) -> None:
        """Send the policy's grid; the publisher takes it from there."""
        if step < self._clock.critic_only_steps:
            return
        version = self._clock.version_at(step)
        await self._parts.turns.take("policy")
        self._parts.telemetry.enter(f"policy to take step {step}")
        items = build_grid(
            samples,
            stream="policy",
            seq_len=self._config.policy.model.seq_len,
            num_data_ranks=self._config.num_policy_data_ranks,
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

    def _write_turns(self, step: int) -> None:
        """What this step's hand-overs of shared devices cost."""
        row = self._parts.turns.take_row()
        if row:
            self._parts.metrics.add("turns", step, row)

    async def _published(self, version: int) -> None:
        if self._parts.publisher.version < version and not self._parts.checkpointer.is_requested:
            await self._parts.turns.take("inference")
        self._parts.telemetry.enter(f"engines to serve version {version}")
        await self._parts.publisher.wait_for(version)

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
        if self.evaluated_at == step:
            return
        for evaluator in self._parts.evaluators:
            if always or (evaluator.is_due(step) and not last):
                await self._parts.turns.take("inference")
                self._parts.telemetry.enter(f"evaluation of {evaluator.config.type}")
                version = self._parts.publisher.version
                row = await self._parts.checkpointer.unless_requested(evaluator.run)
                if row is None:
                    return  # a later start makes up for it
                self._parts.metrics.add("eval", step, row | {"eval/version": version})
                self.evaluated_at = step
                logger.info("evaluation after {} steps: {}", step, row)
