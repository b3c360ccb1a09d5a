"""GRPO: a group's mean score is the baseline of its traces; no critic.

Paper: arXiv 2402.03300, eq. 4.1.2 (outcome supervision).

Notable:
- A trace's score is its outcome reward plus its step rewards. The baseline is over *traces*: a trace with many branches
  counts once (with the mean of its branches' scores), so branching does not move it.
- One advantage per branch, on all of its action tokens.
- A group of fewer than two traces has no baseline of others and is refused.

Deviations:
- Population standard deviation without the usual epsilon; a group whose spread is rounding (at most 1e-9 of its mean,
  or of 1) gets zeros.
- No value targets: `returns` stays None.
- `truncation = "bootstrap"` is refused: there is no critic to say what a cut trace is worth.
"""

from __future__ import annotations

import numpy as np

from orchestrator.algorithms.credit import credit_metrics, token_rewards
from services.config.algorithm import GrpoConfig
from services.wire.errors import ConfigError
from services.wire.samples import TrainingSample

RELATIVE_SPREAD_FLOOR = 1e-9
"""Scores that differ by no more than this share of max(1, |mean|) are equal."""


class Grpo:
    """Group-relative advantages."""

    def __init__(self, config: GrpoConfig) -> None:
        if config.truncation == "bootstrap":
            raise ConfigError(['algorithm.truncation = "bootstrap" needs a critic; grpo has none: use "terminal"'])
        self._config = config

    def credit(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """Fill advantages; see `Algorithm.credit`.

        Raises:
            ValueError: a group of fewer than two traces.
            NonFiniteError: a reward is not finite.
        """
        num_flat = 0
        for group in groups:
            scores = [float(token_rewards(sample).sum()) for sample in group]
            advantages = self._advantages(group, scores)
            num_flat += not any(advantages)
            for sample, advantage in zip(group, advantages, strict=True):
                sample.advantages = np.where(sample.branch.action_mask, advantage, 0.0)  # [T]
                sample.returns = None
        metrics = credit_metrics(sample for group in groups for sample in group)
        metrics["credit/flat_groups"] = float(num_flat)
        return metrics

    def _advantages(self, group: list[TrainingSample], scores: list[float]) -> list[float]:
        scores_of: dict[str, list[float]] = {}
        for sample, score in zip(group, scores, strict=True):
            scores_of.setdefault(sample.trace_id, []).append(score)
        if len(scores_of) < 2:
            name = group[0].group_id if group else "(empty)"
            raise ValueError(f"group {name} has {len(scores_of)} trace(s); a group baseline needs at least 2")
        trace_scores = np.array([np.mean(branch_scores) for branch_scores in scores_of.values()])  # [traces]
        mean = float(trace_scores.mean())
        floor = RELATIVE_SPREAD_FLOOR * max(1.0, abs(mean))
        deviation = float(trace_scores.std())
        if max(scores) - min(scores) <= floor:
            return [0.0] * len(scores)
        if self._config.std_normalize and deviation > floor:
            return [(score - mean) / deviation for score in scores]
        return [score - mean for score in scores]
