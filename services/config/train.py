"""`[policy]` and `[value]`: two instances of one train group, each with its own layout and optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section


class TrainModelConfig(Section):
    """`[policy.model]` or `[value.model]`: the layout of one role."""

    seq_len: int = Field(default=1024, ge=8)
    """Tokens of a packed bin; a longer branch is refused."""


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


class PolicyWarmupConfig(Section):
    """`[policy.warmup]`."""

    lr_updates: int = Field(default=0, ge=0)
    """Linear learning-rate warmup over so many of the policy's own updates."""


class PolicyConfig(Section):
    """`[policy]`: the policy trainer."""

    model: TrainModelConfig = TrainModelConfig()
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


class MseConfig(Section):
    """Half squared error: 0.5 (V - y)^2. The factor 1/2 is part of every published learning rate of ours."""

    type: Literal["mse"] = "mse"


class HeadConfig(Section):
    """`[value.head]`: Linear(lm_head.in_features, 1, bias), f32."""

    init_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the seeded initial weight; 0 = all values start at 0."""


class ValueConfig(Section):
    """`[value]`: the critic. Its presence is what makes a run use one."""

    model: TrainModelConfig = TrainModelConfig()
    optim: OptimConfig = OptimConfig()
    warmup: ValueWarmupConfig = ValueWarmupConfig()
    head: HeadConfig = HeadConfig()
    loss: MseConfig = MseConfig()
    updates_per_batch: int = Field(default=1, ge=1)
    """K optimizer steps on each critic grid, targets fixed."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the scoring API on loopback; 0 = the planner picks one."""
    max_request_bytes: int = Field(default=64 * 2**20, ge=1024)
    """A larger scoring body is answered 413 before it is buffered."""
    max_request_branches: int = Field(default=4096, ge=1)
    """Branches of one scoring request."""
