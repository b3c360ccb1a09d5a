"""Drawing tokens: the right distribution, the right log-probability, and the same draw whoever is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.inference.sampling import counter_uniforms, sample


def draw(logits: torch.Tensor, *, temperature: float = 1.0, first_seed: int = 0, position: int = 5):
    n = len(logits)
    return sample(
        logits,
        np.full(n, temperature, dtype=np.float32),
        np.arange(first_seed, first_seed + n).astype(np.uint64),
        np.full(n, position, dtype=np.uint64),
    )


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(400, dtype=np.uint64), np.arange(400, dtype=np.uint64), indexing="ij")
    u = counter_uniforms(seeds.ravel(), positions.ravel()).reshape(400, 400)
    assert u.min() >= 0 and u.max() < 1
    assert np.abs(np.histogram(u, bins=50, range=(0, 1))[0] - 3200).max() < 5 * math.sqrt(3200)
    for other in (u[1:, :], u[:, 1:]):
        own = u[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(own.ravel(), other.ravel())[0, 1]) < 5 / 400


def test_frequencies_follow_the_distribution_at_the_temperature() -> None:
    """20,000 seeds: each token's count is within 4.5 standard deviations."""
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf, 0.5])
    for temperature in (1.0, 0.6, 2.0):
        tokens, _ = draw(row.repeat(20_000, 1), temperature=temperature)
        p = torch.softmax(row.double() / temperature, 0).numpy()
        counts = np.bincount(tokens, minlength=6)
        assert (np.abs(counts - 20_000 * p) <= 4.5 * np.sqrt(20_000 * p * (1 - p))).all()
        assert counts[4] == 0


def test_log_probabilities_are_of_the_tempered_distribution() -> None:
    """Logits [2, 1] at temperature 0.6: -0.17301 for token 0, not the raw -0.31326."""
    tokens, logprobs = draw(torch.tensor([[2.0, 1.0]]).repeat(50, 1), temperature=0.6)
    told = {token: logprob for token, logprob in zip(tokens, logprobs, strict=True)}
    assert told[0] == pytest.approx(-0.17301, abs=1e-5)


def test_temperature_zero_is_greedy_and_tells_the_distribution_at_one() -> None:
    tokens, logprobs = draw(torch.tensor([[2.0, 1.0]]).repeat(20, 1), temperature=0.0)
    assert set(tokens) == {0}
    assert logprobs[0] == pytest.approx(-0.31326, abs=1e-5)


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(32, 261, generator=torch.Generator().manual_seed(0))
    together, _ = draw(logits)
    alone = [draw(logits[i : i + 1], first_seed=i)[0][0] for i in range(32)]
    assert together == alone


def test_a_row_that_is_not_finite_yields_nan_and_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    expected = draw(logits)
    logits[1, 3] = math.nan
    tokens, logprobs = draw(logits)
    assert math.isnan(logprobs[1])
    assert (tokens[0], tokens[2], logprobs[2]) == (expected[0][0], expected[0][2], expected[1][2])
