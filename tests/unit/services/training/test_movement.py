"""How far the parts of a model moved: by hand, exactly 0 where nothing moved, never more often than asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from services.model.freeze import freeze
from services.model.head import Critic
from services.training.movement import PARTS, Movement, part_of
from services.training.ranks import Ranks
from tests.architectures import PACKABLE, build


class Small(nn.Module):
    """A head of zeros, an MLP with weights 3 and 4, a norm of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)
        self.mlp = nn.Linear(2, 1, bias=False)
        self.norm = nn.LayerNorm(2)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()
            self.mlp.weight.copy_(torch.tensor([[3.0, 4.0]]))


def movement_of(net: nn.Module, **settings) -> Movement:
    return Movement(net, Ranks(), **{"interval_steps": 1} | settings)


def test_a_part_moves_by_its_change_over_the_larger_of_its_norms() -> None:
    """By hand: the head goes from 0 to (1, 2, 2), the MLP from (3, 4) to (3, 3): 1 / 5."""
    net = Small()
    movement = movement_of(net)
    movement.begin(0)
    with torch.no_grad():
        net.head.weight.copy_(torch.tensor([[1.0, 2.0]]))
        net.head.bias.fill_(2.0)
        net.mlp.weight[0, 1] -= 1.0
    moved = movement.end()
    assert list(moved) == ["head", "mlp", "norms"]
    assert moved["head"].relative == 1.0 and moved["head"].norm == 3.0
    assert moved["mlp"].relative == pytest.approx(0.2, rel=1e-12) and moved["mlp"].norm == pytest.approx(18**0.5)
    assert moved["norms"].relative == 0.0 and moved["norms"].norm == pytest.approx(2**0.5)


def test_a_head_that_is_wiped_out_moves_by_one_and_its_norm_says_so_and_zeros_that_stay_move_by_none() -> None:
    net = Small()
    movement = movement_of(net)
    movement.begin(0)
    assert movement.end()["head"].relative == movement.end()["head"].norm == 0.0
    with torch.no_grad():
        net.head.weight.fill_(1.0)
    movement.begin(1)
    with torch.no_grad():
        net.head.weight.zero_()
    moved = movement.end()["head"]
    assert moved.relative == 1.0 and moved.norm == 0.0


def test_several_updates_count_as_the_one_change_that_they_make() -> None:
    """There and back again is no movement, however long the way was."""
    net = Small()
    movement = movement_of(net)
    movement.begin(0)
    with torch.no_grad():
        net.mlp.weight.mul_(2.0)
        net.mlp.weight.mul_(0.5)
    assert movement.end()["mlp"].relative == 0.0


def test_what_is_frozen_shows_exactly_zero_and_would_show_if_it_did_move() -> None:
    net = Small()
    net.mlp.weight.requires_grad_(False)
    movement = movement_of(net)
    movement.begin(0)
    with torch.no_grad():
        net.head.bias.add_(1.0)
    moved = movement.end()
    assert moved["mlp"].relative == 0.0 and moved["head"].relative == 1.0
    movement.begin(1)
    with torch.no_grad():
        net.mlp.weight.mul_(1.1)
    assert movement.end()["mlp"].relative == pytest.approx(0.1 / 1.1, rel=1e-6)


def test_parts_are_measured_every_so_many_steps_and_some_always() -> None:
    movement = movement_of(Small(), interval_steps=3, always=("head",))
    seen = []
    for step in range(5):
        movement.begin(step)
        seen.append(list(movement.end()))
    everything = ["head", "mlp", "norms"]
    assert seen == [everything, ["head"], ["head"], everything, ["head"]]
    off = movement_of(Small(), interval_steps=0)
    off.begin(0)
    assert off.end() == {}


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gemma2"])
def test_every_parameter_of_an_architecture_is_of_a_named_part(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, name)
    paths = [path for path, _ in Critic(model, head_init_std=0.1, seed=1).named_parameters()]
    parts = {path: part_of(path) for path in paths}
    assert "other" not in parts.values() and {*parts.values()} <= {*PARTS}
    expected = {"head", "attention", "embeddings", "norms", "mlp"} | ({"experts"} if "moe" in name else set())
    assert {*parts.values()} == expected
    assert {path for path, part in parts.items() if part == "head"} == {"head.weight", "head.bias"}
    frozen = {f"backbone.{path.removeprefix('model.')}" for path in freeze(model, ["attention"], role="value")}
    assert {path for path, part in parts.items() if part == "attention"} == frozen, "as freeze has it"
    assert name in PACKABLE


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("language_model.lm_head.weight", "head"),
        ("backbone.layers.0.self_attn.q_proj.lora_A.default.weight", "adapters"),
        ("backbone.layers.0.self_attn.q_proj.base_layer.weight", "attention"),
        ("backbone.layers.0.post_attention_layernorm.weight", "norms"),
        ("backbone.layers.0.mlp.gate.weight", "mlp"),
        ("backbone.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("backbone.layers.0.conv.weight", "other"),
        ("transformer.ln_f.weight", "norms"),
        ("backbone.headroom.weight", "other"),
    ],
)
def test_a_part_is_told_by_whole_components_of_the_path(path: str, part: str) -> None:
    assert part_of(path) == part
