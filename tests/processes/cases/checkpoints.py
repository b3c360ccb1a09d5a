"""Checkpoints of a group: the same layout continues bit for bit, any other from the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from policy_trainer.trainer import PolicyTrainer
from services.config.train import PolicyConfig, ValueConfig
from services.model.backbone import Backbone, load_backbone, what_trains
from services.model.head import Critic
from services.model.logprobs import PolicyModel
from services.model.mesh import Mesh
from services.packing.grid import build_grid
from services.runtime.manifests import write_manifest
from services.training.board import StatusBoard
from services.training.checkpoint import load, save
from services.training.parts import Part, divided_in_critic, local_of, reshard
from services.training.ranks import Ranks
from tests.architectures import config_dir
from tests.processes.cases import case
from tests.processes.cases.layouts import SEQ_LEN, largest_difference, samples, whole, write_model
from value_service.losses import support_of
from value_service.updater import Updater

SETTINGS: dict[str, Any] = {
    "optim": {"lr": 1e-2, "max_grad_norm": 0.05, "eps": 1e-3, "weight_decay": 0.01},
    "warmup": {"lr_updates": 5},
}
"""Warmup ends after the saved step: a schedule that restarts is seen in the next rows."""
HL_GAUSS = {"type": "hl_gauss", "bins": 5, "pad": 1, "range": [-2.0, 2.0]}
RELATIVE = 1e-5
NUM_STEPS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Role:
    """A trainer, and what a checkpoint is made of."""

    trainer: PolicyTrainer | Updater
    backbone: Backbone
    part: Part
    config: PolicyConfig | ValueConfig
    board: StatusBoard = field(default_factory=lambda: StatusBoard("test"))

    def step(self) -> dict[str, Any]:
        """One grid; its row."""
        mesh = self.part.mesh
        if isinstance(self.config, PolicyConfig):
            stream, name, constants = "policy", "dis", {"eps_low": 0.5, "eps_high": 5.0}
        else:
            stream, name, constants = "critic", self.config.loss.type, self.config.loss.loss_constants()
        items = build_grid(
            samples(),
            stream=stream,
            seq_len=SEQ_LEN,
            num_data_ranks=mesh.num_data_ranks,
            run_id="run",
            epoch=1,
            step=0,
            policy_version=0,
            temperature=0.8,
            loss_name=name,
            loss_constants=constants,
        )
        return self.trainer.train(items[mesh.data_rank])

    def local(self) -> dict[str, torch.Tensor]:
        """Copies of all that this rank holds."""
        reshard(self.part.model)
        own = {name: local_of(p).clone() for name, p in self.part.model.named_parameters()}
        for name, entry in self.part.optimizer.state_dict()["moments"].items():
            own |= {f"{key} {name}": entry[key] for key in MOMENTS}
            own[f"steps {name}"] = torch.tensor(entry["num_steps"])
        return own

    def everything(self) -> dict[str, torch.Tensor]:
        """Parameters and moments, put together on every rank."""
        reshard(self.part.model)
        parameters = dict(self.part.model.named_parameters())
        named: dict[str, dict[str, torch.Tensor]] = {key: {} for key in ("parameter", *MOMENTS)}
        named["parameter"].update(parameters)
        for name, entry in self.part.optimizer.state_dict()["moments"].items():
            for key in MOMENTS:
                named[key][name] = _like(parameters[name], entry[key])
        return {
            f"{kind} {name}": tensor
            for kind, tensors in named.items()
            for name, tensor in whole(self.backbone, self.part.role, tensors).items()
        }


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def role_in(folder: Path, role: str, mesh: Mesh, ranks: Ranks, **settings: Any) -> Role:
    """A fresh trainer of the model in `folder`; `settings` go over SETTINGS."""
    settings = {**SETTINGS, **settings, "model": {"cp": mesh.cp, "ep": mesh.ep, **settings.get("model", {})}}
    if role == "policy":
        config = PolicyConfig.model_validate(settings)
        prepare = what_trains(config, role="policy", seed=1)
        backbone = load_backbone(folder, config.model, mesh, prepare=prepare)
        policy = PolicyModel(backbone.model)
        backbone.complete(policy, methods=("hidden", "both_logits"))
        policy.probe()  # leaves the root whole, as at the start of a run
        board, weights = StatusBoard("policy"), folder / "weights"
        trainer = PolicyTrainer(
            policy, backbone, ranks, board, config, weights_dir=weights, tokenizer_from=folder, reference=None
        )
        part = Part("policy", policy, trainer.optimizer, mesh, ranks, frozenset(backbone.divided), "language_model.")
        return Role(trainer, backbone, part, config, board)
    config = ValueConfig.model_validate(settings)
    backbone = load_backbone(folder, config.model, mesh, prepare=what_trains(config, role="value", seed=1))
    support = support_of(config.loss.type, config.loss.loss_constants())
    points = None if support is None else support.points.tolist()
    critic = Critic(backbone.model, head_init_std=0.3, seed=3, points=points)
    backbone.complete(critic, methods=("hidden", "outputs"), exact=(critic.head,))
    updater = Updater(critic, ranks, mesh, config)
    part = Part("critic", critic, updater.optimizer, mesh, ranks, divided_in_critic(backbone))
    return Role(updater, backbone, part, config)


def commit(folder: Path, role: Role, *, steps_done: int = NUM_STEPS) -> Path:
    """Save with a manifest."""
    save(folder, role.part, steps_done=steps_done)
    if role.part.ranks.rank == 0:
        write_manifest(folder, {})
    role.part.ranks.all_true(True)
    return folder


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    if one.keys() != other.keys():
        return False
    return all(one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one)


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: number for name, number in row.items() if not name.startswith("time/")}


def join(**layout: int) -> Mesh:
    return Mesh.join(device=torch.device("cpu"), **{"cp": 1, "ep": 1, **layout})


# ---------------------------------------------------------------------------------------------------------------------
# The same layout


def continues_bit_for_bit(
    ranks: Ranks, folder: Path, role: str, name: str, *, cp: int = 1, ep: int = 1, **settings: Any
) -> None:
    """N steps, a checkpoint into fresh objects, N more: weights, moments, rows and random numbers of 2 N steps."""
    write_model(folder, name, ranks)
    mesh = join(cp=cp, ep=ep)
    plain = role_in(folder, role, mesh, ranks, **settings)
    untouched = plain.local()
    rows = [plain.step() for _ in range(2 * NUM_STEPS)]

    first = role_in(folder, role, mesh, ranks, **settings)
    torch.manual_seed(100 + ranks.rank)
    for _ in range(NUM_STEPS):
        first.step()
    saved = first.local()
    commit(folder / "commit", first)
    assert same(first.local(), saved), "saving changes nothing"
    expected_numbers = torch.rand(3)

    second = role_in(folder, role, mesh, ranks, **settings)
    torch.manual_seed(0)
    state = load(folder / "commit", second.part, seed=1)
    assert same(second.local(), saved)
    assert (state.steps_done, state.num_updates) == (NUM_STEPS, first.part.optimizer.num_updates)
    numbers = torch.rand(3)
    assert torch.equal(numbers, expected_numbers), "random state continues"
    told = ranks.gather_f64([float(numbers[0])])
    assert len({row[0] for row in told}) == ranks.size, "each rank has its own"
    more = [second.step() for _ in range(NUM_STEPS)]
    assert [without_time(row) for row in more] == [without_time(row) for row in rows[NUM_STEPS:]]
    assert same(second.local(), plain.local())
    assert not same(second.local(), untouched)


def _continues(world: int, label: str, role: str, name: str, **settings: Any) -> None:
    def run(ranks: Ranks, folder: Path) -> None:
        continues_bit_for_bit(ranks, folder, role, name, **settings)

    run.__name__, run.__module__ = f"{role}_continues_bit_for_bit_{label}", __name__
    case(world)(run)


_continues(2, "mixture_ep2", "policy", "qwen3-moe", ep=2)
_continues(
    2,
    "frozen_attention_and_offload",
    "policy",
    "llama",
    freeze=["attention"],
    optim=SETTINGS["optim"] | {"offload": True},
)
_continues(2, "adapters", "policy", "llama", lora={"rank": 2})
_continues(2, "tied_embedding_cp2", "policy", "gemma2", cp=2)
_continues(2, "two_updates_frozen_attention", "critic", "qwen3-moe", ep=2, updates_per_batch=2, freeze=["attention"])
_continues(2, "points_and_offload", "critic", "llama", loss=HL_GAUSS, optim=SETTINGS["optim"] | {"offload": True})
_continues(4, "cp2_ep2", "policy", "qwen3-moe", cp=2, ep=2)
_continues(4, "two_updates_cp2_ep2", "critic", "qwen3-moe", cp=2, ep=2, updates_per_batch=2)
_continues(4, "bfloat16", "critic", "llama", model={"dtype": "bfloat16"})


# ---------------------------------------------------------------------------------------------------------------------
# Another layout


def reads_the_same(folder: Path, path: Path, saved: Role, ranks: Ranks, layouts: list[dict[str, int]]) -> None:
    """What was saved is read in each layout, and by one process; the next step there is the one that was to come."""
    role, name_of = saved.part.role, saved.backbone.model.config.model_type
    before = saved.everything()
    saved.step()
    after = saved.everything()
    settings = {key: value for key, value in saved.config.model_dump().items() if key != "model"}
    for layout in (*layouts, None):
        own_ranks, mesh = (Ranks(), Mesh()) if layout is None else (ranks, join(**layout))
        other = role_in(folder, role, mesh, own_ranks, **settings)
        load(path, other.part, seed=1)
        found = other.everything()
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in found), (name_of, layout)
        other.step()
        gap = largest_difference(other.everything(), after)
        assert gap < RELATIVE, (name_of, layout, gap)


def _reshards(role: str, name: str, layout: dict[str, int], layouts: list[dict[str, int]], **settings: Any) -> None:
    def run(ranks: Ranks, folder: Path) -> None:
        write_model(folder, name, ranks)
        saved = role_in(folder, role, join(**layout), ranks, **settings)
        for _ in range(NUM_STEPS):
            saved.step()
        reads_the_same(folder, commit(folder / "commit", saved), saved, ranks, layouts)

    told = "_".join(f"{axis}{degree}" for axis, degree in layout.items())
    run.__name__, run.__module__ = f"{role}_of_{name}_at_{told}_is_read_in_other_layouts", __name__
    case(4)(run)


_FLAT, _PAIRS, _ROW = {"cp": 1, "ep": 1}, {"cp": 2, "ep": 1}, {"cp": 4, "ep": 1}
_reshards("policy", "qwen3-moe", {"cp": 1, "ep": 2}, [_PAIRS, _ROW, {"cp": 2, "ep": 4}])
_reshards("critic", "qwen3-moe", {"cp": 1, "ep": 2}, [_PAIRS, _ROW], updates_per_batch=2)
_reshards("critic", "llama", {"cp": 4, "ep": 1}, [_FLAT], loss=HL_GAUSS)


@case(4)
def a_checkpoint_of_one_process_is_read_by_four(ranks: Ranks, folder: Path) -> None:
    write_model(folder, "qwen3-moe", ranks)
    alone = role_in(folder, "critic", Mesh(), Ranks())
    alone.step()
    if ranks.rank == 0:
        commit(folder / "commit", alone)
    ranks.all_true(True)
    reads_the_same(folder, folder / "commit", alone, ranks, [{"cp": 1, "ep": 2}, {"cp": 2, "ep": 4}, _FLAT])


@case(4)
def experts_of_which_some_ranks_hold_none_are_read_whole(ranks: Ranks, folder: Path) -> None:
    """Two experts, ep 2 and two replicas: one replica of each expert holds nothing, and begins where the next does."""
    if ranks.rank == 0:
        config = AutoConfig.from_pretrained(config_dir(folder / "four", "qwen3-moe"))
        config.num_experts = 2
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    ranks.all_true(True)
    saved = role_in(folder, "policy", join(ep=2), ranks)
    rows = [len(local_of(saved.part.model.get_parameter(f"language_model.{name}"))) for name in saved.backbone.divided]
    assert set(rows) == ({1} if ranks.rank < 2 else {0}), rows
    saved.step()
    reads_the_same(folder, commit(folder / "commit", saved), saved, ranks, [{"cp": 2, "ep": 2}, _FLAT])


@case(2)
def a_head_of_one_row_is_read_from_any_rank(ranks: Ranks, folder: Path) -> None:
    """K = 1: rank 0 holds the head, rank 1 nothing of it; offload comes and goes."""
    write_model(folder, "llama", ranks)
    saved = role_in(folder, "critic", join(), ranks)
    weight = saved.part.model.get_parameter("head.weight")
    assert len(local_of(weight)) == (1 if ranks.rank == 0 else 0)
    saved.step()
    path = commit(folder / "commit", saved)
    offloaded = role_in(folder, "critic", join(cp=2), ranks, optim=SETTINGS["optim"] | {"offload": True})
    load(path, offloaded.part, seed=1)
    assert same(offloaded.local(), saved.local())
    reads_the_same(folder, path, saved, ranks, [{"cp": 2, "ep": 1}])


@case(2)
def random_state_of_another_layout_follows_from_seed_and_rank(ranks: Ranks, folder: Path) -> None:
    write_model(folder, "llama", ranks)
    path = commit(folder / "commit", role_in(folder, "policy", join(), ranks))
    drawn = []
    for seed in (1, 1, 2):
        load(path, role_in(folder, "policy", join(cp=2), ranks).part, seed=seed)
        drawn.append(float(torch.rand(1, dtype=torch.float64)))
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({row[0] for row in ranks.gather_f64(drawn[:1])}) == 2
