"""Double-sided masked direct ratio: border cases, the detached coefficient, and invariance to how tokens are split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.losses import summarize
from policy_trainer.losses.dis import dis_loss


def run(logprobs, rollout, advantages, mask=None, *, eps_low=0.3, eps_high=5.0, denominator=None, dtype=torch.float64):
    logprobs = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    loss, sums = dis_loss(
        logprobs,
        torch.tensor(rollout, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        mask,
        eps_low=eps_low,
        eps_high=eps_high,
        denominator=int(mask.sum()) if denominator is None else denominator,
    )
    loss.backward()
    return loss.item(), logprobs.grad, {name: value.item() for name, value in sums.items()}


def test_golden_loss_and_gradient():
    ratios = [0.69, 0.71, 1, 1.3, 5.99, 6.01]
    logprobs = [-1, -2, -0.5, -3, -0.1, -1]
    rollout = [logprob - math.log(ratio) for logprob, ratio in zip(logprobs, ratios, strict=True)]
    loss, grad, _ = run(logprobs, rollout, [1, -1, 2, -2, 1, 1])
    assert loss == pytest.approx(-1.270167, abs=1e-6)
    expected = torch.tensor([0, 0.118333, -0.333333, 0.433333, -0.998333, 0], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_on_the_border_is_rejected(dtype):
    ratios = torch.tensor([0.69, 0.7, 0.71, 5.99, 6.0, 6.01], dtype=torch.float64)
    _, grad, sums = run(ratios.log().tolist(), [0.0] * 6, [1.0] * 6, denominator=1, dtype=dtype)
    expected = -torch.tensor([0, 0, 0.71, 5.99, 0, 0], dtype=dtype)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=0)
    assert (sums["dis_reject_low"], sums["dis_reject_high"]) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_on_the_border_of_a_symmetric_window_is_rejected(dtype):
    ratios = torch.tensor([0.5, 1.5], dtype=torch.float64)
    loss, grad, _ = run(ratios.log().tolist(), [0.0] * 2, [1.0] * 2, eps_low=0.5, eps_high=0.5, dtype=dtype)
    assert loss == 0
    assert grad.tolist() == [0, 0]


@pytest.mark.parametrize("eps_low", [1.0, 1.5])
def test_an_eps_low_of_one_or_more_removes_the_lower_border(eps_low):
    _, grad, sums = run([-900.0, math.log(0.01)], [0.0, 0.0], [1.0, 1.0], eps_low=eps_low, denominator=1)
    assert sums["dis_reject_low"] == 0
    torch.testing.assert_close(grad, -torch.tensor([math.exp(-20), 0.01], dtype=torch.float64))


@pytest.mark.parametrize("logprob", [-0.5, -1.0, -3.0])
def test_the_coefficient_carries_no_gradient(logprob):
    """With it, the gradient would vanish at log pi = -1 and have the wrong sign below."""
    _, grad, _ = run([logprob], [logprob - math.log(1.2)], [2.0])
    assert grad.item() == pytest.approx(-2.4)


def test_rejection_is_blind_to_the_sign_of_the_advantage():
    _, grad, sums = run([math.log(0.5), math.log(7)] * 2, [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
    assert grad.tolist() == [0, 0, 0, 0]
    metrics = summarize(sums)
    assert metrics["policy/dis_reject_low"] == 0.5
    assert metrics["policy/dis_reject_positive"] == 1.0
    assert metrics["policy/dis_reject_negative"] == 1.0


def test_rejected_tokens_stay_in_the_denominator():
    loss, _, _ = run([-1.0, -1.0], [-1.0, -1.0 - math.log(100)], [1.0, 1.0])
    assert loss == pytest.approx(0.5)


@pytest.mark.parametrize("gap", [800.0, -800.0])
def test_a_huge_ratio_is_finite_and_rejected(gap):
    loss, grad, sums = run([-1.0], [-1.0 - gap], [-1.0], dtype=torch.float32)
    assert loss == 0
    assert grad.tolist() == [0]
    metrics = summarize(sums)
    assert math.isfinite(metrics["policy/ratio_mean"])
    assert metrics["policy/kl_rollout"] == pytest.approx(-gap)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_entries_reach_neither_loss_nor_gradient_nor_sums(junk):
    whole = run([-1.0, junk], [-1.5, junk], [1.0, junk], [1, 0])
    alone = run([-1.0], [-1.5], [1.0])
    assert whole[0] == alone[0]
    assert whole[1].tolist() == [alone[1].item(), 0.0]
    assert whole[2] == alone[2]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [0, 1, 2])
def test_a_non_finite_number_at_a_loss_token_is_not_hidden(field, junk):
    columns = [[-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]]
    columns[field][1] = junk
    loss, _, _ = run(*columns)
    assert not math.isfinite(loss)


def test_an_all_masked_micro_batch_gives_zero_with_a_gradient_path():
    loss, grad, sums = run([math.nan, -1.0], [0.0, 0.0], [1.0, 1.0], [0, 0], denominator=7)
    assert loss == 0
    assert grad.tolist() == [0, 0]
    assert set(sums.values()) == {0.0}


def test_an_all_rejected_batch_gives_zero():
    loss, grad, _ = run([0.0], [-5.0], [1.0])
    assert loss == 0
    assert grad.tolist() == [0]


def test_half_precision_inputs_are_computed_in_f32():
    logprobs = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    rest = torch.tensor([-1.0], dtype=torch.bfloat16)
    loss, _ = dis_loss(
        logprobs, rest, torch.ones(1), torch.ones(1, dtype=torch.uint8), eps_low=0.3, eps_high=5.0, denominator=1
    )
    assert loss.dtype == torch.float32


def test_advantages_get_no_gradient():
    advantages = torch.ones(1, requires_grad=True)
    logprobs = torch.zeros(1, requires_grad=True)
    loss, _ = dis_loss(logprobs, torch.zeros(1), advantages, torch.ones(1), eps_low=0.3, eps_high=5.0, denominator=1)
    loss.backward()
    assert advantages.grad is None


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("field", ["eps_low", "eps_high", "denominator"])
def test_a_bad_constant_is_refused(field, bad):
    with pytest.raises(ValueError, match=field):
        run([-1.0], [-1.0], [1.0], **{field: bad})


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="shapes"):
        dis_loss(
            torch.zeros(2, 3),
            torch.zeros(3, 3),
            torch.zeros(2, 3),
            torch.ones(2, 3),
            eps_low=0.3,
            eps_high=5.0,
            denominator=6,
        )


token = st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.booleans())


@settings(deadline=None, max_examples=50)
@given(st.lists(token, min_size=1, max_size=24), st.integers(1, 8))
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(tokens, size):
    logprobs, rollout, advantages, mask = (list(column) for column in zip(*tokens, strict=True))
    denominator = max(1, sum(mask))
    loss, grad, sums = run(logprobs, rollout, advantages, mask, denominator=denominator)
    parts = [
        run(*(column[i : i + size] for column in (logprobs, rollout, advantages, mask)), denominator=denominator)
        for i in range(0, len(tokens), size)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, atol=1e-14, rtol=0)
    for name, total in sums.items():
        combine = max if name.endswith("_max") else sum
        assert combine(part[2][name] for part in parts) == pytest.approx(total, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(token, min_size=1, max_size=24))
def test_any_batch_agrees_with_a_loop_over_tokens(tokens):
    logprobs, rollout, advantages, mask = (list(column) for column in zip(*tokens, strict=True))
    denominator = max(1, sum(mask))
    loss, grad, _ = run(logprobs, rollout, advantages, mask, denominator=denominator)
    expected_loss = 0.0
    for i, (logprob, old, advantage, is_loss) in enumerate(tokens):
        gap = logprob - old
        accepted = is_loss and math.log(0.7) < gap < math.log1p(5.0)
        coefficient = math.exp(gap) * advantage / denominator if accepted else 0.0
        expected_loss -= coefficient * logprob
        assert grad[i].item() == pytest.approx(-coefficient, abs=1e-12)
    assert loss == pytest.approx(expected_loss, abs=1e-12)
