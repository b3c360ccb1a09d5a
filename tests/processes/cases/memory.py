"""The memory estimate of sharded roles is what FSDP's shards hold."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from services.config.train import PolicyConfig, TrainModelConfig, ValueConfig
from services.model.backbone import load_backbone
from services.model.head import Critic
from services.model.mesh import Mesh
from services.packing.memory import estimate_memory
from services.packing.shapes import model_shapes
from services.training.ranks import Ranks
from tests.architectures import config_dir
from tests.processes.cases import case

F32 = 4


def fullest(ranks: Ranks, model: nn.Module) -> int:
    """Bytes of parameters on the rank that holds most."""
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    own = sum(p.to_local().numel() * F32 for p in model.parameters() if isinstance(p, DTensor))
    return max(row[0] for row in ranks.gather_ints([own]))


@case(2)
def a_policy_s_shards_are_counted_to_the_byte(ranks: Ranks, folder: Path) -> None:
    """Dense; a mixture; and a mixture whose experts are divided."""
    for name, ep in (("llama", 1), ("qwen3-moe", 1), ("qwen3-moe", 2)):
        place = folder / f"{name}-{ep}-{ranks.rank}"
        place.mkdir()
        layout = TrainModelConfig(ep=ep)
        mesh = Mesh.join(cp=1, ep=ep, device=torch.device("cpu"))
        backbone = load_backbone(config_dir(place, name), layout, mesh, init="random")
        backbone.complete(backbone.model, methods=())
        shapes = model_shapes(place)
        assert shapes is not None
        expected = estimate_memory(shapes, PolicyConfig(model=layout), num_ranks=2)
        found = fullest(ranks, backbone.model)
        assert found == expected.parameters == expected.gradients, (name, ep, found, expected)


@case(2)
def a_critic_s_shards_are_counted_to_the_byte(ranks: Ranks, folder: Path) -> None:
    """Its head of one row lies on one rank."""
    place = folder / f"critic-{ranks.rank}"
    place.mkdir()
    mesh = Mesh.join(cp=1, ep=1, device=torch.device("cpu"))
    backbone = load_backbone(config_dir(place, "llama"), TrainModelConfig(), mesh, init="random")
    critic = Critic(backbone.model, head_init_std=0.0, seed=0)
    backbone.complete(critic, methods=("outputs",), exact=(critic.head,))
    shapes = model_shapes(place)
    assert shapes is not None
    expected = estimate_memory(shapes, ValueConfig(), num_ranks=2)
    found = fullest(ranks, critic)
    assert found == expected.parameters, (found, expected)
