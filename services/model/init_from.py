"""What the critic starts from: the run's model, or the folder of `value.init_from` with or without a head.

Notable:
- An exported critic's head is loaded bit for bit; a language model's folder has none, and gets the run's fresh one.
  One line says which, with its norm: a head that was silently made anew looks like a critic that has forgotten.
- Rank 0 alone reads tensors; a head goes to the other ranks by broadcast, before it is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from loguru import logger
from safetensors import safe_open

from services.config.exported import HEAD_FILE, CriticFacts, init_from_problems, read_facts
from services.config.train import ValueConfig
from services.model.head import ValueHead
from services.model.mesh import Mesh
from services.wire.errors import ConfigError


@dataclass(frozen=True)
class CriticSource:
    """Where backbone and head of a critic come from."""

    folder: Path
    """for `load_backbone`"""
    init: Literal["pretrained", "random"]
    facts: CriticFacts | None = None
    """of an exported critic; None where the head is made"""
    is_named: bool = False
    """whether `value.init_from` names it"""

    @torch.no_grad()
    def fill_head(self, head: ValueHead, mesh: Mesh) -> None:
        """Put the folder's head into a fresh one, and say what the critic starts from; every rank calls it.

        Args:
            head: As the run's configuration makes it, not sharded yet.
            mesh: The layout.

        Raises:
            ConfigError: the folder's head has other points.
        """
        if self.facts is not None:
            ours = None if head.points is None else head.points.tolist()
            if self.facts.points != ours:
                raise ConfigError([f"value.init_from: {self.folder} has points {self.facts.points}, the run {ours}"])
            stored = read_head(self.folder, self.facts) if mesh.rank == 0 else {}
            for name, parameter in head.named_parameters():
                whole = torch.empty_like(parameter, device=mesh.device)
                if mesh.rank == 0:
                    whole.copy_(stored[name])
                if mesh.size > 1:
                    dist.broadcast(whole, src=0)
                parameter.copy_(whole)
        if self.is_named and mesh.rank == 0:
            norm = float(torch.stack([parameter.double().norm() for parameter in head.parameters()]).norm())
            how = "made, for the folder has none" if self.facts is None else f"loaded (from {self.facts.source})"
            logger.info("critic from {}: value head {}, norm {:.6g}", self.folder, how, norm)


def critic_source(
    value: ValueConfig, *, model_dir: Path, model_init: Literal["pretrained", "random"], gamma: float
) -> CriticSource:
    """Where a run's critic comes from.

    Args:
        value: The critic's section.
        model_dir: Folder of the run's model.
        model_init: Whether that is read, or random.
        gamma: The run's discount.

    Raises:
        ConfigError: `value.init_from` does not fit the run, with every reason.
    """
    if value.init_from is None:
        return CriticSource(model_dir, model_init)
    problems = list(init_from_problems(value.init_from, value.loss, model_dir))
    if problems:
        raise ConfigError([f"value.init_from: {what}; fix: {fix}" for what, fix in problems])
    folder = Path(value.init_from).resolve()
    facts = read_facts(folder)
    if not isinstance(facts, CriticFacts):
        return CriticSource(folder, "pretrained", is_named=True)
    if facts.gamma != gamma:
        logger.warning("value.init_from learned returns with gamma {:g}; this run has {:g}", facts.gamma, gamma)
    return CriticSource(folder, "pretrained", facts, is_named=True)


def read_head(folder: Path, facts: CriticFacts) -> dict[str, torch.Tensor]:
    """`weight` [K, D] and `bias` [K] of an exported critic, f32."""
    prefix, pattern = ("score.", "model*.safetensors") if facts.form == "token_classification" else ("", HEAD_FILE)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, "pt") as file:
            for leaf in ("weight", "bias"):
                if prefix + leaf in file.keys():  # noqa: SIM118 - no mapping
                    found[leaf] = file.get_tensor(prefix + leaf)
    return found
