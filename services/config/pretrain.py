"""`[value.pretrain]`: a critic trained on files of recorded returns before any reinforcement learning."""

from __future__ import annotations

from pydantic import Field

from services.config.base import Section


class PretrainConfig(Section):
    """`[value.pretrain]`: what `counterpoint pretrain-value` does."""

    files: list[str] = Field(min_length=1)
    """JSON lines of rows, each with its `manifest.json` beside it; files of several policies may be mixed."""
    held_out_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts whose rows never train, but measure the critic. A prompt is held out or not as a whole."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the training rows, each in an order of its own that follows from `seed`."""
    batch_size: int = Field(default=64, ge=1)
    """Rows of an optimizer step; the last one of an epoch may have fewer."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; None = that of `value.optim`."""
    lr_updates: int = Field(default=0, ge=0)
    """Linear learning-rate warmup over so many optimizer steps."""
    freeze: list[str] = []
    """Parts of the backbone that do not train here, as in `value.freeze`, which has no say in pretraining."""
    eval_interval_updates: int = Field(default=100, ge=0)
    """Measure on the held-out rows every so many optimizer steps, besides at the end; 0 = at the end only."""
