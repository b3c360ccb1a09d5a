"""Single-rollout asynchronous optimisation: one rollout per prompt, a critic as the baseline.

Paper: arXiv 2607.07508, eq. 4-5 (skip-observation GAE), the length-adaptive lambda and value lambda 1. The double-sided
mask on the ratio, eq. 1-3, is the loss `dis` of the policy trainer.

Notable:
- Lambda is chosen per branch, from its number of action tokens; the critic's targets use `value_lambda` and do not
  move with it.
- Groups mean nothing here: eight traces are credited alike as one group of eight or eight groups of one.

Deviations:
- Values come from before this batch's critic updates, so no baseline has seen its own outcome.
- A truncated trace is terminal unless `truncation = "bootstrap"`; the paper does not say.
- Optional whitening (off by default, as in the paper).
"""

from __future__ import annotations

from orchestrator.algorithms.credit import assign_credit, credit_metrics, lambda_metrics
from orchestrator.algorithms.gae import length_adaptive_lambda
from orchestrator.algorithms.whiten import whiten_samples
from services.config.algorithm import SaoConfig
from services.wire.samples import TrainingSample


class Sao:
    """Length-adaptive, skip-observation GAE."""

    def __init__(self, config: SaoConfig) -> None:
        self._config = config

    def credit(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """Fill advantages and value targets; see `Algorithm.credit`.

        Raises:
            ContractError: a sample was never scored.
            NonFiniteError: a reward or value is not finite.
        """
        config = self._config
        samples = [sample for group in groups for sample in group]
        lambdas: list[float] = []
        for sample in samples:
            num_action_tokens = sample.branch.num_action_tokens
            lam = length_adaptive_lambda(num_action_tokens, config.alpha)
            if num_action_tokens:
                lambdas.append(lam)
            assign_credit(
                sample,
                gamma=config.gamma,
                lam=lam,
                value_lambda=config.value_lambda,
                truncation=config.truncation,
            )
        metrics = credit_metrics(samples) | lambda_metrics(lambdas)
        if config.whiten:
            whiten_samples(samples)
        return metrics
