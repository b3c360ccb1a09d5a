"""Law 1 in every layout: values, losses, gradients and the step of a group are those of one process."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from policy_trainer.trainer import PolicyTrainer
from services.config.train import PolicyConfig, TrainModelConfig, ValueConfig
from services.model.backbone import Backbone, load_backbone
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.model.logprobs import PolicyModel
from services.model.mesh import Mesh
from services.model.selftest import check_packing
from services.model.shard import whole_tensor
from services.packing.grid import build_grid
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample
from tests.architectures import VOCABULARY, build, config_dir
from tests.processes.cases import case
from tests.samples import make_sample
from value_service.updater import Updater

SEQ_LEN = 36
TEMPERATURE = 0.8
MASKS = [[1], [1, 1, 0, 1], [0, 0, 1, 0, 1, 1, 1], [1] * 19, [0, 1] * 8, [1, 0, 0, 1, 1], [1] * 33]
"""Mixed lengths, of one action token and more, none divisible by the context ranks; dummies where ranks are many."""
RELATIVE = 1e-5
ARCHITECTURES = ("llama", "qwen2 with a window", "qwen3", "gemma2", "gemma3", "qwen3-moe")


def device() -> torch.device:
    """The CPU; a benchmark may ask for this rank's GPU."""
    if os.environ.get("CASES_ON_CUDA"):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def write_model(folder: Path, name: str, ranks: Ranks) -> Path:
    """The same random model as a folder for every rank."""
    if ranks.rank == 0 and not (folder / "model.safetensors").exists():
        build(folder, name).save_pretrained(folder)
    ranks.all_true(True)
    return folder


def samples() -> list[TrainingSample]:
    rng, out = np.random.default_rng(1), []
    for number, mask in enumerate(MASKS):
        sample = make_sample(mask, trace_id=f"t{number}", group_id=f"g{number}", prompt=2)
        branch = sample.branch
        branch.token_ids = rng.integers(3, VOCABULARY, sample.num_tokens).astype(np.uint32)
        branch.logprobs[branch.action_mask] = rng.normal(-4.0, 0.5, int(branch.action_mask.sum()))
        for name in ("values", "advantages", "returns"):
            setattr(sample, name, np.where(branch.action_mask, rng.normal(size=sample.num_tokens), 0.0))
        out.append(sample)
    return out


def grid(stream: Any, num_data_ranks: int) -> list[GridItem]:
    losses = {"policy": ("dis", {"eps_low": 0.5, "eps_high": 5.0}), "critic": ("mse", {})}
    name, constants = losses[stream]
    return build_grid(
        samples(),
        stream=stream,
        seq_len=SEQ_LEN,
        num_data_ranks=num_data_ranks,
        run_id="run",
        epoch=1,
        step=0,
        policy_version=0,
        temperature=TEMPERATURE,
        loss_name=name,
        loss_constants=constants,
    )


OPTIM = {"lr": 1e-2, "max_grad_norm": 0.05, "eps": 1e-3, "weight_decay": 0.01}


def trained_policy(folder: Path, mesh: Mesh, ranks: Ranks, **layout: Any) -> tuple[dict, Backbone, PolicyModel]:
    """One policy step in a layout: its metrics row and the model after it."""
    config = PolicyConfig.model_validate({"optim": OPTIM, "kl": {"coef": 0.1}, "model": layout})
    backbone, policy = policy_in(folder, mesh, config.model)
    _, reference = policy_in(folder, mesh, config.model)
    trainer = PolicyTrainer(
        policy,
        backbone,
        ranks,
        StatusBoard("policy"),
        config,
        weights_dir=folder / "weights",
        tokenizer_from=folder,
        reference=reference,
    )
    row = trainer.train(grid("policy", mesh.num_data_ranks)[mesh.data_rank])
    return row, backbone, policy


def policy_in(folder: Path, mesh: Mesh, layout: TrainModelConfig) -> tuple[Backbone, PolicyModel]:
    backbone = load_backbone(folder, layout, mesh)
    policy = PolicyModel(backbone.model)
    backbone.complete(policy, methods=("hidden", "both_logits"))
    policy.probe()
    return backbone, policy


def critic_in(folder: Path, mesh: Mesh, layout: TrainModelConfig) -> tuple[Backbone, Critic]:
    backbone = load_backbone(folder, layout, mesh)
    critic = Critic(backbone.model, head_init_std=0.3, seed=3)
    backbone.complete(critic, methods=("hidden", "outputs"), exact=(critic.head,))
    return backbone, critic


def trained_critic(folder: Path, mesh: Mesh, ranks: Ranks, **layout: Any) -> tuple[dict, Backbone, Critic]:
    """Two critic updates in a layout."""
    config = ValueConfig.model_validate({"optim": OPTIM, "updates_per_batch": 2, "model": layout})
    backbone, critic = critic_in(folder, mesh, config.model)
    updater = Updater(critic, ranks, mesh, config)
    row = updater.train(grid("critic", mesh.num_data_ranks)[mesh.data_rank])
    return row, backbone, critic


def whole(backbone: Backbone, role: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a role's module put together on every rank, experts included."""
    mesh, out = backbone.mesh, {}
    for name, tensor in tensors.items():
        full = whole_tensor(tensor)
        inner = name.removeprefix("language_model.")
        if role == "critic":  # it holds the base model alone
            inner = backbone.model.base_model_prefix + "." + name.removeprefix("backbone.")
        if inner in backbone.divided:
            parts = [torch.empty_like(full) for _ in range(mesh.ep)]
            torch.distributed.all_gather(parts, full.contiguous(), group=mesh.ep_group)
            full = torch.cat(parts)
        out[name] = full.clone()
    return out


def _present(name: str, gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, f"{name} has no gradient"
    return gradient


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """One of every parameter."""
    return {name: _present(name, p.grad) for name, p in model.named_parameters()}


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of any tensor, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(
        float((tensor.double() - expected[name].double()).norm()) / max(float(expected[name].double().norm()), 1e-6)
        for name, tensor in found.items()
    )


def assert_rows_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, number in found.items():
        if isinstance(number, float):
            assert abs(number - expected[name]) <= 2e-5 * max(abs(expected[name]), 0.1), (name, number, expected[name])
        else:
            assert number == expected[name], name


@functools.cache
def alone(folder: Path, role: str) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Row, gradients and weights of one process; computed by every rank for itself."""
    row, backbone, model = TRAIN[role](folder, Mesh(device=device()), Ranks())
    return row, whole(backbone, role, gradients_of(model)), whole(backbone, role, dict(model.named_parameters()))


def step_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: nn.Module) -> float:
    """Of the whole step, relative to its norm: an entry of rounding noise may move by the learning rate."""
    before = dict(start.named_parameters())
    apart = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    step = sum(float((tensor.double() - before[name].double()).square().sum()) for name, tensor in expected.items())
    return math.sqrt(apart / step)


TRAIN = {"policy": trained_policy, "critic": trained_critic}


@dataclass(frozen=True)
class Differences:
    """Of a group's step from one process's: any gradient relative to its norm, the step relative to its own."""

    row: dict[str, Any]
    row_alone: dict[str, Any]
    loss: float
    gradient: float
    step: float


def compare(
    folder: Path, name: str, ranks: Ranks, *, role: str, cp: int, ep: int, checkpointing: bool = False
) -> Differences:
    """Train one step in a layout and by one process, and assert on the way that the model really is divided."""
    write_model(folder, name, ranks)
    mesh = Mesh.join(cp=cp, ep=ep, device=device())
    row, gradients, weights = alone(folder, role)
    layout = {"cp": cp, "ep": ep, "activation_checkpointing": checkpointing}
    found_row, backbone, model = TRAIN[role](folder, mesh, ranks, **layout)
    assert_divided(model, mesh)
    loss = {"policy": "policy/loss", "critic": "value/loss"}[role]
    return Differences(
        found_row,
        row,
        abs(found_row[loss] - row[loss]) / abs(row[loss]),
        largest_difference(whole(backbone, role, gradients_of(model)), gradients),
        step_difference(whole(backbone, role, dict(model.named_parameters())), weights, start_of(folder, role)),
    )


@functools.cache
def start_of(folder: Path, role: str) -> nn.Module:
    """A role's module before its first step, in one process."""
    make = policy_in if role == "policy" else critic_in
    return make(folder, Mesh(device=device()), TrainModelConfig())[1]


def assert_divided(model: nn.Module, mesh: Mesh) -> None:
    """Each rank holds 1 / size of all elements, but for what a dimension does not divide by."""
    local = whole = 0
    for parameter in model.parameters():
        own = parameter.to_local()
        local += own.numel()
        experts = mesh.ep if parameter.device_mesh.size() * mesh.ep == mesh.size and mesh.ep > 1 else 1
        whole += parameter.numel() * experts
    rows = torch.tensor([float(local)], device=mesh.device)
    torch.distributed.all_reduce(rows)
    assert int(rows) == whole, "an element lives on no rank, or on two"
    assert local <= 1.35 * whole / mesh.size, (local, whole)


@case(4)
def every_architecture_packs_alike_at_cp_1_2_and_4(ranks: Ranks, folder: Path) -> None:
    for name in ARCHITECTURES:
        for cp in (1, 2, 4):
            model_dir = folder / name.replace(" ", "_")
            model_dir.mkdir(exist_ok=True)
            write_model(model_dir, name, ranks)
            mesh = Mesh.join(cp=cp, ep=1, device=device())
            _, policy = policy_in(model_dir, mesh, TrainModelConfig(cp=cp))
            assert check_packing(policy.hidden, VOCABULARY, name=name, mesh=mesh) < 1e-5, (name, cp)


def _add(world: int, role: str, cp: int, ep: int = 1, name: str = "qwen3-moe", checkpointing: bool = False) -> None:
    def run(ranks: Ranks, folder: Path) -> None:
        differences = compare(folder, name, ranks, role=role, cp=cp, ep=ep, checkpointing=checkpointing)
        assert_rows_close(differences.row, differences.row_alone)
        assert max(differences.loss, differences.gradient, differences.step) < RELATIVE, differences

    run.__name__ = f"{role}_{name}_cp{cp}_dp{world // cp}_ep{ep}{'_checkpointing' if checkpointing else ''}"
    run.__module__ = __name__
    case(world)(run)


for _role in ("policy", "critic"):
    for _cp in (1, 2, 4):
        _add(4, _role, _cp)
        _add(4, _role, _cp, name="gemma2")
    _add(4, _role, 1, ep=2)
    _add(4, _role, 2, ep=2)
    _add(4, _role, 2, ep=4, checkpointing=True)
    _add(2, _role, 2)
    _add(2, _role, 1, ep=2)
    _add(2, _role, 1, name="llama", checkpointing=True)


@case(4)
def a_context_rank_holds_its_stretch_of_the_hidden_states_and_values_come_back_in_order(
    ranks: Ranks, folder: Path
) -> None:
    write_model(folder, "llama", ranks)
    lengths = [5, 1, 1, 8, 3, 13]  # 31 tokens: one of padding
    ids = torch.arange(31) * 7 % VOCABULARY
    _, whole = critic_in(folder, Mesh(), TrainModelConfig())
    expected = whole(ids, PackedLayout.of(lengths))
    for cp in (2, 4):
        mesh = Mesh.join(cp=cp, ep=1, device=device())
        _, critic = critic_in(folder, mesh, TrainModelConfig(cp=cp))
        layout = PackedLayout.of(lengths, mesh=mesh)
        seen: list[int] = []
        critic.backbone.layers[0].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.shape[1]))
        with torch.no_grad():
            values = critic(ids, layout)
        assert values.shape == (32 // cp,) and seen == [32 // cp]
        torch.testing.assert_close(layout.gather(values), expected.detach(), atol=1e-5, rtol=1e-5)
        length_S = torch.tensor(lengths)
        for ours, theirs in zip(
            values_before_tokens(layout.gather(values), length_S), values_before_tokens(expected, length_S), strict=True
        ):
            torch.testing.assert_close(ours, theirs.detach(), atol=1e-5, rtol=1e-5)


@case(2)
def a_published_snapshot_of_a_sharded_mixture_is_what_transformers_reads(ranks: Ranks, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from services.model.snapshot import save_snapshot

    write_model(folder, "qwen3-moe", ranks)
    mesh = Mesh.join(cp=1, ep=2, device=device())
    backbone, policy = policy_in(folder, mesh, TrainModelConfig(ep=2))
    state = backbone.gather(policy)
    if ranks.rank == 0:
        path = save_snapshot(backbone.skeleton, folder / "weights", 3, tokenizer_from=folder, state=state)
        read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
        source = AutoModelForCausalLM.from_pretrained(folder)
        for (name, ours), theirs in zip(read.named_parameters(), source.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
    else:
        assert state == {}


@case(2)
def random_weights_are_the_same_whatever_the_layout(ranks: Ranks, folder: Path) -> None:
    if ranks.rank == 0:
        config_dir(folder, "qwen3-moe")
    ranks.all_true(True)
    one = load_backbone(folder, TrainModelConfig(), Mesh(), init="random", seed=5)
    mesh = Mesh.join(cp=2, ep=2, device=device())
    backbone = load_backbone(folder, TrainModelConfig(cp=2, ep=2), mesh, init="random", seed=5)
    policy = PolicyModel(backbone.model)
    backbone.complete(policy, methods=("hidden", "both_logits"))
    state = backbone.gather(policy)
    if ranks.rank == 0:
        assert state.keys() == dict(one.model.named_parameters()).keys()
        assert all(torch.equal(state[n], p.detach()) for n, p in one.model.named_parameters())
