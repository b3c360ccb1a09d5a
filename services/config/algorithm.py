"""`[algorithm]`: one class per algorithm, stating its facts so that the resolver can check them.

Notable:
- Facts: `needs_value` (a `[value]` table must exist, or must not), `min_group` and `policy_loss` (the name in
  `policy_trainer/losses`). The last two may depend on the settings, so they are asked of the object, not of the class.
  The constants of the loss travel in the policy grid's header.
- Settled choices are in the docstrings: detached double-sided mask (SAO, arXiv 2607.07508 eq. 1-3), value lambda 1,
  truncation is terminal unless told otherwise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.config.base import Section

Truncation = Literal["terminal", "bootstrap"]
Granularity = Literal["token", "step_mean", "step_last"]
PolicyLoss = Literal["ppo_clip", "dis"]


class AlgorithmFacts(Section):
    """What the resolver and the packer may ask of any algorithm, and the keys that all have."""

    needs_value: ClassVar[bool]

    truncation: Truncation = "terminal"
    """What a cut trace is worth: "terminal" = its reward alone; "bootstrap" = plus the critic's value at the cut."""
    shared_nodes: Literal["first", "mean"] = "first"
    """Advantage and target of a token that several branches share: the first branch's, or the mean over branches."""
    filter_equal_rewards: bool = False
    """Groups whose traces all have the same reward, after shaping, train the critic, not the policy."""
    prune_zero_advantages: bool = False
    """Tokens whose advantage is exactly 0 leave the policy's loss and its denominator."""

    @property
    def min_group(self) -> int:
        """Valid traces a group must keep to be credited."""
        return 1

    @property
    def policy_loss(self) -> str:
        """Name of the loss in `policy_trainer/losses`."""
        raise NotImplementedError

    def loss_constants(self) -> dict[str, float]:
        """Constants of the policy loss, as they travel in the grid header."""
        raise NotImplementedError


class PpoClipKeys(AlgorithmFacts):
    """Keys of the algorithms whose policy loss is the clipped ratio."""

    eps_low: float = Field(default=0.2, gt=0, lt=1)
    eps_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c on the loss of negative advantages (arXiv 1912.09729); None = off."""

    @property
    def policy_loss(self) -> str:
        """The clipped ratio."""
        return "ppo_clip"

    def loss_constants(self) -> dict[str, float]:
        """Clip range; `dual_clip` 0 stands for off."""
        return {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip or 0.0}


class EitherLossKeys(AlgorithmFacts):
    """Keys of the algorithms that take either policy loss; `dual_clip` belongs to "ppo_clip" alone."""

    loss: PolicyLoss = "ppo_clip"
    """"ppo_clip" = the clipped ratio; "dis" = SAO's double-sided mask on it."""
    eps_low: float | None = Field(default=None, gt=0)
    """None = 0.2 for "ppo_clip" (which needs less than 1), 0.3 for "dis"."""
    eps_high: float | None = Field(default=None, gt=0)
    """None = 0.2 for "ppo_clip", 5.0 for "dis"."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c on the loss of negative advantages (arXiv 1912.09729); None = off."""

    @property
    def policy_loss(self) -> str:
        """The chosen one."""
        return self.loss

    def loss_constants(self) -> dict[str, float]:
        """Window or clip range; `dual_clip` 0 stands for off."""
        low, high = (0.3, 5.0) if self.loss == "dis" else (0.2, 0.2)
        window = {
            "eps_low": low if self.eps_low is None else self.eps_low,
            "eps_high": high if self.eps_high is None else self.eps_high,
        }
        return window if self.loss == "dis" else window | {"dual_clip": self.dual_clip or 0.0}


class CriticAlgorithm(AlgorithmFacts):
    """Keys of the algorithms that use a critic."""

    needs_value: ClassVar[bool] = True
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token, or per step where the granularity is a step."""
    value_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the critic's targets; 1 = Monte-Carlo returns, independent of the critic."""


class GaeKeys(CriticAlgorithm):
    """Keys of the algorithms whose critic is always the baseline."""

    granularity: Granularity = "token"
    """What one transition is: a "token", or a step, a maximal run of action tokens. A step's value is the mean of its
    tokens' ("step_mean") or that of its last token ("step_last": the critic then trains on last tokens only)."""


class SaoConfig(GaeKeys):
    """Single-rollout asynchronous optimisation (arXiv 2607.07508): adaptive GAE and a double-sided token mask."""

    type: Literal["sao"]
    alpha: float = Field(default=1.5, gt=0)
    """Length-adaptive lambda = max(0, 1 - 1/(alpha * action tokens)); of steps where the granularity is a step."""
    eps_low: float = Field(default=0.3, gt=0)
    """Tokens with ratio <= 1 - eps_low are rejected."""
    eps_high: float = Field(default=5.0, gt=0)
    """Tokens with ratio >= 1 + eps_high are rejected."""
    whiten: bool = False
    """Whiten advantages over the batch. The paper does not."""

    @property
    def policy_loss(self) -> str:
        """The double-sided mask."""
        return "dis"

    def loss_constants(self) -> dict[str, float]:
        """Window of the double-sided mask."""
        return {"eps_low": self.eps_low, "eps_high": self.eps_high}


class PpoConfig(PpoClipKeys, GaeKeys):
    """PPO (arXiv 1707.06347): token-level GAE and the clipped ratio against the rollout's log-probabilities."""

    type: Literal["ppo"]
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda of the policy's advantages, per action token."""
    whiten: bool = True
    """Whiten advantages over the batch (never the value targets)."""


class VapoConfig(PpoClipKeys, GaeKeys):
    """VAPO (arXiv 2504.05118): length-adaptive GAE, value lambda 1, and the clipped ratio with a higher upper bound."""

    type: Literal["vapo"]
    alpha: float = Field(default=0.05, gt=0)
    """Length-adaptive lambda = max(0, 1 - 1/(alpha * action tokens)); of steps where the granularity is a step."""
    eps_high: float = Field(default=0.28, gt=0)
    whiten: bool = True
    """Whiten advantages over the batch (never the value targets)."""


class EvpoConfig(EitherLossKeys, CriticAlgorithm):
    """EVPO (arXiv 2604.19485): the critic is the baseline where it explains the returns, else the mean is."""

    type: Literal["evpo"]
    scope: Literal["group", "batch"] = "group"
    """What explained variance and the mean are taken over: each prompt's group, or the whole batch as in the paper."""
    threshold: float = Field(default=0.0, le=1)
    """The critic is used where explained variance is strictly greater."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda of the policy's advantages where the critic is used."""
    whiten: bool = False
    """Whiten advantages over the batch (never the value targets)."""

    @property
    def min_group(self) -> int:
        """A group's own mean needs two traces."""
        return 2 if self.scope == "group" else 1


class GrpoConfig(EitherLossKeys):
    """GRPO (arXiv 2402.03300): the group's mean reward is the baseline; no critic."""

    needs_value: ClassVar[bool] = False

    type: Literal["grpo"]
    std_normalize: bool = True
    """Divide by the group's population standard deviation."""

    @property
    def min_group(self) -> int:
        """A group's own mean needs two traces."""
        return 2


class RunningMeanConfig(EitherLossKeys):
    """The mean of the rewards before this one, of the same prompt or of all, is the baseline; no critic."""

    needs_value: ClassVar[bool] = False

    type: Literal["running_mean"]
    scope: Literal["prompt", "global"] = "prompt"
    """Whose earlier rewards: the prompt's own, or everybody's."""
    prompt_window: int = Field(default=8, ge=1)
    """Rewards kept per prompt."""
    global_window: int = Field(default=128, ge=1)
    """Rewards kept of all prompts; also the baseline of a prompt seen for the first time."""
    prior: float | None = None
    """Baseline before any reward; None = that trace gets advantage 0 and is only recorded."""
    whiten: bool = False
    """Whiten advantages over the batch."""


class SpoConfig(EitherLossKeys):
    """SPO (arXiv 2509.13232): a Beta tracker per prompt is the baseline; no critic, no groups."""

    needs_value: ClassVar[bool] = False

    type: Literal["spo"]
    rho_low: float = Field(default=0.875, gt=0, lt=1)
    """Least forgetting factor; 1/(1 - rho_low) is also the weight of the offline prior."""
    rho_high: float = Field(default=0.96, gt=0, lt=1)
    """Greatest forgetting factor."""
    half_drift: float = Field(default=0.06, gt=0)
    """Drift of the policy (mean absolute difference of log-probabilities) that halves what is remembered."""
    drift_per_version: float = Field(default=0.01, ge=0)
    """Drift that one policy version is taken to add; nothing measures it between two visits of a prompt."""
    prior_file: str | None = None
    """JSON lines `{"prompt_id": ..., "num": n, "hits": sum of rewards}` from offline rollouts; None = no prior."""


AlgorithmConfig = Annotated[
    SaoConfig | PpoConfig | VapoConfig | GrpoConfig | EvpoConfig | RunningMeanConfig | SpoConfig,
    Field(discriminator="type"),
]
