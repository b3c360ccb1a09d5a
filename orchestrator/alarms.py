"""Alarms: what is wrong with a run, told from its rows of metrics, with the numbers and the likely causes.

Notable:
- A row that an alarm is about holds `alarm/<name>` = 1. The line in the log and the event come where an alarm begins,
  and again after REPEAT_STEPS steps at the earliest, however often it comes and goes.
- Before the first update a critic says the same everywhere and nothing is wrong with that: alarms about values arm by
  the critic's own count of updates, which a commit keeps. So does a run that goes on from one.
- The gate: in the first policy step that holds tokens of the very version in training, engine and trainer must agree on
  their log-probabilities. If not, the run ends: every ratio of it would be wrong. Later steps only ring.
- In a replay only the first version is gated: rollouts recorded under other settings are no later version's own.
- A metric that is absent or null is not judged, and neither breaks nor lengthens a series of steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from orchestrator.metrics import JsonLines, Metrics
from services.config.schema import Config
from services.wire.errors import AlarmRaised

REPEAT_STEPS = 100

_WRONG_LOGPROBS = (
    "another temperature (or top-p, top-k) in the engine than orchestrator.temperature, another tokenizer or chat "
    "template, weights that did not reach the engine or are not those of model.path, or a type of low precision in one "
    "of the two (model.dtype, policy.model.dtype)"
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that is wrong."""

    name: str
    what: str
    """with the numbers"""
    causes: str
    is_gate: bool = False
    """ends the run, unless alarms are off"""

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.what}; likely: {self.causes}"


class Alarms:
    """Looks at every row, and remembers what it has said."""

    def __init__(self, config: Config, run_dir: Path, *, is_replay: bool = False) -> None:
        """Make them for one run.

        Args:
            config: `[monitor]` holds the thresholds.
            run_dir: Events go to its `events.jsonl`.
            is_replay: Whether it trains on recorded rollouts.
        """
        self._monitor = config.monitor
        self._updates_per_step = 0
        if config.value is not None:
            self._updates_per_step = config.value.updates_per_batch * config.value.mini_batches
        self._is_replay = is_replay
        self._events = JsonLines(run_dir / "events.jsonl")
        self._series: dict[str, int] = {}
        """by name, steps in a row that something held"""
        self._last_told: dict[str, int] = {}
        self._passed_gate = False
        self.told: list[dict[str, Any]] = []
        """all that was told in this start, as the status page shows it"""

    def look(self, stream: str, step: int, row: dict[str, Any]) -> list[Alarm]:
        """What is wrong by one row; rows of a stream come in order of their steps."""
        if self._monitor.alarms == "off":
            return []
        looks = {"critic": self._critic, "policy": self._policy, "credit": self._credit}
        return list(looks[stream](step, row)) if stream in looks else []

    def tell(self, step: int, found: list[Alarm]) -> None:
        """Say what `look` found at `step`, if it was not said lately.

        Raises:
            AlarmRaised: the gate is among it, or `monitor.alarms` is "stop".
        """
        for alarm in found:
            if alarm.name not in self._last_told or step - self._last_told[alarm.name] >= REPEAT_STEPS:
                self._last_told[alarm.name] = step
                logger.warning("ALARM {} at step {}: {}", alarm.name, step, alarm.text)
                self.told.append({"name": alarm.name, "step": step, "text": alarm.text})
                facts = {"name": alarm.name, "step": step, "what": alarm.what, "likely": alarm.causes}
                self._events.write({"time_s": round(time.time(), 3), "event": "alarm", **facts})
        for alarm in found:
            if alarm.is_gate or self._monitor.alarms == "stop":
                raise AlarmRaised(f"{alarm.name} at step {step}: {alarm.text}")

    def _critic(self, step: int, row: dict[str, Any]) -> Iterator[Alarm]:
        monitor, updates = self._monitor, row.get("value/updates", 0)
        norm, std = row.get("value/head_norm"), row.get("value/value_std")
        variance, outside = row.get("value/explained_variance"), row.get("value/target_oob_fraction")
        if updates > 0 and norm == 0:  # of after the step
            causes = "weights that did not come back after a sleep or a load, or value.optim.lr = 0"
            yield Alarm("head_norm_zero", f"the value head is zero after {updates} updates", causes)
        if updates - self._updates_per_step <= 0:  # all else is from before the step
            return
        if std is not None and std < monitor.min_value_std:
            what = (
                f"the critic says the same everywhere: its values spread by {std:.3g} (limit {monitor.min_value_std:g})"
            )
            causes = "a head that was zeroed or never trains, a learning rate of almost 0, or collapsed hidden states"
            yield Alarm("constant_values", what, causes)
        if self._lasts("negative_ev", None if variance is None else variance < 0, monitor.negative_ev_steps):
            num_steps = self._series["negative_ev"]
            what = (
                f"explained variance is below 0 for {num_steps} steps, now {variance:.3g}: worse than the mean return"
            )
            causes = (
                "value.optim.lr too high or too low, targets of another scale than the head's, too few updates for how "
                "fast the policy changes, or a value.init_from of another policy"
            )
            yield Alarm("negative_ev", what, causes)
        if outside is not None and outside > monitor.max_oob_fraction:
            what = f"{outside:.3g} of the critic's targets lie outside of value.loss.range and are clamped"
            causes = "step rewards, penalties or bonuses that the range does not know of: widen value.loss.range"
            yield Alarm("targets_out_of_range", f"{what} (limit {monitor.max_oob_fraction:g})", causes)

    def _policy(self, step: int, row: dict[str, Any]) -> Iterator[Alarm]:
        yield from self._mismatch(row)
        monitor = self._monitor
        version, entropy = row.get("policy/version", 0), row.get("policy/entropy")
        if version <= 1 or not row.get("policy/loss_tokens"):  # all here is from before the step
            return
        if entropy is not None and entropy < monitor.min_entropy:
            what = f"the policy's entropy is {entropy:.3g} nats a token (limit {monitor.min_entropy:g})"
            causes = (
                "it has become deterministic and explores nothing: a learning rate too high, too many steps on few "
                "prompts, or solved tasks; policy.entropy_coef or policy.kl holds against it"
            )
            yield Alarm("entropy_collapse", what, causes)
        distances = {name: row.get(name) for name in ("policy/kl_rollout", "policy/kl_reference")}
        far = {name: kl for name, kl in distances.items() if kl is not None and kl > monitor.max_kl}
        if far:
            told = ", ".join(f"{name} {kl:.3g}" for name, kl in far.items())
            causes = "policy.optim.lr too high, rollouts too stale, or a batch with extreme advantages"
            yield Alarm("kl_explosion", f"the policy ran away: {told} nats a token (limit {monitor.max_kl:g})", causes)

    def _mismatch(self, row: dict[str, Any]) -> Iterator[Alarm]:
        tokens, version = row.get("policy/mismatch_tokens", 0), row.get("policy/version", 0)
        log_ratio, mean = row.get("policy/mismatch_log_ratio"), row.get("policy/mismatch_mean", 0.0)
        if not tokens or log_ratio is None or (self._is_replay and version > 1):
            return
        is_first, self._passed_gate = not self._passed_gate, True
        if abs(log_ratio) > self._monitor.max_mismatch:
            what = (
                f"engine and trainer disagree on {tokens:.0f} tokens that the version in training sampled itself: "
                f"mean log-ratio {log_ratio:.3g} (limit {self._monitor.max_mismatch:g}), mean absolute {mean:.3g}, "
                f"largest {row.get('policy/mismatch_max', 0.0):.3g}"
            )
            yield Alarm("logprob_mismatch", what, _WRONG_LOGPROBS, is_gate=is_first)

    def _credit(self, step: int, row: dict[str, Any]) -> Iterator[Alarm]:
        size, needed = row.get("credit/advantage_abs_mean"), self._monitor.zero_advantage_steps
        if step > 0 and self._lasts("zero_advantages", None if size is None else size == 0, needed):
            what = f"all advantages are 0 for {self._series['zero_advantages']} steps: the policy learns nothing"
            causes = "rewards that are all alike (tasks too easy or too hard, a broken reward), in every group or batch"
            yield Alarm("zero_advantages", what, causes)

    def _lasts(self, name: str, holds: bool | None, needed: int) -> bool:
        """Does something hold now, for at least so many steps in a row; None = nobody knows."""
        if holds is None:
            return False
        self._series[name] = self._series.get(name, 0) + 1 if holds else 0
        return self._series[name] >= needed


class WatchedMetrics(Metrics):
    """The run's rows, each looked at before it is written."""

    def __init__(self, run_dir: Path, alarms: Alarms) -> None:
        super().__init__(run_dir)
        self._alarms = alarms

    def add(self, stream: str, step: int, row: dict[str, Any]) -> None:
        """Write one row with its alarms.

        Raises:
            AlarmRaised: an alarm ends the run; the row is written.
        """
        found = self._alarms.look(stream, step, row)
        super().add(stream, step, row | {f"alarm/{alarm.name}": 1.0 for alarm in found})
        self._alarms.tell(step, found)
