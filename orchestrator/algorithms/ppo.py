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

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.credit import assign_gae
from services.config.algorithm import PpoConfig
from services.wire.samples import TrainingSample


class Ppo(Algorithm):
    """GAE with one fixed lambda."""

    def __init__(self, config: PpoConfig) -> None:
        super().__init__(config)
        self._config = config

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        lam = self._config.lam
        return assign_gae((sample for group in groups for sample in group), self._config, lambda _: lam)
