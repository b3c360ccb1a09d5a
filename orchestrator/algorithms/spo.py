"""SPO: a tracker per prompt, forgetting as the policy drifts, is the baseline of single rollouts; no critic.

Paper: arXiv 2509.13232 (Beta tracker, adaptive forgetting, batch-normalised advantages, prompt sampling weights).

Notable:
- The baseline is the tracker's mean before this reward; then the reward enters.
- Advantages are normalised over the *traces* of a batch, by mean and n-1 standard deviation: a long answer weighs no
  more than a short one. A batch of one trace passes unchanged; equal advantages become zeros.
- The tracker starts from offline rollouts of the prompt where a prior file names it, else from one half.
- Prompts come by `sampling_weight`, as much as each has left to teach, instead of once an epoch.

Deviations:
- The drift since a prompt's last visit is `drift_per_version` times the policy versions in between, not measured. The
  paper's is the mean absolute difference of the old answer's log-probabilities then and now; the orchestrator has
  those of then only, and the trainers' differences are of a batch, one step apart, and of other prompts.
- Prompts are drawn one by one as rollouts start, with the trackers of that moment, not for a batch at once: one that is
  in flight may be drawn again, and what it is about to teach is not counted yet.
- Traces of a group are visited one after the other, as if each were a batch of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.groups import branch_scores, scores_of_traces, spread_floor, spread_over_actions
from services.config.algorithm import SpoConfig
from services.wire.errors import ConfigError
from services.wire.samples import TrainingSample

EXPLORATION = 0.05
"""Sampling weight of a prompt that is always or never solved."""


@dataclass(slots=True)
class Tracker:
    """Belief about a prompt's success rate, Beta(hits, misses)."""

    hits: float
    misses: float
    version: int | None = None
    """policy version of the last visit; None before the first"""

    @property
    def value(self) -> float:
        """Expected reward."""
        return self.hits / (self.hits + self.misses)

    @staticmethod
    def from_prior(num: int, hits: float, *, rho_low: float) -> Tracker:
        """A tracker worth N0 = 1/(1 - rho_low) rewards, with the mean of `num` offline ones and half a hit and miss.

        Args:
            num: Offline rollouts; 0 gives the value one half.
            hits: Sum of their rewards.
            rho_low: Least forgetting factor.
        """
        weight = 1.0 / (1.0 - rho_low)
        return Tracker(weight * (hits + 0.5) / (num + 1), weight * (num - hits + 0.5) / (num + 1))

    def update(self, reward: float, rho: float) -> None:
        """Forget a little, then count a reward in [0, 1]."""
        self.hits = rho * self.hits + reward
        self.misses = rho * self.misses + 1.0 - reward


def forgetting_factor(drift: float, *, half_drift: float, rho_low: float, rho_high: float) -> float:
    """2^(-drift / half_drift), clipped to [rho_low, rho_high].

    Args:
        drift: Mean absolute difference of log-probabilities since the last visit.
        half_drift: Drift that halves what is remembered.
        rho_low: Lower bound.
        rho_high: Upper bound.
    """
    return min(max(2.0 ** (-drift / half_drift), rho_low), rho_high)


def sampling_weight(value: float) -> float:
    """How much a prompt of this expected reward has left to teach: its standard deviation plus EXPLORATION."""
    return math.sqrt(value * (1.0 - value)) + EXPLORATION


class Spo(Algorithm):
    """Score minus the tracker's mean, normalised over the batch."""

    def __init__(self, config: SpoConfig) -> None:
        super().__init__(config)
        self._config = config
        self._trackers = dict(_read_prior(config)) if config.prior_file else {}

    def tracker(self, prompt_id: str) -> Tracker:
        """The tracker of a prompt, made where it is new."""
        if prompt_id not in self._trackers:
            self._trackers[prompt_id] = Tracker.from_prior(0, 0.0, rho_low=self._config.rho_low)
        return self._trackers[prompt_id]

    def prompt_weight(self) -> Callable[[str], float]:
        """`sampling_weight` of a prompt's tracker as it is then; asking makes no tracker."""
        fresh = Tracker.from_prior(0, 0.0, rho_low=self._config.rho_low)
        return lambda prompt_id: sampling_weight(self._trackers.get(prompt_id, fresh).value)

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        baseline_of: dict[str, float] = {}
        raw: dict[str, float] = {}  # advantage of each trace
        for group in groups:
            scores_of = scores_of_traces(group, branch_scores(group))
            for trace_id, score in scores_of.items():
                if not 0.0 <= score <= 1.0:
                    raise ValueError(f"trace {trace_id}: spo needs rewards in [0, 1], got {score}")
                branches = [sample for sample in group if sample.trace_id == trace_id]
                tracker = self.tracker(branches[0].prompt)
                baseline_of[trace_id] = tracker.value
                raw[trace_id] = score - tracker.value
                self._visit(tracker, score, max((s.branch.newest_version for s in branches), default=0))
        mean, scale = _normaliser(list(raw.values()))
        for group in groups:
            for sample, score in zip(group, branch_scores(group), strict=True):
                advantage = (score - baseline_of[sample.trace_id] - mean) * scale
                sample.advantages = spread_over_actions(sample, advantage)
                sample.returns = None
        return {"credit/baseline_mean": float(np.mean(list(baseline_of.values())))} if baseline_of else {}

    def _visit(self, tracker: Tracker, score: float, version: int) -> None:
        config = self._config
        passed = 0 if tracker.version is None else max(0, version - tracker.version)
        rho = forgetting_factor(
            passed * config.drift_per_version,
            half_drift=config.half_drift,
            rho_low=config.rho_low,
            rho_high=config.rho_high,
        )
        tracker.update(score, rho)
        tracker.version = version if tracker.version is None else max(version, tracker.version)

    def state_dict(self) -> dict[str, Any]:
        """The trackers."""
        return {"trackers": {key: [t.hits, t.misses, t.version] for key, t in self._trackers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these trackers, the prior file's included.

        Raises:
            ValueError: a state that this algorithm did not write.
        """
        if set(state) != {"trackers"}:
            raise ValueError(f"the state of spo holds trackers, not {', '.join(sorted(state))}")
        self._trackers = {key: Tracker(*numbers) for key, numbers in state["trackers"].items()}


def _normaliser(advantages: list[float]) -> tuple[float, float]:
    """Mean and factor that normalise a batch; the factor is 0 where there is no spread."""
    if len(advantages) < 2:
        return 0.0, 1.0
    mean, deviation = float(np.mean(advantages)), float(np.std(advantages, ddof=1))
    return mean, 1.0 / deviation if deviation > spread_floor(mean) else 0.0


def _read_prior(config: SpoConfig) -> Iterator[tuple[str, Tracker]]:
    path = Path(str(config.prior_file))
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"algorithm.prior_file: {path} cannot be read: {error}"]) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt_id, num, hits = str(row["prompt_id"]), int(row["num"]), float(row["hits"])
        except (ValueError, KeyError, TypeError) as error:
            what = "is no object with prompt_id, num and hits"
            raise ConfigError([f"algorithm.prior_file: {path}:{number} {what}: {error!r}"]) from error
        if not 0.0 <= hits <= num:
            raise ConfigError([f"algorithm.prior_file: {path}:{number} has {hits:g} hits of {num}"])
        yield prompt_id, Tracker.from_prior(num, hits, rho_low=config.rho_low)
