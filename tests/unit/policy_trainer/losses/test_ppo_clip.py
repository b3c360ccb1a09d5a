"""The clipped surrogate: its corner cases, both clips, and invariance to how tokens are split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.losses import LOSSES, summarize
from policy_trainer.losses.dis import dis_loss
from policy_trainer.losses.ppo_clip import ppo_clip_loss
from services.config.algorithm import GrpoConfig, PpoConfig, SaoConfig


def run(
    logprobs,
    old,
    advantages,
    mask=None,
    *,
    eps_low=0.2,
    eps_high=0.2,
    dual_clip=None,
    denominator=None,
    dtype=torch.float64,
):
    logprobs = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    loss, sums = ppo_clip_loss(
        logprobs,
        torch.tensor(old, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        mask,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        denominator=int(mask.sum()) if denominator is None else denominator,
    )
    loss.backward()
    return loss.item(), logprobs.grad, {name: value.item() for name, value in sums.items()}


def at_ratio(ratio, advantage, **kwargs):
    loss, grad, sums = run([math.log(ratio)], [0.0], [advantage], **kwargs)
    return loss, grad.item(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_grad"),
    [(1.5, 1, -1.2, 0.0), (0.5, 1, -0.5, -0.5), (1.5, -1, 1.5, 1.5), (0.5, -1, 0.8, 0.0), (1.0, 1, -1.0, -1.0)],
)
def test_the_four_corners(ratio, advantage, expected_loss, expected_grad):
    loss, grad, sums = at_ratio(ratio, advantage)
    assert loss == pytest.approx(expected_loss)
    assert grad == pytest.approx(expected_grad, abs=1e-12)
    assert sums["clipped"] == float(expected_grad == 0.0)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    loss, grad, sums = at_ratio(4.0, -1, dual_clip=3.0)
    assert (loss, grad) == (pytest.approx(3.0), 0.0)
    assert sums["dual_clipped"] == 1
    assert at_ratio(2.0, -1, dual_clip=3.0)[:2] == (pytest.approx(2.0), pytest.approx(2.0))
    assert at_ratio(4.0, 1, dual_clip=3.0)[0] == pytest.approx(-1.2)


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_dual_clip_is_off_by_none_or_zero(off):
    assert at_ratio(4.0, -1, dual_clip=off)[0] == pytest.approx(4.0)


def test_the_upper_border_can_be_higher():
    kwargs = {"eps_low": 0.2, "eps_high": 0.28}
    assert at_ratio(1.25, 1, **kwargs)[1] != 0
    assert at_ratio(1.29, 1, **kwargs)[1] == 0


@pytest.mark.parametrize(("advantage", "ratio"), [(-1.0, math.exp(20)), (1.0, 1.2)])
def test_a_huge_ratio_is_finite_and_reported_raw(advantage, ratio):
    loss, grad, sums = run([-1.0], [-801.0], [advantage], dtype=torch.float32)
    assert loss == pytest.approx(-advantage * ratio, rel=1e-5)
    assert math.isfinite(grad.item())
    assert summarize(sums)["policy/kl_rollout"] == pytest.approx(-800)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_entries_reach_neither_loss_nor_gradient_nor_sums(junk):
    whole = run([-1.0, junk], [-1.1, junk], [1.0, junk], [1, 0], dual_clip=3.0)
    alone = run([-1.0], [-1.1], [1.0], dual_clip=3.0)
    assert whole[0] == alone[0]
    assert whole[1].tolist() == [alone[1].item(), 0.0]
    assert whole[2] == alone[2]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [0, 1, 2])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_non_finite_number_at_a_loss_token_is_not_hidden(field, junk, dual_clip):
    columns = [[-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]]
    columns[field][1] = junk
    loss, _, _ = run(*columns, dual_clip=dual_clip)
    assert not math.isfinite(loss)


def test_an_all_masked_micro_batch_gives_zero_with_a_gradient_path():
    loss, grad, sums = run([math.nan, -1.0], [0.0, 0.0], [1.0, 1.0], [0, 0], denominator=7)
    assert loss == 0
    assert grad.tolist() == [0, 0]
    assert set(sums.values()) == {0.0}


def test_advantages_off_the_mask_do_not_count():
    loss, grad, _ = run([0.0] * 4, [0.0] * 4, [1.0, 1.0, 10.0, 10.0], [1, 1, 0, 0])
    assert loss == -1
    assert grad.tolist() == [-0.5, -0.5, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_short_and_a_long_trace_weigh_by_their_tokens(size):
    """Lengths 1 and 3 with advantages +1 and -1: loss 0.5, gradient -1/4 and +1/4 per token, in any micro-batch."""
    advantages = [1.0, -1.0, -1.0, -1.0]
    parts = [
        run([0.0] * len(part), [0.0] * len(part), part, denominator=4)
        for part in (advantages[i : i + size] for i in range(0, 4, size))
    ]
    assert sum(part[0] for part in parts) == pytest.approx(0.5)
    assert torch.cat([part[1] for part in parts]).tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_ranks_divide_by_the_global_count():
    """100 tokens of loss 0.5 on one rank and 900 of 0.3 on another: 0.32, not the mean of the means."""
    first, _, _ = run([0.0] * 100, [0.0] * 100, [-0.5] * 100, denominator=1000)
    second, _, _ = run([0.0] * 900, [0.0] * 900, [-0.3] * 900, denominator=1000)
    assert first + second == pytest.approx(0.32)


@pytest.mark.parametrize(
    ("field", "bad"),
    [(field, bad) for field in ("eps_low", "eps_high", "denominator") for bad in (0.0, -1.0, math.nan, math.inf)]
    + [("eps_low", 1.0)]
    + [("dual_clip", bad) for bad in (1.0, 0.5, -1.0, math.nan, math.inf)],
)
def test_a_bad_constant_is_refused(field, bad):
    with pytest.raises(ValueError, match=field):
        run([-1.0], [-1.0], [1.0], **{field: bad})


token = st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.booleans())


@settings(deadline=None, max_examples=50)
@given(st.lists(token, min_size=1, max_size=24), st.integers(1, 8), st.sampled_from([None, 3.0]))
def test_any_split_agrees_with_a_loop_over_tokens(tokens, size, dual_clip):
    denominator = max(1, sum(is_loss for *_, is_loss in tokens))
    expected = 0.0
    for logprob, old, advantage, is_loss in tokens:
        ratio = math.exp(logprob - old)
        value = max(-ratio * advantage, -min(max(ratio, 0.8), 1.2) * advantage)
        if dual_clip and advantage < 0:
            value = min(value, -dual_clip * advantage)
        expected += value / denominator if is_loss else 0.0
    columns = [list(column) for column in zip(*tokens, strict=True)]
    parts = [
        run(*(column[i : i + size] for column in columns), dual_clip=dual_clip, denominator=denominator)
        for i in range(0, len(tokens), size)
    ]
    whole = run(*columns, dual_clip=dual_clip, denominator=denominator)
    assert whole[0] == pytest.approx(expected, abs=1e-9)
    assert sum(part[0] for part in parts) == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole[1], atol=1e-12, rtol=0)
    for name, total in whole[2].items():
        combine = max if name.endswith("_max") else sum
        assert combine(part[2][name] for part in parts) == pytest.approx(total, abs=1e-9)


def test_the_registry_takes_every_algorithm_s_constants():
    configs = [
        SaoConfig(type="sao"),
        PpoConfig(type="ppo"),
        PpoConfig(type="ppo", dual_clip=3),
        GrpoConfig(type="grpo"),
    ]
    for config in configs:
        inputs = [torch.zeros(2), torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.uint8)]
        loss, _ = LOSSES[config.policy_loss](*inputs, denominator=2, **config.loss_constants())
        assert math.isfinite(loss.item())
    assert LOSSES["dis"] is dis_loss


def test_metrics_without_a_loss_token_are_absent():
    assert summarize({}) == {"policy/loss_tokens": 0.0}
    assert summarize(run([0.0], [0.0], [1.0], [0], denominator=1)[2]) == {"policy/loss_tokens": 0.0}


def test_no_token_at_all_gives_zero():
    loss, grad, sums = run([], [], [], denominator=3)
    assert (loss, len(grad), set(sums.values())) == (0, 0, {0.0})


def test_metrics_of_a_clipped_loss():
    metrics = summarize(run([math.log(1.5), 0.0], [0.0, 0.0], [1.0, 1.0])[2])
    assert metrics["policy/loss"] == pytest.approx(-1.1)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.25)
    assert metrics["policy/clip_fraction"] == 0.5
    assert metrics["policy/log_ratio_abs_max"] == pytest.approx(math.log(1.5))
    assert metrics["policy/kl_rollout"] == pytest.approx(-math.log(1.5) / 2)
    assert "policy/dis_reject_low" not in metrics
