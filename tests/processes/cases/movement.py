"""How far the parts of a sharded model moved is what one process says of the whole one."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from services.training.movement import Movement
from services.training.ranks import Ranks
from tests.processes.cases import case
from tests.processes.cases.optimizer import loss_of, micro_batches, optimizer_of, seeded, sharded

WORLD = 2


@case(2)
def parts_of_a_sharded_model_move_as_those_of_the_whole_one(ranks: Ranks, folder: Path) -> None:
    """Scenario: a body, one expert a rank, a head of which one rank holds nothing; the bias of the body is frozen. Two
    updates. Result: the numbers of one process within f32 rounding of the step itself, alike on both ranks to the last
    bit; and of a change that is made by hand within f64 rounding."""
    net, whole = sharded(ranks), seeded()
    ours, alone = optimizer_of(net, ranks), optimizer_of(whole, Ranks())
    measured, expected = Movement(net, ranks, interval_steps=1), Movement(whole, Ranks(), interval_steps=1)
    measured.begin(0), expected.begin(0)
    for _ in range(2):
        assert ours.update(micro_batches(), loss_of(net, [ranks.rank])).applied
        assert alone.update(micro_batches(), loss_of(whole, list(range(WORLD)))).applied
    found, theirs = measured.end(), expected.end()
    assert found.keys() == theirs.keys() == {"experts", "head", "other"}
    for part, moved in found.items():
        assert moved.relative > 1e-3, part
        assert math.isclose(moved.relative, theirs[part].relative, rel_tol=1e-5), (part, moved, theirs[part])
        assert math.isclose(moved.norm, theirs[part].norm, rel_tol=1e-6), (part, moved, theirs[part])
    rows = ranks.gather_f64([number for moved in found.values() for number in (moved.relative, moved.norm)])
    assert rows[0] == rows[1]

    net, whole = sharded(ranks), seeded()
    for module in (net, whole):
        module.body.bias.requires_grad_(False)
    measured, expected = Movement(net, ranks, interval_steps=1), Movement(whole, Ranks(), interval_steps=1)
    measured.begin(0), expected.begin(0)
    with torch.no_grad():
        for module in (net, whole):
            for name, parameter in module.named_parameters():
                if "body" not in name:
                    parameter.mul_(1.25)
    found, theirs = measured.end(), expected.end()
    assert found["experts"].relative == 0.2 or math.isclose(found["experts"].relative, 0.2, rel_tol=1e-6)
    for part, moved in found.items():
        assert math.isclose(moved.relative, theirs[part].relative, rel_tol=1e-12), (part, moved, theirs[part])
        assert math.isclose(moved.norm, theirs[part].norm, rel_tol=1e-12), (part, moved, theirs[part])


@case(2)
def replicas_count_once_and_what_did_not_move_shows_exactly_zero(ranks: Ranks, folder: Path) -> None:
    """Plain parameters on both ranks: (3, 4) to (3, 3) is a fifth, not more because there are two of them."""
    net = torch.nn.Module()
    net.mlp = torch.nn.Linear(2, 1, bias=False)
    net.norm = torch.nn.LayerNorm(2)
    with torch.no_grad():
        net.mlp.weight.copy_(torch.tensor([[3.0, 4.0]]))
    movement = Movement(net, ranks, interval_steps=1)
    movement.begin(0)
    with torch.no_grad():
        net.mlp.weight[0, 1] -= 1.0
    moved = movement.end()
    assert math.isclose(moved["mlp"].relative, 0.2, rel_tol=1e-12) and math.isclose(moved["mlp"].norm, math.sqrt(18))
    assert moved["norms"].relative == 0.0 and math.isclose(moved["norms"].norm, math.sqrt(2))
