"""Explained variance: pooled exactly, and None where it means nothing."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.wire.errors import NonFiniteError
from value_service.losses.explained_variance import FitMoments, Moments, explained_variance


def pooled(shards):
    return FitMoments.pooled([FitMoments.of(*shard).to_list() for shard in shards]).explained_variance()


def test_golden():
    returns, values = [0.0, 1.0, 10.0, 11.0], [0.5, 0.5, 10.5, 10.5]
    assert explained_variance(returns, values) == pytest.approx(0.990099, abs=1e-6)
    assert pooled([([0, 1], [0.5, 0.5]), ([10, 11], [10.5, 10.5])]) == pytest.approx(0.990099, abs=1e-6)


def test_a_mean_over_shards_is_another_number():
    """Two prompts far apart, a critic that errs by 2.534758 one way and the other: by hand 1 - 6.425 / 128.505.

    Within a prompt, returns vary by 0.25 alone, and 1 - 6.425 / 0.25 = -24.7.
    """
    far, error = 2 * math.sqrt(128.255), math.sqrt(6.425)
    shards = [(np.array([0, 1]) + level, np.array([-error, 1 + error]) + level) for level in (0.0, far)]
    assert pooled(shards) == pytest.approx(0.950, abs=1e-4)
    assert [explained_variance(*shard) for shard in shards] == pytest.approx([-24.7, -24.7])


def test_a_perfect_a_constant_and_a_harmful_critic():
    returns = np.array([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, np.full(4, 0.7)) == pytest.approx(0.0)
    assert explained_variance(returns, [0.1, 0.9, 0.2, 0.7]) == pytest.approx(1 - np.var([-0.1, 0.1, -0.2, 0.3]) / 0.25)
    assert explained_variance(returns, 1 - returns) == pytest.approx(-3.0)


def test_a_constant_bias_is_not_seen():
    returns = np.array([0.0, 1.0, 0.0])
    assert explained_variance(returns, returns + 0.3) == pytest.approx(1.0)


@pytest.mark.parametrize("level", [0.0, 1.0, 0.1, 1e6])
def test_targets_that_do_not_vary_are_undefined(level):
    assert explained_variance(np.full(5, level), np.arange(5.0)) is None
    jitter = level + 1e-9 * max(1.0, level) * np.array([1, -1, 1, -1])
    assert explained_variance(jitter, np.arange(4.0)) is None


@pytest.mark.parametrize("numbers", [[], [1.0]])
def test_fewer_than_two_tokens_are_undefined(numbers):
    assert explained_variance(numbers, numbers) is None


def test_a_small_spread_at_a_large_mean_survives():
    """Raw sums in f32 lose it: deviation 0.05 at mean 1000."""
    rng = np.random.default_rng(0)
    returns = 1000 + 0.05 * rng.normal(size=4096)
    values = returns + 0.01 * rng.normal(size=4096)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(returns, values) == pytest.approx(expected, abs=1e-9)
    halves = [(returns[:100], values[:100]), (returns[100:], values[100:])]
    assert pooled(halves) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_any_partition_gives_the_same_number(num_shards):
    rng = np.random.default_rng(num_shards)
    returns = rng.normal(size=200)
    values = returns + rng.normal(size=200)
    cuts = [0, *sorted(rng.integers(0, 201, size=num_shards - 1).tolist()), 200]
    shards = [(returns[a:b], values[a:b]) for a, b in pairwise(cuts)]
    assert pooled(shards) == pytest.approx(explained_variance(returns, values), abs=1e-12)


def test_dummies_contribute_nothing():
    shard = ([0.0, 1.0], [0.2, 0.9])
    assert pooled([([], []), shard, ([], [])]) == explained_variance(*shard)
    assert pooled([([], []), ([], [])]) is None
    assert FitMoments.pooled([]).explained_variance() is None


def test_torch_tensors_are_taken_too():
    returns = torch.tensor([0.0, 1.0, 10.0, 11.0])
    values = torch.tensor([0.5, 0.5, 10.5, 10.5], requires_grad=True)
    assert explained_variance(returns, values) == pytest.approx(0.990099, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_number_is_refused(bad):
    with pytest.raises(NonFiniteError):
        explained_variance([0.0, bad], [0.0, 1.0])
    with pytest.raises(NonFiniteError):
        explained_variance([0.0, 1.0], [0.0, bad])


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="entries"):
        explained_variance([0.0, 1.0], [0.0])


def test_moments_travel_as_a_flat_list():
    moments = Moments.of([1.0, 3.0])
    assert moments.to_list() == [2, 2, 2]
    assert Moments.from_list(moments.to_list()) == moments
    fit = FitMoments.of([1.0, 3.0], [1.0, 2.0])
    assert FitMoments.from_list(fit.to_list()) == fit


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), max_size=6))
def test_merged_moments_are_those_of_all_numbers(shards):
    merged = Moments()
    for shard in shards:
        merged = merged.merge(Moments.of(shard))
    flat = np.array([number for shard in shards for number in shard])
    assert merged.n == len(flat)
    if len(flat) >= 2:
        scale = max(1.0, float(np.abs(flat).max()))
        assert merged.mean == pytest.approx(flat.mean(), abs=1e-12 * scale)
        assert merged.variance == pytest.approx(flat.var(), abs=1e-12 * scale * scale)
    else:
        assert merged.variance is None
