"""Models, critics and runs to export, and to start from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from services.config.context import RunContext
from services.config.exported import SupportFacts
from services.config.resolve import resolve
from services.config.schema import Config, to_toml
from services.config.train import OptimConfig
from services.model.export import export_critic
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm
from services.model.mesh import Mesh
from services.model.tiny import byte_tokenizer
from services.runtime.commits import Commits
from services.runtime.manifests import write_manifest
from services.training.checkpoint import save
from services.training.optimizer import Optimizer
from services.training.parts import Part
from services.training.ranks import Ranks
from tests.architectures import build, sequences
from value_service.losses.support import Support

SUPPORT = SupportFacts(low=-1.0, high=1.0, num_bins=5, pad_bins=1)
POINTS = Support(-1.0, 1.0, 5, 1).points.tolist()
FACTS = {"run": "demo", "source": "checkpoints/step_000012/policy"}
(IDS,) = sequences(9)
CONFIG = """
algorithm = {type = "sao", gamma = 0.9}
[run]
name = "demo"
[model]
path = "PATH"
[[env]]
type = "add"
max_turn_tokens = 4
max_trace_tokens = 32
[policy]
[value.loss]
type = "two_hot"
bins = 5
range = [-1.0, 1.0]
pad = 1
[inference]
max_model_len = 64
"""


def base_of(folder: Path, name: str) -> Path:
    """A complete Hugging Face folder with random weights."""
    build(folder, name).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    return folder


def critic_of(base: Path, *, points: list[float] | None = POINTS) -> Critic:
    """A critic whose head says something."""
    critic = Critic(load_causal_lm(base), head_init_std=0.1, seed=3, points=points)
    with torch.no_grad():
        critic.head.bias.copy_(torch.linspace(-0.5, 0.7, len(critic.head.bias)))
    return critic


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: parameters once each, and saved buffers."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()}
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


def write_critic(critic: Critic, base: Path, out: Path) -> Path:
    support = "scalar" if critic.head.points is None else SUPPORT
    return export_critic(state_of(critic), base, out, support=support, gamma=0.9, **FACTS)


def our_values(critic: Critic) -> torch.Tensor:
    """Values before each token [T] and, last, the bootstrap value."""
    with torch.no_grad():
        values, bootstrap = values_before_tokens(critic(IDS, PackedLayout.of([9])), torch.tensor([9]))
    return torch.cat([values, bootstrap])


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def make_run(folder: Path, base: Path, *settings: tuple[str, str]) -> Config:
    """A run directory with a configuration and addresses, and nothing that was trained."""
    path = folder.with_suffix(".toml")
    path.write_text(CONFIG.replace("PATH", str(base)))
    config = resolve([path], settings).config
    folder.mkdir()
    (folder / "config.resolved.toml").write_text(to_toml(config))
    context = RunContext(
        run_id="r",
        epoch=1,
        dir=str(folder),
        model_dir=str(base),
        inference_urls=[],
        policy_url="",
        orchestrator_url="",
        policy_grid_url="",
    )
    (folder / "run.json").write_text(context.model_dump_json())
    return config


def commit(run_dir: Path, step: int, **models: nn.Module) -> None:
    """A commit of these roles, as the train groups of one process write it."""
    commits = Commits(run_dir / "checkpoints")
    part = commits.begin(step)
    for role, model in models.items():
        optimizer = Optimizer(model, OptimConfig(lr=0.1), Ranks(), warmup_updates=0)
        save(part / role, Part(role, model, optimizer, Mesh(), Ranks()), steps_done=step)  # pyright: ignore
        write_manifest(part / role, {})
    (part / "orchestrator").mkdir()
    write_manifest(part / "orchestrator", {})
    commits.commit(step, [*models, "orchestrator"], run_id="r", epoch=1, identity={})
