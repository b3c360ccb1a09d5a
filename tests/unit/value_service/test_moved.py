"""What of a critic each setting trains, and that its row of metrics says so: parts moved, parts left, updates made."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.config.train import ValueConfig
from services.model.backbone import what_trains
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.packing.grid import build_grid
from services.wire.grids import GridItem
from tests import trainers
from tests.architectures import VOCABULARY, build
from tests.samples import make_sample
from value_service.losses.measures import auc
from value_service.updater import Updater

DENSE = {"head", "attention", "mlp", "embeddings", "norms"}


@pytest.fixture
def model(tmp_path) -> PreTrainedModel:
    return build(tmp_path, "qwen3")


def updater_of(model: PreTrainedModel, *, movement_interval_steps: int = 1, **settings: Any) -> tuple[Updater, Critic]:
    """As the value service builds it, with a seeded head that is not zero."""
    config = ValueConfig.model_validate({"optim": {"lr": 1e-2}, "head": {"init_std": 0.1}} | settings)
    what_trains(config, role="value", seed=1)(model)
    critic = Critic(model, head_init_std=config.head.init_std, seed=2)
    return trainers.updater_of(critic, config, movement_interval_steps=movement_interval_steps), critic


def grid(step: int, num_mini_batches: int = 1) -> GridItem:
    """Four groups of one sample, targets 1 and 0 in turns."""
    rng, rows = np.random.default_rng(0), []
    for number in range(4):
        sample = make_sample(
            [1] * (number + 2), values=[0.1] * (number + 2), trace_id=f"t{number}", group_id=f"g{number}"
        )
        sample.branch.token_ids = rng.integers(3, VOCABULARY, sample.num_tokens).astype(np.uint32)
        sample.returns = np.where(sample.branch.action_mask, float(number % 2), 0.0)
        rows.append(sample)
    (item,) = build_grid(
        rows,
        stream="critic",
        seq_len=32,
        num_data_ranks=1,
        run_id="run",
        epoch=1,
        step=step,
        policy_version=0,
        temperature=1.0,
        loss_name="mse",
        loss_constants={},
        num_mini_batches=num_mini_batches,
    )
    return item


def moved(row: dict[str, Any]) -> dict[str, float]:
    """By part."""
    prefix = "value/moved/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("settings", "num_mini_batches", "num_updates", "still"),
    [
        ({}, 1, 1, set()),
        ({"updates_per_batch": 3}, 1, 3, set()),
        ({"updates_per_batch": 1}, 2, 2, set()),
        ({"updates_per_batch": 2}, 4, 8, set()),
        ({"freeze": ["attention"]}, 1, 1, {"attention"}),
        ({"freeze": ["attention", "norm"]}, 1, 1, {"attention"}),
        ({"freeze": ["layers", "embed_tokens"]}, 1, 1, {"attention", "mlp", "embeddings"}),
        ({"warmup": {"head_only_updates": 2}}, 1, 1, DENSE - {"head"}),
        ({"warmup": {"head_only_updates": 2}, "updates_per_batch": 3}, 1, 3, set()),
        ({"optim": {"lr": 0.0}}, 1, 1, DENSE),
    ],
)
def test_what_trains_moves_and_what_does_not_shows_exactly_zero(
    model: PreTrainedModel, settings: dict, num_mini_batches: int, num_updates: int, still: set[str]
) -> None:
    updater, _ = updater_of(model, **settings)
    row = updater.train(grid(0, num_mini_batches))
    assert moved(row).keys() == DENSE and row["value/updates"] == num_updates
    assert {part for part, how_far in moved(row).items() if how_far == 0.0} == still
    assert all(1e-4 < how_far < 1 for part, how_far in moved(row).items() if part not in still), moved(row)


def test_adapters_move_in_place_of_the_backbone_and_none_is_where_it_is_frozen(model: PreTrainedModel) -> None:
    updater, critic = updater_of(model, lora={"rank": 2, "targets": ["all-linear"]}, freeze=["attention"])
    row = updater.train(grid(0))
    assert {part for part, how_far in moved(row).items() if how_far > 0} == {"head", "adapters"}
    assert {part for part, how_far in moved(row).items() if how_far == 0.0} == DENSE - {"head"}
    adapted = {name for name, _ in critic.named_parameters() if "lora_" in name}
    assert adapted and not any("self_attn" in name for name in adapted)


def test_head_only_warmup_shows_step_by_step(model: PreTrainedModel) -> None:
    """Scenario: one update a step, the head alone for two. Result: the backbone moves from the third step on."""
    updater, _ = updater_of(model, warmup={"head_only_updates": 2})
    rows = [moved(updater.train(grid(step))) for step in range(4)]
    assert [row["head"] > 0 for row in rows] == [True] * 4
    assert [row["attention"] > 0 for row in rows] == [row["mlp"] > 0 for row in rows] == [False, False, True, True]


def test_a_zero_head_moves_by_one_and_its_norm_is_told(model: PreTrainedModel) -> None:
    updater, critic = updater_of(model, head={"init_std": 0.0})
    row = updater.train(grid(0))
    assert row["value/moved/head"] == 1.0 and row["value/moved/mlp"] == 0.0, "a zero head passes no gradient down"
    assert row["value/value_std"] == 0.0, "of before the step"
    head = torch.cat([critic.head.weight.flatten(), critic.head.bias]).detach().double()
    assert row["value/head_norm"] == pytest.approx(float(head.norm()), rel=1e-9) and row["value/head_norm"] > 0
    assert updater.train(grid(1))["value/value_std"] > 1e-3


def test_the_head_is_measured_every_step_and_the_rest_as_often_as_asked(model: PreTrainedModel) -> None:
    updater, _ = updater_of(model, movement_interval_steps=2)
    seen = [set(moved(updater.train(grid(step)))) for step in range(3)]
    assert seen == [DENSE, {"head"}, DENSE]


def test_more_updates_on_a_batch_move_farther_and_explain_more_of_it(model: PreTrainedModel) -> None:
    """K = 1, 4 and 16 from the same start; the fit of each step is told by the next one's row."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fits, distances = [], []
    for updates in (1, 4, 16):
        model.load_state_dict(start)
        updater, _ = updater_of(model, updates_per_batch=updates, optim={"lr": 1e-3})
        distances.append(updater.train(grid(0))["value/moved/mlp"])
        fits.append(updater.train(grid(1))["value/explained_variance"])
    assert all(one < other for one, other in pairwise(fits)) and all(one < other for one, other in pairwise(distances))


def test_with_mini_batches_the_row_is_pooled_over_the_first_pass(model: PreTrainedModel) -> None:
    """Without learning, a pass in four parts sees what one over the whole batch sees; with it, each token is measured
    before an update has seen it, so K passes report what one does."""
    rows = []
    for num_mini_batches in (1, 4):
        updater, _ = updater_of(model, optim={"lr": 0.0}, updates_per_batch=2)
        rows.append(updater.train(grid(0, num_mini_batches)))
    for name in rows[0].keys() - {"value/updates", "value/grad_norm"}:
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5, abs=1e-7), name
    assert rows[1]["value/loss_tokens"] == 14 and rows[1]["value/updates"] == 8
    start, told = {name: tensor.clone() for name, tensor in model.state_dict().items()}, []
    for passes in (1, 5):
        model.load_state_dict(start)
        updater, _ = updater_of(model, updates_per_batch=passes)
        told.append(updater.train(grid(0, 4)))
    for name in ("value/loss", "value/explained_variance", "value/brier", "value/auc", "value/grad_norm"):
        assert told[0][name] == told[1][name], name


def test_spread_of_values_and_auc_are_those_of_the_values_before_the_step(model: PreTrainedModel) -> None:
    """Against the critic's own values, taken one sample at a time."""
    updater, critic = updater_of(model)
    values, first = [], []
    for _, micro_batches in grid(0).mini_batches():
        for micro_batch in micro_batches:
            ids, start = torch.from_numpy(micro_batch.arrays["token_ids"].astype(np.int64)), 0
            for length in micro_batch.lengths.tolist():
                own = ids[start : start + length]
                with torch.no_grad():
                    after = critic(own, PackedLayout.of([length]))
                before = values_before_tokens(after, torch.tensor([length]))[0][1:].double().numpy()
                values.append(before)
                first.append((float(micro_batch.arrays["returns"][start + 1]), float(before[0])))
                start += length
    row = updater.train(grid(0))
    assert row["value/value_std"] == pytest.approx(float(np.concatenate(values).std()), rel=1e-4)
    good, bad = ([v for y, v in first if y == target] for target in (1.0, 0.0))
    wins = [float(g > b) + 0.5 * (g == b) for g in good for b in bad]
    assert row["value/auc"] == pytest.approx(sum(wins) / len(wins)) == auc(first)
