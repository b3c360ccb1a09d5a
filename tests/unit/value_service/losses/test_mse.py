"""Half squared error: its factor, its mask, and one denominator for every split."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from value_service.losses import LOSSES, FitMoments, summarize
from value_service.losses.mse import mse_loss


def run(values, returns, mask, denominator, dtype=torch.float64):
    values = torch.tensor(values, dtype=dtype, requires_grad=True)
    loss, sums = mse_loss(values, torch.tensor(returns, dtype=dtype), torch.tensor(mask), denominator=denominator)
    loss.backward()
    return loss.item(), values.grad, {name: value.item() for name, value in sums.items()}


def test_the_factor_one_half_is_in_the_loss():
    loss, grad, _ = run([2.0], [1.0], [1], 1)
    assert (loss, grad.item()) == (0.5, 1.0)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_masked_entry_reaches_neither_loss_nor_gradient(junk):
    loss, grad, sums = run([0.5, junk], [1.0, junk], [1, 0], 1)
    assert loss == 0.125
    assert grad.tolist() == [-0.5, 0.0]
    assert sums == {"tokens": 1, "loss_sum": 0.125, "error_sum": -0.5}


@pytest.mark.parametrize("field", [0, 1])
def test_a_non_finite_number_at_a_loss_token_is_not_hidden(field):
    columns = [[0.5, 0.5], [1.0, 1.0]]
    columns[field][1] = math.nan
    loss, _, _ = run(*columns, [1, 1], 2)
    assert math.isnan(loss)


def test_micro_batches_and_ranks_share_one_denominator():
    """One token off by 2 and three tokens exact: 0.5 whole and in two parts, not 2, 1 or 0."""
    whole, _, _ = run([2.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [1] * 4, 4)
    first, _, _ = run([2.0], [0.0], [1], 4)
    second, _, _ = run([1.0] * 3, [1.0] * 3, [1] * 3, 4)
    assert whole == 0.5
    assert first + second == 0.5


def test_an_all_masked_micro_batch_gives_zero_with_a_gradient_path():
    loss, grad, _ = run([math.nan], [1.0], [0], 9)
    assert (loss, grad.item()) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_a_bad_denominator_is_refused(bad):
    with pytest.raises(ValueError, match="denominator"):
        run([1.0], [1.0], [1], bad)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="returns"):
        mse_loss(torch.zeros(2, 3), torch.zeros(3, 3), torch.ones(2, 3), denominator=6)


def test_targets_are_constants():
    returns = torch.ones(3, requires_grad=True)
    values = torch.zeros(3, requires_grad=True)
    loss, _ = mse_loss(values, returns, torch.ones(3), denominator=3)
    loss.backward()
    assert returns.grad is None
    assert values.grad is not None


def test_k_updates_on_fixed_targets_converge_and_move_head_and_backbone():
    torch.manual_seed(0)
    backbone, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    inputs, returns = torch.randn(16, 4), torch.randint(0, 2, (16,)).float()
    before = returns.clone()
    start = [parameter.detach().clone() for parameter in (backbone.weight, head.weight)]
    parameters = [*backbone.parameters(), *head.parameters()]
    losses = []
    for _ in range(50):
        loss, _ = mse_loss(head(backbone(inputs)).squeeze(-1), returns, torch.ones(16), denominator=16)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
        losses.append(loss.item())
    assert all(later <= earlier for earlier, later in pairwise(losses))
    assert torch.equal(returns, before)
    for old, new in zip(start, (backbone.weight, head.weight), strict=True):
        assert (new - old).norm() > 0


entry = st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans())


@settings(deadline=None, max_examples=50)
@given(st.lists(entry, min_size=1, max_size=24), st.integers(1, 8))
def test_any_split_gives_the_same_loss_gradient_and_sums(entries, size):
    columns = [list(column) for column in zip(*entries, strict=True)]
    denominator = max(1, sum(columns[2]))
    loss, grad, sums = run(*columns, denominator)
    parts = [run(*(column[i : i + size] for column in columns), denominator) for i in range(0, len(entries), size)]
    expected = sum(0.5 * (v - y) ** 2 for v, y, m in entries if m) / denominator
    assert loss == pytest.approx(expected, abs=1e-12)
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, atol=1e-14, rtol=0)
    for name, total in sums.items():
        assert sum(part[2][name] for part in parts) == pytest.approx(total, abs=1e-9)


def test_the_critic_s_metrics():
    loss, _, sums = run([0.5, 0.5], [0.0, 1.0], [1, 1], 2)
    fit = FitMoments.of([0.0, 1.0], [0.5, 0.5])
    metrics = summarize(sums, fit, fit)
    assert metrics["value/loss"] == loss
    assert metrics["value/bias"] == 0
    assert metrics["value/explained_variance"] == 0
    assert metrics["value/explained_variance_at_scoring"] == 0
    assert metrics["value/ev_undefined"] == 0
    assert metrics["value/empty_batch"] == 0
    assert LOSSES["mse"] is mse_loss and set(LOSSES) == {"mse", "two_hot", "hl_gauss"}


def test_an_empty_batch_is_flagged_and_an_undefined_explained_variance_is_none():
    metrics = summarize({}, FitMoments())
    assert metrics == {
        "value/loss_tokens": 0,
        "value/empty_batch": 1,
        "value/explained_variance": None,
        "value/ev_undefined": 1,
    }


# ---------------------------------------------------------------- clip around the values at scoring


def clipped(value, old, target, clip=0.2):
    value = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, target = torch.tensor([old], dtype=torch.float64), torch.tensor([target], dtype=torch.float64)
    loss, sums = mse_loss(value, target, torch.ones(1), denominator=1, old_values=old, clip=clip)
    loss.backward()
    return loss.item(), value.grad.item(), sums["clipped"].item()


def test_the_clip_takes_the_larger_loss_and_stops_a_value_that_went_too_far():
    """B08."""
    assert clipped(2.0, 0.0, 1.0) == (pytest.approx(0.5), pytest.approx(1.0), 0)
    assert clipped(0.9, 0.0, 1.0) == (pytest.approx(0.32), 0.0, 1)
    assert clipped(0.1, 0.0, 1.0) == (pytest.approx(0.405), pytest.approx(-0.9), 0)


def test_the_clip_ignores_junk_off_the_mask_and_needs_the_values_at_scoring():
    values = torch.tensor([0.5, math.nan], dtype=torch.float64, requires_grad=True)
    junk = torch.tensor([0.5, math.inf], dtype=torch.float64)
    mask = torch.tensor([1, 0])
    loss, _ = mse_loss(values, torch.tensor([1.0, math.nan]), mask, denominator=1, old_values=junk, clip=0.2)
    loss.backward()
    assert loss.item() == 0.125 and values.grad.tolist() == [-0.5, 0.0]
    with pytest.raises(ValueError, match="needs old_values"):
        mse_loss(values, torch.ones(2), mask, denominator=1, clip=0.2)
    with pytest.raises(ValueError, match="clip must be 0 or positive"):
        mse_loss(values, torch.ones(2), mask, denominator=1, old_values=junk, clip=-0.2)
