"""Single-rollout asynchronous optimisation: one rollout per prompt, a critic as the baseline.

Paper: arXiv 2607.07508, eq. 4-5 (skip-observation GAE), the length-adaptive lambda and value lambda 1. The double-sided
mask on the ratio, eq. 1-3, is the loss `dis` of the policy trainer.

Notable:
- Lambda is chosen per branch, from its number of action tokens; the critic's targets use `value_lambda` and do not
  move with it.
- Groups mean nothing here: eight traces are credited alike as one group of eight or eight groups of one.

Deviations:
- Values come from before this batch's critic updates, so no baseline has seen its own outcome; with
  `value.refresh = "refreshed"` they come from after them.
- A truncated trace is terminal unless `truncation = "bootstrap"`; the paper does not say.
- Optional whitening (off by default, as in the paper).
"""

from __future__ import annotations

from functools import partial

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.credit import assign_gae
from orchestrator.algorithms.gae import length_adaptive_lambda
from services.config.algorithm import SaoConfig
from services.wire.samples import TrainingSample


class Sao(Algorithm):
    """Length-adaptive, skip-observation GAE."""

    def __init__(self, config: SaoConfig) -> None:
        super().__init__(config)
        self._config = config

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        lam_of = partial(length_adaptive_lambda, alpha=self._config.alpha)
        return assign_gae((sample for group in groups for sample in group), self._config, lam_of)
