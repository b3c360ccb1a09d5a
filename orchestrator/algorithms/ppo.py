"""PPO with a token-level critic.

Paper: arXiv 1707.06347 (PPO), arXiv 1506.02438 (GAE). The clipped ratio is the loss `ppo_clip` of the policy trainer.

Notable:
- GAE runs over action tokens only, as everywhere here; with lam = gamma = 1 that equals plain GAE on the action tokens.
- Advantages are whitened over the batch's loss tokens by default; value targets never are.
- Groups mean nothing here: any number of rollouts per prompt is credited alike.

Deviations:
- The ratio is taken against the rollout's own log-probabilities, not against a recomputed old policy.
- No KL in the reward: the critic trains before any reference log-probability exists.
- A truncated trace is terminal unless `truncation = "bootstrap"`.
"""

from __future__ import annotations

from orchestrator.algorithms.credit import assign_credit, credit_metrics, lambda_metrics
from orchestrator.algorithms.whiten import whiten_samples
from services.config.algorithm import PpoConfig
from services.wire.samples import TrainingSample


class Ppo:
    """GAE with one fixed lambda."""

    def __init__(self, config: PpoConfig) -> None:
        self._config = config

    def credit(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """Fill advantages and value targets; see `Algorithm.credit`. Metrics describe advantages before whitening.

        Raises:
            ContractError: a sample was never scored.
            NonFiniteError: a reward or value is not finite.
        """
        config = self._config
        samples = [sample for group in groups for sample in group]
        for sample in samples:
            assign_credit(
                sample,
                gamma=config.gamma,
                lam=config.lam,
                value_lambda=config.value_lambda,
                truncation=config.truncation,
            )
        metrics = credit_metrics(samples)
        metrics |= lambda_metrics([config.lam for sample in samples if sample.branch.action_mask.any()])
        if config.whiten:
            whiten_samples(samples)
        return metrics
