"""GRPO: a group's mean score is the baseline of its traces; no critic.

Paper: arXiv 2402.03300, eq. 4.1.2 (outcome supervision).

Notable:
- A trace's score is its outcome reward plus its step rewards. The baseline is over *traces*: see `groups.py`.
- `loss = "dis"` puts SAO's double-sided mask (arXiv 2607.07508, eq. 1-3) in the place of the clipped ratio.
- One advantage per branch, on all of its action tokens.
- A group of fewer than two traces has no baseline of others and is refused.

Deviations:
- Population standard deviation without the usual epsilon; a group whose spread is rounding (at most 1e-9 of its mean,
  or of 1) gets zeros.
- No value targets: `returns` stays None.
- `truncation = "bootstrap"` is refused: there is no critic to say what a cut trace is worth.
"""

from __future__ import annotations

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.groups import branch_scores, group_advantages, scores_of_traces, spread_over_actions
from services.config.algorithm import GrpoConfig
from services.wire.samples import TrainingSample


class Grpo(Algorithm):
    """Group-relative advantages."""

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self._config = config

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        num_flat = 0
        for group in groups:
            scores = branch_scores(group)
            num_traces = len(scores_of_traces(group, scores))
            if num_traces < 2:
                name = group[0].group_id if group else "(empty)"
                raise ValueError(f"group {name} has {num_traces} trace(s); a group baseline needs at least 2")
            advantages = group_advantages(group, scores, std_normalize=self._config.std_normalize)
            num_flat += not any(advantages)
            for sample, advantage in zip(group, advantages, strict=True):
                sample.advantages = spread_over_actions(sample, advantage)
                sample.returns = None
        return {"credit/flat_groups": float(num_flat)}
