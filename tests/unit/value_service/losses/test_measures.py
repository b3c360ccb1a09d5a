"""Fit by trace, the Brier score at the first action token, calibration bins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from value_service.losses import summarize
from value_service.losses.explained_variance import Moments
from value_service.losses.measures import TraceFit, auc, calibration_metrics, calibration_sums, trace_fit

LENGTHS = torch.tensor([4, 3, 5])
ACTION = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1]).bool()
LOSS = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0]).bool()
VALUES = torch.tensor([9, 0.5, 0.6, 0.8, 9, 9, 0.3, 9, 0.9, 9, 0.1, 0.2])
RETURNS = torch.tensor([9, 1, 1, 1, 9, 9, 0, 9, 1, 9, 1, 1.0])


def test_each_sample_counts_once_by_its_mean_and_by_its_first_action_token() -> None:
    fit, sums = trace_fit(VALUES, RETURNS, ACTION, LOSS, LENGTHS)
    means, first = np.array([0.7, 0.3, 0.5]), np.array([0.5, 0.3, 0.9])
    target = np.array([1.0, 0.0, 1.0])
    assert fit.means.explained_variance() == pytest.approx(1 - (target - means).var() / target.var())
    assert fit.first.explained_variance() == pytest.approx(1 - (target - first).var() / target.var())
    assert sums == {"brier_sum": pytest.approx(0.25 + 0.09 + 0.01), "traces": 3.0}


def test_a_sample_without_a_loss_token_counts_nowhere() -> None:
    loss = LOSS.clone()
    loss[4:7] = False
    fit, sums = trace_fit(VALUES, RETURNS, ACTION, loss, LENGTHS)
    assert fit.means.returns.n == fit.first.returns.n == sums["traces"] == 2
    assert trace_fit(VALUES, RETURNS, ACTION, torch.zeros(12).bool(), LENGTHS) == (
        TraceFit(),
        {"brier_sum": 0.0, "traces": 0.0},
    )


def test_tokens_of_a_long_trace_do_not_outweigh_a_short_one() -> None:
    """Brier by hand: (0.5 - 1)^2 and (0.5 - 0)^2 are 0.25 each, however long the traces are."""
    values, returns = torch.full((104,), 0.5), torch.cat([torch.ones(101), torch.zeros(3)])
    mask = torch.ones(104).bool()
    _, sums = trace_fit(values, returns, mask, mask, torch.tensor([101, 3]))
    assert summarize(sums)["value/brier"] == 0.25


def test_splitting_into_micro_batches_changes_nothing() -> None:
    whole, sums = trace_fit(VALUES, RETURNS, ACTION, LOSS, LENGTHS)
    fit, total = TraceFit(), {"brier_sum": 0.0, "traces": 0.0}
    for start, end, lengths in ((0, 4, LENGTHS[:1]), (4, 12, LENGTHS[1:])):
        columns = (x[start:end] for x in (VALUES, RETURNS, ACTION, LOSS))
        more, part = trace_fit(*columns, lengths)
        fit, total = fit.merge(more), {name: total[name] + part[name] for name in total}
    assert total == pytest.approx(sums)
    assert fit.means.explained_variance() == pytest.approx(whole.means.explained_variance())
    assert fit.first.explained_variance() == pytest.approx(whole.first.explained_variance())


def test_calibration_bins_add_up_and_give_the_error_by_hand() -> None:
    """Values .12 and .18 with returns 0 and 1; .93 with 1; -2 and 1 go to the outer bins."""
    parts = [([0.12, 0.93], [0.0, 1.0]), ([0.18, -2.0, 1.0], [1.0, 0.0, 1.0])]
    total: dict[str, float] = {}
    for values, returns in parts:
        for name, number in calibration_sums(torch.tensor(values), torch.tensor(returns)).items():
            total[name] = total.get(name, 0.0) + number
    metrics = calibration_metrics(total)
    assert metrics["value/calibration/1/tokens"] == 2 and metrics["value/calibration/1/return"] == 0.5
    assert metrics["value/calibration/1/value"] == pytest.approx(0.15)
    assert metrics["value/calibration/0/value"] == -2.0 and metrics["value/calibration/9/tokens"] == 2
    assert "value/calibration/5/tokens" not in metrics
    assert metrics["value/calibration_error"] == pytest.approx((2 * 0.35 + 2.0 + 2 * 0.035) / 5)


def test_bins_span_the_range_that_they_are_given_and_none_gives_no_metric() -> None:
    sums = calibration_sums(torch.tensor([-1.0, 0.0, 3.0]), torch.zeros(3), low=-1.0, high=1.0)
    assert {name for name in sums if "tokens" in name} == {f"calibration_tokens_{n}" for n in (0, 5, 9)}
    assert calibration_sums(torch.zeros(0), torch.zeros(0)) == {} == calibration_metrics({})


@pytest.mark.parametrize(
    ("pairs", "area"),
    [
        ([(0.0, 0.1), (0.0, 0.4), (1.0, 0.35), (1.0, 0.8)], 0.75),
        ([(0.0, 0.1), (1.0, 0.9)], 1.0),
        ([(0.0, 0.9), (1.0, 0.1)], 0.0),
        ([(0.0, 0.5), (1.0, 0.5), (1.0, 0.5)], 0.5),
        ([(0.0, 0.3), (1.0, 0.3), (1.0, 0.7)], 0.75),
        ([(-1.0, 0.0), (3.0, 2.0), (0.9, 1.0)], 1.0),
        ([(1.0, 0.2), (1.0, 0.9)], None),
        ([], None),
    ],
)
def test_auc_is_the_chance_of_the_right_order(pairs: list[tuple[float, float]], area: float | None) -> None:
    """By hand: of the four pairs of a good and a bad outcome in the first row, three are in order. Ties count half,
    and good is above the middle of the targets' range."""
    assert auc(pairs) == area


def test_auc_is_that_of_all_pairs_written_out_and_does_not_depend_on_the_split() -> None:
    rng = np.random.default_rng(3)
    pairs = [(float(y), float(v)) for y, v in zip(rng.integers(0, 2, 60), rng.integers(0, 9, 60) / 8, strict=True)]
    good, bad = ([v for y, v in pairs if y == outcome] for outcome in (1, 0))
    slow = np.mean([1.0 if g > b else 0.5 if g == b else 0.0 for g in good for b in bad])
    assert auc(pairs) == pytest.approx(slow, rel=1e-12)
    one, two = TraceFit(pairs=tuple(pairs[:17])), TraceFit(pairs=tuple(pairs[17:]))
    assert auc(one.merge(two).pairs) == auc(two.merge(one).pairs) == auc(pairs)
    assert summarize({}, by_trace=one.merge(two))["value/auc"] == auc(pairs)
    assert "value/auc" not in summarize({}, by_trace=TraceFit())


def test_the_spread_of_the_values_is_their_population_standard_deviation() -> None:
    """[1, 3] around 2: 1. Undefined for one value: absent."""
    assert summarize({}, values=Moments.of([1.0, 3.0]))["value/value_std"] == 1.0
    assert "value/value_std" not in summarize({}, values=Moments.of([1.0]))
    assert summarize({}, values=Moments.of([0.5] * 9))["value/value_std"] == 0.0
