"""`[policy]` and `[value]`: two instances of one train group, each with its own layout and optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.config.base import Section
from services.config.pretrain import PretrainConfig
from services.wire.grids import Denominator


class TrainModelConfig(Section):
    """`[policy.model]` or `[value.model]`: the layout of one role."""

    seq_len: int = Field(default=1024, ge=8)
    """Tokens of a packed bin; a longer branch is refused."""
    cp: int = Field(default=1, ge=1)
    """Ranks that share one packed bin, each holding 1/cp of its tokens (context parallelism by Ulysses all-to-all).
    Data ranks are GPUs / cp."""
    ep: int = Field(default=1, ge=1)
    """Ranks that share the experts of a mixture, each holding 1/ep of them; they regroup the role's GPUs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in. Parameters, gradients and moments are float32 either way."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work."""


class LoraConfig(Section):
    """`[value.lora]`: train low-rank adapters instead of the backbone (arXiv 2106.09685); the value head trains whole.

    Its presence turns it on; needs the `lora` extra (peft).
    """

    rank: int = Field(default=16, ge=1)
    """Rank r of every update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """Updates are scaled by alpha / rank."""
    targets: list[str] = ["all-linear"]
    """Names of the layers that get an adapter, as path components ("q_proj"), or "all-linear"."""


class PolicyLoraConfig(LoraConfig):
    """`[policy.lora]`: train low-rank adapters instead of the policy (arXiv 2106.09685).

    Its presence turns it on; needs the `lora` extra (peft).
    """

    publish: Literal["merged", "adapter"] = "merged"
    """What the engine gets: whole weights with the adapters added in, or the adapter alone."""


class PackingConfig(Section):
    """`[policy.packing]` or `[value.packing]`: how samples share bins of `seq_len` tokens and data ranks."""

    balance: Literal["tokens", "flops"] = "tokens"
    """What data ranks get equal shares of. "flops" counts attention, which grows with the square of a sample's length;
    it pays where samples are long and unlike."""
    max_samples: int | None = Field(default=None, ge=1)
    """Samples of a bin at most; None = as many as fit."""


class OptimConfig(Section):
    """`[policy.optim]` or `[value.optim]`: AdamW."""

    lr: float | None = Field(default=None, ge=0)
    """Peak learning rate. The critic's falls back to the policy's, the policy's to 1e-6. 0 = a control run."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    offload: bool = False
    """Keep the moments in host memory and bring them to the device piece by piece in the step; parameters stay."""


class PolicyWarmupConfig(Section):
    """`[policy.warmup]`."""

    lr_updates: int = Field(default=0, ge=0)
    """Linear learning-rate warmup over so many of the policy's own updates."""


class KlConfig(Section):
    """`[policy.kl]`: a penalty on the divergence from the model that the run starts from."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the penalty in the loss; 0 = no reference model is kept at all."""
    type: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of a token's KL, from its log-ratio: k1 = log-ratio, k2 = half its square, k3 = the non-negative one."""
    unbiased: bool = True
    """Weigh by the ratio to the rollout, gradient included: then k1 and k3 have the KL's own gradient. Without, the
    gradient is that of the estimate alone, as in arXiv 2402.03300."""
    level: Literal["loss", "reward"] = "loss"
    """Only "loss" is available: the critic trains on the rewards before the trainer has seen a token."""


class PolicyConfig(Section):
    """`[policy]`: the policy trainer."""

    kl: KlConfig = KlConfig()
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the ratio: what the engine said when it sampled, or a forward before the batch's first update."""
    denominator: Denominator = "token_mean"
    """What the loss is a mean of: all loss tokens of an optimizer step; samples, each the mean of its own loss tokens;
    or samples, each the sum of its loss tokens over `denominator_tokens`."""
    denominator_tokens: int | None = Field(default=None, ge=1)
    """Tokens that stand for a sample's length with "constant", say the longest answer (arXiv 2503.20783)."""
    model: TrainModelConfig = TrainModelConfig()
    lora: PolicyLoraConfig | None = None
    freeze: list[str] = []
    """Parts that do not train, by path components: "attention" (all its usual names), "mlp", "embed_tokens",
    "layers.0". A name that matches nothing is an error."""
    packing: PackingConfig = PackingConfig()
    optim: OptimConfig = OptimConfig()
    warmup: PolicyWarmupConfig = PolicyWarmupConfig()
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per batch, each on its share of the groups with its own denominators."""
    port: int = Field(default=0, ge=0, le=65535)
    """Control port on loopback; 0 = the planner picks one."""


class ValueWarmupConfig(Section):
    """`[value.warmup]`: three different warmups, three keys."""

    lr_updates: int = Field(default=0, ge=0)
    """Linear learning-rate warmup over so many of the critic's own updates."""
    critic_only_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run in which only the critic trains; an absolute step index."""
    head_only_updates: int = Field(default=0, ge=0)
    """Updates at the start in which only the value head trains; counted in the critic's own updates."""


class MseConfig(Section):
    """Half squared error: 0.5 (V - y)^2. The factor 1/2 is part of every published learning rate of ours."""

    type: Literal["mse"] = "mse"
    clip: float | None = Field(default=None, gt=0)
    """Hold values within so much of those at scoring; None = off. All K updates share the one centre."""

    def loss_constants(self) -> dict[str, float]:
        """Constants of the loss, as they travel in the grid header."""
        return {} if self.clip is None else {"clip": self.clip}


class ClassificationConfig(Section):
    """Keys of the classification losses. There is no clip among them: the gradient is bounded as it is."""

    bins: int = Field(default=51, ge=2)
    """Points on `range`, both ends included."""
    range: list[float] = Field(default=[0.0, 1.0], min_length=2, max_length=2)
    """[low, high] that returns lie in; targets beyond are clamped and counted (`value/target_oob_fraction`)."""
    pad: int = Field(default=3, ge=0)
    """Points beyond either end, so that returns at the very border are not biased. 0 = the head as others use it."""

    def loss_constants(self) -> dict[str, float]:
        """The support, as it travels in the grid header."""
        low, high = self.range
        return {"low": low, "high": high, "num_bins": float(self.bins), "pad_bins": float(self.pad)}


class TwoHotConfig(ClassificationConfig):
    """Classification with two-hot targets (arXiv 2403.03950): a return is shared by the two points around it."""

    type: Literal["two_hot"]


class HlGaussConfig(ClassificationConfig):
    """Classification with targets smoothed by a Gaussian (HL-Gauss, arXiv 2403.03950)."""

    type: Literal["hl_gauss"]
    sigma_ratio: float = Field(default=0.75, gt=0)
    """Standard deviation of the Gaussian in units of the points' spacing; 0.75 spreads over about six points."""

    def loss_constants(self) -> dict[str, float]:
        """The support and the width, as they travel in the grid header."""
        return super().loss_constants() | {"sigma_ratio": self.sigma_ratio}


ValueLossConfig = Annotated[MseConfig | TwoHotConfig | HlGaussConfig, Field(discriminator="type")]


class HeadConfig(Section):
    """`[value.head]`: Linear(lm_head.in_features, K, bias), f32; K = 1 for mse, else the loss's points."""

    init_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the seeded initial weight; 0 = all values start at 0, or in the middle of the points."""


class ValueConfig(Section):
    """`[value]`: the critic. Its presence is what makes a run use one."""

    init_from: str | None = None
    """Folder that the critic starts from: an exported critic, whose head comes along, or a language model, which gets
    a fresh one. Its architecture, tokenizer and support must be this run's. None = it starts as `model.path`."""
    model: TrainModelConfig = TrainModelConfig()
    lora: LoraConfig | None = None
    freeze: list[str] = []
    """Parts of the backbone that do not train, by path components: "attention" (all its usual names), "mlp",
    "embed_tokens", "layers.0". A name that matches nothing is an error."""
    packing: PackingConfig = PackingConfig()
    optim: OptimConfig = OptimConfig()
    warmup: ValueWarmupConfig = ValueWarmupConfig()
    head: HeadConfig = HeadConfig()
    loss: ValueLossConfig = MseConfig()
    updates_per_batch: int = Field(default=1, ge=1)
    """K passes over each critic grid, targets fixed: one optimizer step each, or one a mini-batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps of a pass, each on its share of the groups with its own denominator."""
    pretrain: PretrainConfig | None = None
    """Files to pretrain on, for `counterpoint pretrain-value`; any other command takes no notice of it."""
    min_initial_explained_variance: float | None = Field(default=None, le=1)
    """With `init_from`: the run ends at its first batch where the critic explains less of its returns, before anything
    trains. None = a critic worse than the mean (below 0) is a loud warning."""
    refresh: Literal["pre_update", "refreshed"] = "pre_update"
    """Values that make the policy's advantages: those from before the batch's critic updates, or scored again after
    them. Refreshed values have seen the batch's own outcomes."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the scoring API; 0 = the planner picks one."""
    host: str = "127.0.0.1"
    """IP address that the scoring API listens on. Beyond loopback a `token_file` is needed, and never all interfaces:
    plain HTTP belongs on a network that one trusts."""
    token_file: str | None = None
    """File (mode 0600) whose token every request but /livez and /readyz must show; made with 32 random bytes where
    there is none. None = no token is asked for."""
    load_roots: list[str] = []
    """Folders below which `POST /load` may name an exported critic; none = weights cannot be replaced."""
    max_request_bytes: int = Field(default=64 * 2**20, ge=1024)
    """A larger scoring body is answered 413 before it is buffered."""
    max_request_branches: int = Field(default=4096, ge=1)
    """Branches of one scoring request; more are answered 422, as are longer ones than `model.seq_len`."""
    max_request_tokens: int = Field(default=4 * 2**20, ge=1)
    """Tokens of all branches of one scoring request."""
    max_requests_in_flight: int = Field(default=4096, ge=1)
    """Scoring requests being read, waiting or being scored; one more is answered 429 before it is read."""
    max_bytes_in_flight: int = Field(default=2**30, ge=1024)
    """Bytes of their bodies together; what goes beyond is answered 429."""
    body_deadline_s: float = Field(default=30.0, gt=0)
    """A request's body is here, and its reply taken, within so long; else 408, or the connection is closed."""
