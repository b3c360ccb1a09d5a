"""Support, two-hot and HL-Gauss targets, and the cross-entropy of a critic that classifies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from value_service.losses import hl_gauss, two_hot
from value_service.losses.hl_gauss import hl_gauss_loss
from value_service.losses.support import Support
from value_service.losses.two_hot import two_hot_loss

FIVE = Support(0.0, 1.0, 5, pad_bins=0)


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def mean_of(distribution: torch.Tensor, support: Support) -> list[float]:
    return (distribution @ torch.from_numpy(support.points)).tolist()


# ---------------------------------------------------------------- support


def test_points_are_even_with_the_range_s_ends_among_them_and_edges_halfway() -> None:
    support = Support(0.0, 1.0, 5, pad_bins=1)
    assert support.points.tolist() == pytest.approx([-0.25, 0, 0.25, 0.5, 0.75, 1, 1.25])
    assert support.edges.tolist() == pytest.approx([-0.375, -0.125, 0.125, 0.375, 0.625, 0.875, 1.125, 1.375])
    assert support.points.dtype == support.edges.dtype == np.float64


def test_51_bins_are_padded_to_57_points_by_default() -> None:
    support = Support(0.0, 1.0, 51)
    assert len(support.points) == support.num_points == 57 and len(support.edges) == 58
    assert (support.points[0], support.points[-1]) == (pytest.approx(-0.06), pytest.approx(1.06))
    assert (support.points[3], support.points[-4]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "bad",
    [(1.0, 1.0, 5, 0), (1.0, 0.0, 5, 0), (0.0, 1.0, 1, 0), (0.0, math.inf, 5, 0), (math.nan, 1.0, 5, 0), (0, 1, 5, -1)],
)
def test_a_support_that_is_none_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="must"):
        Support(*bad)


def test_targets_are_clamped_to_the_range_without_the_padding_and_counted() -> None:
    support = Support(-1.0, 1.0, 5)
    returns = f64(-1.5, -1.0, 0.0, 1.0, 1.0 + 1e-8, 9.0)
    assert support.clamp(returns).tolist() == [-1, -1, 0, 1, 1, 1]
    assert support.num_out_of_range(returns).item() == 2


# ---------------------------------------------------------------- targets


def test_golden_two_hot_targets() -> None:
    expected = f64(0, 0.4, 0.6, 0, 0), f64(0, 0, 0, 0, 1)
    torch.testing.assert_close(two_hot.target_distribution(f64(0.4, 1.3), FIVE), torch.stack(expected))


def test_golden_hl_gauss_targets() -> None:
    expected = torch.stack(
        [
            f64(0.02234, 0.22994, 0.49544, 0.22994, 0.02234),
            f64(0.662221, 0.307345, 0.029861, 0.000572, 0.000002),
            f64(0.068858, 0.376715, 0.439112, 0.109707, 0.005609),
        ]
    )
    found = hl_gauss.target_distribution(f64(0.5, 0.0, 0.4), FIVE, 0.75)
    torch.testing.assert_close(found, expected, atol=6e-6, rtol=0)


def test_at_the_borders_padding_removes_a_bias_that_there_is_without() -> None:
    returns = f64(0.0, 1.0, 0.013)
    bare, padded = Support(0.0, 1.0, 51, pad_bins=0), Support(0.0, 1.0, 51)
    assert mean_of(hl_gauss.target_distribution(returns, bare, 0.75), bare) == pytest.approx(
        [0.0074, 0.9926, 0.0152], abs=5e-5
    )
    assert mean_of(hl_gauss.target_distribution(returns, padded, 0.75), padded) == pytest.approx(
        returns.tolist(), abs=1e-6
    )


def test_an_hl_gauss_target_in_the_middle_has_its_known_entropy_peak_and_width() -> None:
    target = hl_gauss.target_distribution(f64(0.5), Support(0.0, 1.0, 51), 0.75)[0]
    assert float(-(target * target.clamp(min=1e-300).log()).sum()) == pytest.approx(1.200, abs=1e-3)
    assert float(target.max()) == pytest.approx(0.495, abs=1e-3) and int((target > 1e-3).sum()) == 5


def test_a_vanishing_sigma_gives_the_nearest_point() -> None:
    assert hl_gauss.target_distribution(f64(0.4), FIVE, 1e-9)[0].tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_sigma_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="sigma_ratio"):
        hl_gauss.target_distribution(f64(0.4), FIVE, ratio)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-100, 100), max_size=12),
    st.floats(-3, 3),
    st.floats(0.1, 4),
    st.integers(2, 40),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_target_is_a_distribution_and_two_hot_keeps_its_mean(returns, low, span, bins, pad, dtype) -> None:
    """However far out of range: without the clamp the mass within the edges would underflow to 0 / 0."""
    support, numbers = Support(low, low + span, bins, pad), torch.tensor(returns, dtype=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for target in (two_hot.target_distribution(numbers, support), hl_gauss.target_distribution(numbers, support, 0.75)):
        assert target.shape == (len(returns), bins + 2 * pad) and target.dtype == dtype
        assert bool((target >= 0).all())
        assert target.sum(1).tolist() == pytest.approx([1.0] * len(returns), abs=tolerance)
    means = mean_of(two_hot.target_distribution(numbers.double(), support), support)
    assert means == pytest.approx(numbers.double().clamp(low, low + span).tolist(), abs=1e-9)


# ---------------------------------------------------------------- loss


def run(name, logits, returns, mask, *, support=FIVE, denominator=None, dtype=torch.float64):
    logits = logits.clone().to(dtype).requires_grad_()
    mask = torch.tensor(mask)
    more = {"sigma_ratio": 0.75} if name is hl_gauss_loss else {}
    loss, sums = name(logits, returns, mask, denominator=denominator or int(mask.sum()), support=support, **more)
    loss.backward()
    return loss.item(), logits.grad, {key: float(value) for key, value in sums.items()}


both = pytest.mark.parametrize("name", [two_hot_loss, hl_gauss_loss])


def test_cross_entropy_and_its_gradient_by_hand() -> None:
    """Uniform logits: ln 5; the gradient is softmax minus target."""
    loss, grad, sums = run(two_hot_loss, torch.zeros(1, 5), f64(0.4), [1])
    assert loss == pytest.approx(math.log(5))
    assert grad[0].tolist() == pytest.approx([0.2, -0.2, -0.4, 0.2, 0.2])
    assert sums["entropy_sum"] == pytest.approx(math.log(5)) and sums["confidence_sum"] == pytest.approx(0.2)
    assert sums["error_sum"] == pytest.approx(0.1) and sums["out_of_range"] == 0


def test_accuracy_entropy_confidence_and_out_of_range_count_loss_tokens_only() -> None:
    logits = 20.0 * torch.eye(5)[[4, 0, 2, 1]]
    _, _, sums = run(two_hot_loss, logits, f64(1.3, 1.0, 0.5, 7.0), [1, 1, 1, 0])
    assert (sums["tokens"], sums["accurate"], sums["out_of_range"]) == (3, 2, 1)
    assert sums["confidence_sum"] == pytest.approx(3, abs=1e-6) and sums["entropy_sum"] < 1e-5


@both
def test_the_loss_is_least_where_the_head_says_the_target_and_its_gradient_is_bounded(name) -> None:
    returns = f64(0.4)
    target = (
        two_hot.target_distribution(returns, FIVE)
        if name is two_hot_loss
        else hl_gauss.target_distribution(returns, FIVE, 0.75)
    )
    _, grad, _ = run(name, target.clamp(min=1e-30).log(), returns, [1])
    assert float(grad.abs().max()) < 1e-6
    _, grad, _ = run(name, torch.tensor([[1e4, -1e4, 0.0, 50.0, -1e4]]), returns, [1])
    assert float(grad.abs().sum()) <= 2.0


@both
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_junk_off_the_mask_is_harmless_and_at_a_loss_token_not_hidden(name, junk: float) -> None:
    """B12."""
    logits, returns = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double(), f64(0.4, 0.9)
    dirty_logits, dirty_returns = logits.clone(), returns.clone()
    dirty_logits[1], dirty_returns[1] = junk, junk
    clean, dirty = (run(name, a, b, [1, 0]) for a, b in ((logits, returns), (dirty_logits, dirty_returns)))
    assert clean[0] == dirty[0] and torch.equal(clean[1], dirty[1]) and clean[2] == dirty[2]
    assert not math.isfinite(run(name, logits, dirty_returns, [1, 1])[0])
    assert not math.isfinite(run(name, dirty_logits, returns, [1, 1])[0])


@both
def test_an_all_masked_micro_batch_gives_zero_with_a_gradient_path(name) -> None:
    loss, grad, sums = run(name, torch.ones(2, 5), f64(0.1, 0.2), [0, 0], denominator=3)
    assert loss == 0 and not grad.any() and set(sums.values()) == {0.0}


@both
def test_shapes_that_would_broadcast_and_bad_denominators_are_refused(name) -> None:
    with pytest.raises(ValueError, match="5 points"):
        run(name, torch.ones(2, 4), f64(0.1, 0.2), [1, 1])
    with pytest.raises(ValueError, match="denominator"):
        run(name, torch.ones(2, 5), f64(0.1, 0.2), [1, 1], denominator=math.inf)


@both
def test_half_precision_logits_are_computed_in_f32(name) -> None:
    assert run(name, torch.ones(1, 5), f64(0.1), [1], dtype=torch.bfloat16)[0] == pytest.approx(math.log(5), abs=1e-6)


@both
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_sums(name, data) -> None:
    num, size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits, returns = torch.randn(num, 5, generator=generator), torch.rand(num, generator=generator).double() * 3 - 1
    mask = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
    n = max(1, sum(mask))
    loss, grad, sums = run(name, logits, returns, mask, denominator=n)
    parts = [run(name, *(x[i : i + size] for x in (logits, returns, mask)), denominator=n) for i in range(0, num, size)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, atol=1e-14, rtol=0)
    for key, total in sums.items():
        assert sum(part[2][key] for part in parts) == pytest.approx(total, abs=1e-9)
