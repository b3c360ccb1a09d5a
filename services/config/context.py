"""Where a started run lives: the part of `run.json` that every process reads once.

Notable:
- Written by the launcher before it starts anything, so processes need only `--run-dir RUN_DIR`.
- `pids` is filled in by the launcher as processes start; nobody but people and tests reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.config.base import Section
from services.config.schema import Config, load_resolved


@dataclass(frozen=True)
class Host:
    """A node of the run."""

    name: str
    address: str
    """What its processes listen on and are reached by; loopback where the run has one host."""


class RunContext(Section):
    """Identity and addresses of one start of a run."""

    run_id: str
    epoch: int
    """Number of this start of the run; messages of a lower epoch are refused."""
    dir: str
    """The run directory, absolute."""
    model_dir: str
    """Local Hugging Face folder (config, tokenizer, and weights unless `model_init` is "random")."""
    model_init: Literal["pretrained", "random"] = "pretrained"
    inference_urls: list[str]
    """Every engine's own address: weight updates go to each of them."""
    router_url: str | None = None
    """Where generation goes when there are several engines; None = to the only one."""
    router_control_url: str | None = None
    """The router itself, behind its guard at `router_url`: on loopback of the first node, where the orchestrator adds
    and removes engines; None where there is no router."""
    policy_url: str
    """Control routes of the policy trainer, http://address:port"""
    value_url: str | None = None
    """Scoring API and control routes of the value service; None without a critic."""
    orchestrator_url: str
    policy_grid_url: str
    """tcp://address:port the orchestrator binds and the policy's data ranks connect to"""
    critic_grid_url: str | None = None
    commit_dir: str | None = None
    """checkpoints/step_NNNNNN that every process continues from, absolute; None = from the start."""
    replay_of: str | None = None
    """The run whose recorded rollouts are trained on, absolute; None = rollouts of an inference engine."""
    token_file: str | None = None
    """File (mode 0600) of the token that every listener of the run asks for, absolute; None = nobody asks."""
    hosts: list[Host] = []
    """The run's nodes, as the plan numbers them."""
    pids: dict[str, int] = {}

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(self.dir)


def load_run(run_dir: Path) -> tuple[Config, RunContext]:
    """Read a run directory's resolved configuration and context."""
    config = load_resolved(run_dir / "config.resolved.toml")
    context = RunContext.model_validate(json.loads((run_dir / "run.json").read_text()))
    return config, context
