"""The whole configuration: one frozen object, made by `services.config.resolve` and read by every process.

Notable:
- `load(dump(config)) == config`; the resolved file is `config.resolved.toml` in the run directory.
- A process hands each part only its own section.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from services.config.algorithm import AlgorithmConfig
from services.config.base import Section
from services.config.checkpoint import CheckpointConfig
from services.config.deployment import DeploymentConfig
from services.config.inference import InferenceConfig
from services.config.orchestrator import EnvConfig, EvalConfig, OrchestratorConfig
from services.config.slurm import SlurmConfig
from services.config.system import ModelConfig, MonitorConfig, RunConfig, RuntimeConfig
from services.config.train import PolicyConfig, ValueConfig


class Config(Section):
    """A run."""

    seed: int = Field(default=0, ge=0)
    """Seeds everything: the order of tasks, sampling, a fresh head."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    algorithm: AlgorithmConfig
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    env: list[EnvConfig] = Field(min_length=1)
    eval: list[EvalConfig] = []
    policy: PolicyConfig = PolicyConfig()
    value: ValueConfig | None = None
    inference: InferenceConfig = InferenceConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    slurm: SlurmConfig = SlurmConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()

    def on_cuda(self) -> Config:
        """The same on GPUs, for who starts only a part of a run; how many there are was not checked."""
        return self.model_copy(update={"deployment": self.deployment.model_copy(update={"device": "cuda"})})

    @property
    def num_policy_data_ranks(self) -> int:
        """Items of a policy grid: the policy's GPUs over its context ranks."""
        return self.deployment.num_policy_gpus // self.policy.model.cp

    @property
    def num_value_gpus(self) -> int:
        """GPUs of the critic in all, in every layout; 0 without a critic."""
        return 0 if self.value is None else self.deployment.num_critic_gpus

    @property
    def num_value_data_ranks(self) -> int:
        """Items of a critic grid; 0 without a critic."""
        return 0 if self.value is None else self.num_value_gpus // self.value.model.cp

    @property
    def num_engines(self) -> int:
        """Inference engines; with several, a router is in front of them."""
        return max(1, self.deployment.num_inference_gpus // self.inference.tp)


def to_toml(config: Config) -> str:
    """Render a config as TOML; absent values are left out."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def from_toml(text: str) -> Config:
    """Read a resolved config back; equal to the one that was written."""
    return Config.model_validate(tomllib.loads(text))


def load_resolved(path: Path) -> Config:
    """Read `config.resolved.toml`."""
    return from_toml(path.read_text())


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
