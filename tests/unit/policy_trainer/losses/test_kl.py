"""The KL penalty: its three estimates, the gradient that each has, and what a clip does to it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.losses.kl import KINDS, kl_loss

CURRENT, ROLLOUT, REFERENCE = [-1.2, -0.7], [-1.5, -0.4], [-0.9, -1.1]


def run(
    current, reference, rollout, mask=None, *, kind="k3", unbiased=True, denominator=None, weights=None, dtype=None
):
    dtype = dtype or torch.float64
    logprobs = torch.tensor(current, dtype=dtype, requires_grad=True)
    mask = torch.ones(len(current), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    loss, sums = kl_loss(
        logprobs,
        torch.tensor(reference, dtype=dtype),
        torch.tensor(rollout, dtype=dtype),
        mask,
        kind=kind,
        unbiased=unbiased,
        denominator=int(mask.sum()) if denominator is None else denominator,
        weights=None if weights is None else torch.tensor(weights, dtype=dtype),
    )
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), sums["kl_reference_sum"].item()


@pytest.mark.parametrize(
    ("kind", "estimates", "slopes"),
    [
        ("k1", [-0.3, 0.4], [1.0, 1.0]),
        ("k2", [0.045, 0.08], [-0.3, 0.4]),
        ("k3", [math.exp(0.3) - 1.3, math.exp(-0.4) - 0.6], [1 - math.exp(0.3), 1 - math.exp(-0.4)]),
    ],
)
def test_estimates_and_gradients_by_hand(kind, estimates, slopes) -> None:
    """B25: log-ratios to the reference -0.3 and 0.4, to the rollout 0.3 and -0.3."""
    loss, grad, total = run(CURRENT, REFERENCE, ROLLOUT, kind=kind, unbiased=False)
    assert loss == pytest.approx(sum(estimates) / 2) and total == pytest.approx(sum(estimates))
    assert grad == pytest.approx([slope / 2 for slope in slopes])
    ratios = [math.exp(0.3), math.exp(-0.3)]
    loss, grad, total = run(CURRENT, REFERENCE, ROLLOUT, kind=kind)
    assert loss == pytest.approx(sum(r * k for r, k in zip(ratios, estimates, strict=True)) / 2)
    assert grad == pytest.approx([r * (k + s) / 2 for r, k, s in zip(ratios, estimates, slopes, strict=True)])
    assert total == pytest.approx(sum(estimates))


def test_one_token_s_gradient_of_k3_is_ratio_times_log_ratio() -> None:
    """B25, times beta 0.3."""
    _, grad, _ = run(CURRENT, REFERENCE, ROLLOUT)
    assert [0.3 * g for g in grad] == pytest.approx([0.15 * math.exp(0.3) * -0.3, 0.15 * math.exp(-0.3) * 0.4])


def expected_gradient(kind: str, *, unbiased: bool) -> tuple[torch.Tensor, ...]:
    """Expectation over all tokens of a rollout policy, and the gradients of both exact divergences."""
    generator = torch.Generator().manual_seed(0)
    logits, reference, rollout = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    reference, rollout = reference.log_softmax(0), rollout.log_softmax(0)
    logits.requires_grad_()
    logprobs = logits.log_softmax(0)
    loss, _ = kl_loss(
        logprobs,
        reference,
        rollout if unbiased else logprobs.detach(),
        torch.ones(6),
        kind=kind,
        unbiased=unbiased,
        denominator=1,
        weights=(rollout if unbiased else logprobs.detach()).exp(),
    )
    forward = (logprobs.exp() * (logprobs - reference)).sum()
    reverse = (reference.exp() * (reference - logprobs)).sum()
    return tuple(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, forward, reverse))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimates_have_the_gradient_of_the_divergence_whatever_the_rollout_policy_was(kind: str) -> None:
    ours, exact, _ = expected_gradient(kind, unbiased=True)
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=0)


def test_without_the_ratio_k1_has_no_gradient_k2_the_right_one_and_k3_the_opposite_divergence_s() -> None:
    """On the policy's own tokens, which is the best case."""
    torch.testing.assert_close(expected_gradient("k1", unbiased=False)[0], torch.zeros(6, dtype=torch.float64))
    ours, exact, _ = expected_gradient("k2", unbiased=False)
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=0)
    ours, _, opposite = expected_gradient("k3", unbiased=False)
    torch.testing.assert_close(ours, opposite, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_is_its_reference_pays_nothing(kind: str) -> None:
    loss, grad, _ = run(CURRENT, CURRENT, ROLLOUT, kind=kind)
    assert loss == 0 and (kind == "k1" or grad == [0, 0])


@pytest.mark.parametrize("gap", [800.0, -800.0])
@pytest.mark.parametrize("kind", KINDS)
def test_far_away_everything_is_finite_and_a_clipped_weight_has_no_gradient(kind: str, gap: float) -> None:
    """B25, B34."""
    loss, grad, _ = run([-1.0], [-1.5], [-1.0 - gap], kind=kind, dtype=torch.float32)
    assert math.isfinite(loss) and grad == [0]
    loss, grad, total = run([-1.0], [-1.0 - gap], [-1.0], kind=kind, dtype=torch.float32)
    assert math.isfinite(loss) and math.isfinite(grad[0]) and math.isfinite(total)
    assert kind != "k3" or grad == [0]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_entries_reach_neither_loss_nor_gradient_and_others_are_not_hidden(junk: float) -> None:
    """B12."""
    whole = run([-1.0, junk], [-1.5, junk], [-1.2, junk], [1, 0], weights=[2.0, junk])
    alone = run([-1.0], [-1.5], [-1.2], weights=[2.0])
    assert (whole[0], whole[1], whole[2]) == (alone[0], [*alone[1], 0.0], alone[2])
    for field in range(3):
        columns = [[-1.0, -1.0], [-1.5, -1.5], [-1.2, -1.2]]
        columns[field][1] = junk
        assert not math.isfinite(run(*columns)[0])


def test_an_unknown_estimate_and_a_bad_denominator_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; known: k1, k2, k3"):
        run(CURRENT, REFERENCE, ROLLOUT, kind="k4")
    with pytest.raises(ValueError, match="denominator"):
        run(CURRENT, REFERENCE, ROLLOUT, denominator=0)


token = st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-5, 0), st.booleans())


@settings(deadline=None, max_examples=30)
@given(st.lists(token, min_size=1, max_size=16), st.integers(1, 6), st.sampled_from(KINDS), st.booleans())
def test_any_split_into_micro_batches_gives_the_same_penalty(tokens, size, kind, unbiased) -> None:
    columns = [list(column) for column in zip(*tokens, strict=True)]
    constants = {"kind": kind, "unbiased": unbiased, "denominator": max(1, sum(columns[3]))}
    loss, grad, total = run(*columns, **constants)
    parts = [run(*(column[i : i + size] for column in columns), **constants) for i in range(0, len(tokens), size)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-9)
    assert [g for part in parts for g in part[1]] == pytest.approx(grad, abs=1e-12)
    assert sum(part[2] for part in parts) == pytest.approx(total, abs=1e-9)
