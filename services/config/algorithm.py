"""`[algorithm]`: one class per algorithm, stating its facts so that the resolver can check them.

Notable:
- Class-level facts: `needs_value` (a `[value]` table must exist, or must not), `min_group`, `policy_loss` (the name in
  `policy_trainer/losses`). The constants of the loss travel in the policy grid's header.
- Settled choices are in the docstrings: detached double-sided mask (SAO, arXiv 2607.07508 eq. 1-3), value lambda 1,
  truncation is terminal unless told otherwise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.config.base import Section

Truncation = Literal["terminal", "bootstrap"]


class AlgorithmFacts(Section):
    """What the resolver and the packer may ask of any algorithm."""

    needs_value: ClassVar[bool]
    min_group: ClassVar[int]
    policy_loss: ClassVar[str]

    truncation: Truncation = "terminal"
    """What a cut trace is worth: "terminal" = its reward alone; "bootstrap" = plus the critic's value at the cut."""

    def loss_constants(self) -> dict[str, float]:
        """Constants of the policy loss, as they travel in the grid header."""
        raise NotImplementedError


class CriticAlgorithm(AlgorithmFacts):
    """Keys of the algorithms that use a critic."""

    needs_value: ClassVar[bool] = True
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token."""
    value_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the critic's targets; 1 = Monte-Carlo returns, independent of the critic."""


class SaoConfig(CriticAlgorithm):
    """Single-rollout asynchronous optimisation (arXiv 2607.07508): adaptive GAE and a double-sided token mask."""

    min_group: ClassVar[int] = 1
    policy_loss: ClassVar[str] = "dis"

    type: Literal["sao"]
    alpha: float = Field(default=1.5, gt=0)
    """Length-adaptive lambda = max(0, 1 - 1/(alpha * action tokens))."""
    eps_low: float = Field(default=0.3, gt=0)
    """Tokens with ratio <= 1 - eps_low are rejected."""
    eps_high: float = Field(default=5.0, gt=0)
    """Tokens with ratio >= 1 + eps_high are rejected."""
    whiten: bool = False
    """Whiten advantages over the batch. The paper does not."""

    def loss_constants(self) -> dict[str, float]:
        """Window of the double-sided mask."""
        return {"eps_low": self.eps_low, "eps_high": self.eps_high}


class PpoConfig(CriticAlgorithm):
    """PPO (arXiv 1707.06347): token-level GAE and the clipped ratio against the rollout's log-probabilities."""

    min_group: ClassVar[int] = 1
    policy_loss: ClassVar[str] = "ppo_clip"

    type: Literal["ppo"]
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda of the policy's advantages, per action token."""
    eps_low: float = Field(default=0.2, gt=0, lt=1)
    eps_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c on the loss of negative advantages (arXiv 1912.09729); None = off."""
    whiten: bool = True
    """Whiten advantages over the batch (never the value targets)."""

    def loss_constants(self) -> dict[str, float]:
        """Clip range; `dual_clip` 0 stands for off."""
        return {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip or 0.0}


class GrpoConfig(AlgorithmFacts):
    """GRPO (arXiv 2402.03300): the group's mean reward is the baseline; no critic."""

    needs_value: ClassVar[bool] = False
    min_group: ClassVar[int] = 2
    policy_loss: ClassVar[str] = "ppo_clip"

    type: Literal["grpo"]
    std_normalize: bool = True
    """Divide by the group's population standard deviation."""
    eps_low: float = Field(default=0.2, gt=0, lt=1)
    eps_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)

    def loss_constants(self) -> dict[str, float]:
        """Clip range; `dual_clip` 0 stands for off."""
        return {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip or 0.0}


AlgorithmConfig = Annotated[SaoConfig | PpoConfig | GrpoConfig, Field(discriminator="type")]
