"""`[run]`, `[model]`, `[runtime]`, `[monitor]`: where a run lives and how long it waits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section


class RunConfig(Section):
    """`[run]`."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    """Defaults to the first config file's stem."""
    dir: str = ""
    """The run's own directory; defaults to runs/<name>."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Newest weight snapshots kept once every engine has moved on."""
    record: bool = True
    """Keep every batch's rollouts in `rollouts/`, about 18 bytes a token (10 without a critic): what
    `counterpoint replay` trains on."""


class ModelConfig(Section):
    """`[model]`: what policy, critic and engine start from."""

    path: str
    """A Hugging Face folder; `tiny:TASK` (made and warm-started on first use); `dummy:CONFIG_DIR` (random weights)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The inference engine's type. Policy and critic keep and compute float32."""


class RuntimeConfig(Section):
    """`[runtime]`: deadlines and the end of a run."""

    shutdown_grace_s: float = Field(default=10.0, gt=0)
    """Everything of ours has ended this long after the first signal; 540 with `deployment.kind = "slurm"`."""
    startup_deadline_s: float = Field(default=300.0, gt=0)
    """Every process must be ready this long after its start. Those that share devices (`deployment.sharing`) load one
    after another, and this covers all of them together."""
    collective_deadline_s: float = Field(default=60.0, gt=0)
    """Deadline of one collective, and of a rank waiting for its grid item once a step has begun."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    """How often an idle group agrees that it is alive."""
    token: Literal["auto", "always"] = "auto"  # noqa: S105 - a rule, not a secret
    """Who must show the run's own token: "auto" = everybody who comes to a listener beyond loopback; "always" = on
    loopback too, for machines that others use as well."""


class MonitorConfig(Section):
    """`[monitor]`: what a person sees."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    traces_per_step: int = Field(default=8, ge=0)
    """Finished traces of each step written to traces.jsonl."""
    movement_interval_steps: int = Field(default=1, ge=0)
    """Steps from one measurement of how far each part of a model moved to the next; 0 = only the value head's. It
    keeps a copy of what trains in host memory, 4 bytes a parameter."""
    alarms: Literal["warn", "stop", "off"] = "warn"
    """What follows where a number says that something is wrong: a warning, with an event and a metric; or the end of
    the run. The gate below ends the run with "warn" too."""
    max_mismatch: float = Field(default=0.01, gt=0)
    """Gate of the first policy step, nats a token: mean log-ratio of engine and trainer, either way, on tokens that
    the version in training has sampled. It estimates their KL, so rounding of a bfloat16 engine stays far below."""
    min_value_std: float = Field(default=1e-6, ge=0)
    """Alarm where the values of a batch spread less."""
    negative_ev_steps: int = Field(default=20, ge=1)
    """Alarm after so many critic steps in a row whose explained variance is below 0: worse than saying the mean."""
    max_oob_fraction: float = Field(default=0.01, ge=0, le=1)
    """Alarm where a larger share of the critic's targets lies outside of `value.loss.range`."""
    zero_advantage_steps: int = Field(default=3, ge=1)
    """Alarm after so many batches in a row without an advantage other than 0."""
    min_entropy: float = Field(default=1e-3, ge=0)
    """Alarm where the policy's mean entropy is lower, nats a token."""
    max_kl: float = Field(default=1.0, gt=0)
    """Alarm where the policy is farther from the sampler, or from the reference, nats a token."""
