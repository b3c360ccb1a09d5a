"""The entropy bonus and the weights of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from policy_trainer.losses import LOSSES, entropy_loss
from policy_trainer.losses.common import sample_weights


def test_the_bonus_is_minus_the_mean_entropy() -> None:
    entropies = torch.tensor([0.5, 1.5, math.nan], dtype=torch.float64, requires_grad=True)
    loss, sums = entropy_loss(entropies, torch.tensor([1, 1, 0]), denominator=4)
    loss.backward()
    assert loss.item() == -0.5 and sums["entropy_sum"].item() == 2.0
    assert entropies.grad is not None and entropies.grad.tolist() == [-0.25, -0.25, 0.0]


def test_non_finite_entropy_at_a_loss_token_is_not_hidden() -> None:
    loss, _ = entropy_loss(torch.tensor([math.nan, 1.0]), torch.ones(2), denominator=2)
    assert math.isnan(loss.item())


def test_weights_make_a_sum_over_tokens_a_mean_of_samples_means() -> None:
    """Losses 1, 3 | 8: means 2 and 8, so 5; by tokens it would be 4."""
    weights = sample_weights(torch.tensor([0, 0, 2]), 3)
    assert weights.tolist() == [0.5, 0.5, 1.0]
    loss, _ = entropy_loss(-torch.tensor([1.0, 3.0, 8.0]), torch.ones(3), denominator=2, weights=weights)
    assert loss.item() == 5.0


@pytest.mark.parametrize("name", LOSSES)
def test_weights_scale_a_token_s_loss_and_gradient_and_are_not_read_off_the_mask(name: str) -> None:
    def run(weights: torch.Tensor | None) -> tuple[float, torch.Tensor]:
        logprobs = torch.tensor([-1.0, -2.0, math.nan], dtype=torch.float64, requires_grad=True)
        old, advantages = torch.tensor([-1.1, -1.9, math.nan]), torch.tensor([1.0, -2.0, math.nan])
        loss, _ = LOSSES[name](
            logprobs, old, advantages, torch.tensor([1, 1, 0]), denominator=2, weights=weights, eps_low=0.3, eps_high=5
        )
        loss.backward()
        assert logprobs.grad is not None
        return loss.item(), logprobs.grad

    plain, doubled = run(None), run(torch.tensor([2.0, 2.0, math.nan], dtype=torch.float64))
    assert doubled[0] == pytest.approx(2 * plain[0]) and torch.allclose(doubled[1], 2 * plain[1])
    assert run(torch.ones(3, dtype=torch.float64))[0] == plain[0]
