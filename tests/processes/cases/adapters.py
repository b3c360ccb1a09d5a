"""Adapters in a sharded model are those of one process: step, merged weights, and the base beneath them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from services.config.train import LoraConfig, OptimConfig, TrainModelConfig
from services.model.backbone import load_backbone
from services.model.freeze import freeze
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_logits
from services.model.lora import adapters_of, add_lora, merged_state_dict, without_lora
from services.model.mesh import Mesh
from services.model.shard import whole_tensor
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks
from services.wire.grids import MicroBatch
from tests.architectures import build, sequences
from tests.processes.cases import case

RELATIVE = 1e-5
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.5, max_grad_norm=0.05)
MICRO_BATCH = MicroBatch(lengths=np.array([7], dtype="<u4"), arrays={}, spans=[])
SETTINGS = {
    "llama": (["all-linear"], ["attention", "layers.0"]),
    "qwen3-moe": (["all-linear", "experts"], ["k_proj"]),
}
"""Targets, and what is frozen."""


def prepare(model: PreTrainedModel) -> None:
    """What a role does before its model is divided; numbers in B, as if trained already."""
    targets, frozen = SETTINGS["qwen3-moe" if "moe" in model.config.model_type else "llama"]
    freeze(model, frozen, role="policy")
    add_lora(model, LoraConfig(rank=2, targets=targets), frozen=frozen, role="policy", seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and not parameter.is_meta:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return packed_logits(model, ids, PackedLayout.of([len(ids)]), torch.arange(len(ids)))


def step(model: PreTrainedModel, ids: torch.Tensor, ranks: Ranks) -> float:
    """One update towards a sum of log-probabilities that all ranks share; returns the gradient's norm."""

    def loss_function(_: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        return -logits_of(model, ids).log_softmax(-1)[:, 5].sum() / ranks.size, {}

    result = Optimizer(model, OPTIM, ranks, warmup_updates=0).update([MICRO_BATCH], loss_function)
    assert result.applied, result.problem
    return result.grad_norm


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return float((one - two).norm()) <= RELATIVE * float(two.norm()) + 1e-9


@case(2)
def a_sharded_model_with_adapters_steps_and_merges_as_one_process_does(ranks: Ranks, folder: Path) -> None:
    mesh = Mesh.join(cp=1, ep=1, device=torch.device("cpu"))
    (ids,) = sequences(7)
    for name in SETTINGS:
        base = folder / name
        if ranks.rank == 0:
            build(base, name).save_pretrained(base)
        ranks.all_true(True)
        plain, alone = load_causal_lm(base), load_causal_lm(base)
        prepare(alone)
        for checkpointing in (False, True):
            layout = TrainModelConfig(activation_checkpointing=checkpointing)
            backbone = load_backbone(base, layout, mesh, prepare=prepare)
            backbone.complete(backbone.model, methods=())
            with torch.no_grad(), without_lora(backbone.model):
                assert torch.equal(logits_of(backbone.model, ids), logits_of(plain, ids)), name
            norm = step(backbone.model, ids, ranks)
            if not checkpointing:
                assert abs(step(alone, ids, Ranks()) - norm) <= RELATIVE * norm, name
            expected = dict(alone.named_parameters())
            for path, parameter in backbone.model.named_parameters():
                assert close(whole_tensor(parameter), expected[path].detach()), path
            gathered = backbone.gather(backbone.model)
            if ranks.rank == 0:
                merged = merged_state_dict(gathered, backbone.model)
                reference = merged_state_dict(alone.state_dict(), alone)
                assert all(close(tensor, reference[path]) for path, tensor in merged.items()), name
                changed = {path for path, tensor in merged.items() if not torch.equal(tensor, plain.state_dict()[path])}
                assert changed == {adapter.parameter for adapter in adapters_of(alone)}, name
