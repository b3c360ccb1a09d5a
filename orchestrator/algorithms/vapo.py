"""VAPO: PPO whose lambda depends on the length of the answer.

Paper: arXiv 2504.05118, section 4: length-adaptive GAE, critic targets with lambda 1 (decoupled GAE), the clipped ratio
with a higher upper bound ("clip-higher"), token-level loss.

Notable:
- The same GAE as `sao`, with alpha 0.05 instead of 1.5, hence lambdas far from Monte-Carlo; the loss is PPO's.

Deviations:
- Lambda counts action tokens and is clamped at 0: the formula is negative for an answer of fewer than 1/alpha tokens.
- Observations are skipped, as everywhere here; the paper has single-turn answers only.
- Advantages are whitened over the batch by default; the paper does not say.
- No language-model loss on correct answers; pretraining the critic is not the algorithm's business.
"""

from __future__ import annotations

from functools import partial

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.credit import assign_gae
from orchestrator.algorithms.gae import length_adaptive_lambda
from services.config.algorithm import VapoConfig
from services.wire.samples import TrainingSample


class Vapo(Algorithm):
    """Length-adaptive GAE for the clipped ratio."""

    def __init__(self, config: VapoConfig) -> None:
        super().__init__(config)
        self._config = config

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        lam_of = partial(length_adaptive_lambda, alpha=self._config.alpha)
        return assign_gae((sample for group in groups for sample in group), self._config, lam_of)
