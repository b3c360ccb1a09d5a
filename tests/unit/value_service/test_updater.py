"""One critic step: K updates on fixed targets, metrics of the first forward, nothing where nothing trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.config.train import ValueConfig
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.packing.grid import build_grid
from services.wire.codec import digest_arrays
from services.wire.errors import ContractError
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample
from tests import trainers
from tests.architectures import VOCABULARY, build
from tests.samples import make_sample
from value_service.losses.support import Support
from value_service.updater import Updater

SUPPORT = Support(0.0, 1.0, 11)
TWO_HOT = {"low": 0.0, "high": 1.0, "num_bins": 11.0, "pad_bins": 3.0}
CLASSIFY = {"two_hot": TWO_HOT, "hl_gauss": TWO_HOT | {"sigma_ratio": 0.75}}


@pytest.fixture
def model(tmp_path) -> PreTrainedModel:
    return build(tmp_path, "qwen3")


def critic_of(model: PreTrainedModel, init_std: float = 0.1, support: Support | None = None) -> Critic:
    return Critic(model, head_init_std=init_std, seed=2, points=None if support is None else support.points.tolist())


def updater_of(critic: Critic, **settings) -> Updater:
    config = {"optim": {"lr": 1e-2}, "updates_per_batch": 2} | settings
    return trainers.updater_of(critic, ValueConfig.model_validate(config))


def samples() -> list[TrainingSample]:
    """Two turns with an observation between, and a single turn; targets of 1 and 0."""
    out = [
        make_sample([1, 1, 0, 0, 1], values=[0.5, 0.4, 9, 9, 0.2], trace_id="t0", prompt=3),
        make_sample([1] * 6, values=[0.1] * 6, trace_id="t1", prompt=2, reward=0.0),
    ]
    rng = np.random.default_rng(0)
    for number, sample in enumerate(out):
        sample.branch.token_ids = rng.integers(3, VOCABULARY, sample.num_tokens).astype(np.uint32)
        sample.returns = np.where(sample.branch.action_mask, 1.0 - number, 0.0)
    return out


def grid(rows: list[TrainingSample], **settings) -> GridItem:
    (item,) = grids(rows, **settings)
    return item


def grids(
    rows: list[TrainingSample],
    *,
    loss_name: str = "mse",
    temperature: float = 1.0,
    constants: dict[str, float] | None = None,
    num_ranks: int = 1,
    seq_len: int = 32,
) -> list[GridItem]:
    return build_grid(
        rows,
        stream="critic",
        seq_len=seq_len,
        num_data_ranks=num_ranks,
        run_id="run",
        epoch=1,
        step=0,
        policy_version=0,
        temperature=temperature,
        loss_name=loss_name,
        loss_constants=constants or {},
    )


def weights(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in critic.state_dict().items()}


def moved(before: dict[str, torch.Tensor], critic: Critic) -> set[str]:
    return {name for name, tensor in critic.state_dict().items() if not torch.equal(tensor, before[name])}


def test_one_step_changes_the_head_and_the_backbone(model: PreTrainedModel) -> None:
    """B30: a critic whose values were detached would train nothing."""
    critic = critic_of(model)
    before = weights(critic)
    updater_of(critic).train(grid(samples()))
    names = moved(before, critic)
    assert {"head.weight", "head.bias"} <= names
    assert {name for name in before if "layers" in name} <= names


def test_a_zero_head_learns_in_the_first_update_and_the_backbone_in_the_second(model: PreTrainedModel) -> None:
    """A zero head passes no gradient down: with it, the first update can only move the head itself."""
    critic = critic_of(model, init_std=0.0)
    before = weights(critic)
    updater_of(critic, updates_per_batch=1).train(grid(samples()))
    assert moved(before, critic) == {"head.weight", "head.bias"}
    updater_of(critic, updates_per_batch=1).train(grid(samples()))
    assert any("layers" in name for name in moved(before, critic))


def test_k_updates_are_taken_and_the_targets_stay_as_they_were_sent(model: PreTrainedModel) -> None:
    """B31."""
    updater, item = updater_of(critic_of(model), updates_per_batch=5), grid(samples())
    digest = digest_arrays(item.arrays)
    row = updater.train(item)
    assert row["value/updates"] == updater.optimizer.num_updates == 5
    assert digest_arrays(item.arrays) == digest == item.header.digest


def test_loss_and_explained_variance_are_those_before_the_first_update(model: PreTrainedModel) -> None:
    critic, rows = critic_of(model), samples()
    masks = [torch.from_numpy(sample.branch.action_mask) for sample in rows]
    errors, targets = [], []
    for sample, mask in zip(rows, masks, strict=True):
        ids = torch.from_numpy(sample.branch.token_ids.astype(np.int64))
        with torch.no_grad():
            values, _ = values_before_tokens(critic(ids, PackedLayout.of([len(ids)])), torch.tensor([len(ids)]))
        targets.append(torch.tensor(sample.returns)[mask])
        errors.append(targets[-1] - values[mask].double())
    error, target = torch.cat(errors), torch.cat(targets)
    row = updater_of(critic, updates_per_batch=4).train(grid(rows))
    assert row["value/loss"] == pytest.approx(float(0.5 * error.square().mean()), rel=1e-5)
    expected = 1 - float(error.var(correction=0) / target.var(correction=0))
    assert row["value/explained_variance"] == pytest.approx(expected, rel=1e-4)
    assert row["value/return_mean"] == pytest.approx(float(target.mean()), rel=1e-6)


def test_the_fit_at_scoring_is_that_of_the_values_that_were_sent(model: PreTrainedModel) -> None:
    rows = samples()
    for sample in rows:
        assert sample.returns is not None
        sample.values = np.where(sample.branch.action_mask, 0.5 * sample.returns, 7.0)
    row = updater_of(critic_of(model)).train(grid(rows))
    assert row["value/explained_variance_at_scoring"] == pytest.approx(0.75)


def fits_of(row: dict) -> dict:
    """Everything that compares values with targets as measures of the critic."""
    return {k: v for k, v in row.items() if "explained_variance" in k or "calibration" in k or k == "value/brier"}


def test_a_target_that_holds_the_critic_s_own_value_trains_and_counts_in_no_measure_of_fit(
    model: PreTrainedModel,
) -> None:
    """Scenario: a zero head, targets 1 (three tokens) and 0 (six), a cut trace of three tokens with target 2.

    By hand: half squares sum to 3 * 0.5 without the cut trace and to 3 * 0.5 + 3 * 2 with it, over 9 and 12 tokens.
    At scoring, values of half the target leave a quarter of the variance; the cut trace, all wrong, would change that.
    The gradient of the head's bias is the mean error.
    """
    rows, cut = samples(), make_sample([1, 1, 1], values=[9.0, -9.0, 9.0], trace_id="t2")
    for sample in rows:
        sample.values = 0.5 * np.asarray(sample.returns)
    cut.returns, cut.bootstrapped = np.where(cut.branch.action_mask, 2.0, 0.0), True
    optim = {"lr": 0.0, "max_grad_norm": 1e9}
    without = updater_of(critic_of(model, 0.0), optim=optim).train(grid(rows))
    critic = critic_of(model, 0.0)
    row = updater_of(critic, optim=optim).train(grid([rows[0], cut, rows[1]]))
    assert fits_of(row) == fits_of(without) and len(fits_of(row)) > 5
    assert row["value/explained_variance_at_scoring"] == pytest.approx(0.75)
    assert row["value/explained_variance"] == 0.0 and row["value/ev_undefined"] == 0.0
    assert without["value/loss"] == pytest.approx(1.5 / 9) and row["value/loss"] == pytest.approx(7.5 / 12)
    assert row["value/return_mean"] == pytest.approx(9 / 12) and row["value/bias"] == pytest.approx(-9 / 12)
    assert row["value/bootstrapped_fraction"] == pytest.approx(3 / 12) and row["value/loss_tokens"] == 12
    assert without["value/bootstrapped_fraction"] == 0.0
    assert critic.head.bias.grad is not None and float(critic.head.bias.grad) == pytest.approx(-9 / 12)


def test_where_all_targets_hold_the_critic_s_own_value_the_fit_is_undefined_and_the_step_is_taken(
    model: PreTrainedModel,
) -> None:
    rows = samples()
    for sample in rows:
        sample.bootstrapped = True
    critic = critic_of(model)
    before = weights(critic)
    row = updater_of(critic).train(grid(rows))
    assert {k: v for k, v in fits_of(row).items() if v is not None} == {} and row["value/ev_undefined"] == 1.0
    assert row["value/explained_variance"] is None and row["value/explained_variance_by_trace"] is None
    assert row["value/bootstrapped_fraction"] == 1.0 and row["value/loss"] > 0
    assert moved(before, critic) and row["value/updates"] == 2


def test_values_do_not_depend_on_the_sampling_temperature(model: PreTrainedModel) -> None:
    """B05: the header's temperature is the policy's."""
    rows = [updater_of(critic_of(model), optim={"lr": 0.0}).train(grid(samples(), temperature=t)) for t in (1.0, 0.5)]
    assert rows[0] == rows[1]


def test_a_batch_without_a_loss_token_takes_no_step(model: PreTrainedModel) -> None:
    rows = samples()
    for sample in rows:
        sample.branch.loss_mask[:] = False
    critic = critic_of(model)
    before = weights(critic)
    updater = updater_of(critic)
    row = updater.train(grid(rows))
    assert row["value/empty_batch"] == 1 and row["value/nonfinite"] == 0 and "value/loss" not in row
    assert updater.optimizer.num_updates == 0 and moved(before, critic) == set()


def test_an_unknown_loss_stops_training_before_anything_moved(model: PreTrainedModel) -> None:
    critic = critic_of(model)
    before = weights(critic)
    with pytest.raises(ContractError, match="unknown value loss 'huber'"):
        updater_of(critic).train(grid(samples(), loss_name="huber"))
    assert moved(before, critic) == set()


def test_a_critic_that_went_bad_is_counted_and_not_trained(model: PreTrainedModel) -> None:
    critic = critic_of(model)
    with torch.no_grad():
        critic.head.bias.fill_(float("inf"))
    before = weights(critic)
    row = updater_of(critic).train(grid(samples()))
    assert row["value/nonfinite"] == 2 and moved(before, critic) == set()


# ---------------------------------------------------------------- classification


@pytest.mark.parametrize("loss_name", CLASSIFY)
def test_a_classification_critic_learns_and_says_how_it_classifies(model: PreTrainedModel, loss_name: str) -> None:
    """Scenario: targets 1 and 0, a zero head. Result: from the middle value and ln 17 towards the targets."""
    critic, item = critic_of(model, 0.0, SUPPORT), None
    updater = updater_of(critic, updates_per_batch=1)
    item = grid(samples(), loss_name=loss_name, constants=CLASSIFY[loss_name])
    first, *_, last = (updater.train(item) for _ in range(40))
    assert first["value/loss"] == pytest.approx(np.log(17), rel=1e-5)
    assert first["value/entropy"] == pytest.approx(np.log(17), rel=1e-5)
    assert first["value/confidence"] == pytest.approx(1 / 17, rel=1e-5)
    assert first["value/brier"] == pytest.approx(0.25) and first["value/target_oob_fraction"] == 0
    assert first["value/bias"] == pytest.approx(0.5 - 1 / 3) and first["value/explained_variance"] == pytest.approx(0)
    assert last["value/accuracy"] == 1.0 and last["value/brier"] < 0.02 and last["value/explained_variance"] > 0.9
    assert last["value/entropy"] < first["value/entropy"] and last["value/calibration_error"] < 0.2


def test_measures_that_only_a_classification_has_are_absent_for_a_regression(model: PreTrainedModel) -> None:
    row = updater_of(critic_of(model)).train(grid(samples()))
    names = {"accuracy", "entropy", "confidence", "target_oob_fraction", "clip_fraction"}
    assert not {f"value/{name}" for name in names} & row.keys()
    assert {"value/brier", "value/explained_variance_by_trace", "value/calibration_error"} <= row.keys()
    assert sum(row[name] for name in row if name.endswith("/tokens")) == row["value/loss_tokens"] == 9


def test_targets_out_of_range_are_clamped_and_counted(model: PreTrainedModel) -> None:
    rows = samples()
    assert rows[0].returns is not None
    rows[0].returns[rows[0].branch.action_mask] = 3.0
    row = updater_of(critic_of(model, 0.0, SUPPORT)).train(grid(rows, loss_name="two_hot", constants=TWO_HOT))
    assert row["value/target_oob_fraction"] == pytest.approx(3 / 9) and np.isfinite(row["value/loss"])


@pytest.mark.parametrize("loss_name", CLASSIFY)
def test_the_gradient_is_the_same_for_every_packing_and_with_dummies(model: PreTrainedModel, loss_name: str) -> None:
    """And equal to cross-entropy written out in f64 from the head's own logits (the head's share of it)."""
    critic, rows = critic_of(model, 0.3, SUPPORT), samples()
    settings = {"loss_name": loss_name, "constants": CLASSIFY[loss_name]}
    updater = updater_of(critic, optim={"lr": 0.0, "max_grad_norm": 1e9}, updates_per_batch=1)
    gradients = []
    for layout in ({}, {"seq_len": 8}, {"num_ranks": 3}):
        total = torch.zeros(sum(p.numel() for p in critic.parameters()), dtype=torch.float64)
        for item in grids(rows, **layout, **settings):
            updater.train(item)
            total += torch.cat([p.grad.flatten().double() for p in critic.parameters() if p.grad is not None])
        gradients.append(total)
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5
    expected = torch.zeros(17, dtype=torch.float64)  # of the bias: mean of softmax - target
    for sample in rows:
        ids, mask = torch.from_numpy(sample.branch.token_ids.astype(np.int64)), sample.branch.action_mask
        with torch.no_grad():
            logits = critic.outputs(ids, PackedLayout.of([len(ids)]))[np.flatnonzero(mask) - 1].double()
        assert sample.returns is not None
        for z, y in zip(logits, sample.returns[mask], strict=True):
            below = torch.special.ndtr((torch.from_numpy(SUPPORT.edges) - y) / 0.075)
            smooth = below.diff() / (below[-1] - below[0])
            sharp = torch.eye(17, dtype=torch.float64)[3 if y == 0 else 13]
            expected += (z.softmax(-1) - (sharp if loss_name == "two_hot" else smooth)) / 9
    offset = sum(p.numel() for p in critic.backbone.parameters()) + critic.head.weight.numel()
    torch.testing.assert_close(gradients[0][offset:], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("constants", "support"),
    [
        (TWO_HOT, None),
        (TWO_HOT, Support(0.0, 1.0, 11, pad_bins=0)),
        (TWO_HOT, Support(0.0, 2.0, 11)),
        ({}, SUPPORT),
        ({"low": 0.0}, SUPPORT),
    ],
)
def test_a_header_that_does_not_fit_the_head_stops_training(
    model: PreTrainedModel, constants: dict[str, float], support: Support | None
) -> None:
    critic = critic_of(model, 0.1, support)
    before, name = weights(critic), "two_hot" if constants else "mse"
    with pytest.raises(ContractError, match=r"does not fit the critic's head|has no"):
        updater_of(critic).train(grid(samples(), loss_name=name, constants=constants))
    assert moved(before, critic) == set()


def test_the_clip_holds_values_near_those_at_scoring_for_all_k_updates(model: PreTrainedModel) -> None:
    rows = samples()
    for sample in rows:
        sample.values = np.zeros(sample.num_tokens)
    critic = critic_of(model, 0.0)
    row = updater_of(critic, updates_per_batch=30).train(grid(rows, constants={"clip": 0.2}))
    assert row["value/clip_fraction"] == 0.0
    row = updater_of(critic, updates_per_batch=1).train(grid(rows, constants={"clip": 0.2}))
    assert 0 < row["value/clip_fraction"] < 1
