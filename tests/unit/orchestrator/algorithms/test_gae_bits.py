"""GAE over long branches: the plain recursion by rounding, and the same bits however the work is cut and ordered."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms.gae import CHUNK, ROW, length_adaptive_lambda, skip_observation_gae


def gae(values, mask, rewards, *, gamma=1.0, lam=1.0, bootstrap=0.0):
    return skip_observation_gae(
        values, np.asarray(mask, bool), rewards, gamma=gamma, lam=lam, bootstrap_value=bootstrap
    )


def plain_loop(values, mask, rewards, gamma, lam, bootstrap):
    """The recursion as it is written, one token after the other."""
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    advantage, value, target = 0.0, bootstrap, bootstrap
    for t in reversed(np.flatnonzero(mask)):
        advantage = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
        target = rewards[t] + gamma * ((1 - lam) * value + lam * target)
        advantages[t], returns[t], value = advantage, target, values[t]
    return advantages, returns


@pytest.mark.parametrize("lam", [0.0, 0.05, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("num_actions", [1, ROW - 1, ROW, ROW + 1, 3000, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_branch_of_any_length_agrees_with_the_plain_loop(num_actions, lam):
    rng = np.random.default_rng(num_actions)
    mask = rng.permutation(np.arange(2 * num_actions) < num_actions)
    values = rng.normal(size=len(mask))
    rewards = np.where(mask & (rng.random(len(mask)) < 0.1), rng.normal(size=len(mask)), 0.0)
    for gamma in (1.0, 0.99):
        computed = gae(values, mask, rewards, gamma=gamma, lam=lam, bootstrap=0.7)
        for ours, theirs in zip(computed, plain_loop(values, mask, rewards, gamma, lam, 0.7), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


TRACES = [  # decay from far below one to one; tokens
    (1.0, 1.0, 3000),
    (0.999, 0.99, 3000),
    (1.0, 0.95, 9000),
    (1.0, 0.5, 700),
    (0.9, 0.08, 150),
    (1.0, 0.03, 150),
    (1.0, 1.0 - 1.0 / 4500, 3000),
]


def rewarded(length, seed):
    """Values and step rewards about one in size, six tokens in ten actions."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.6
    return rng.normal(size=length), mask, np.where(mask & (rng.random(length) < 0.1), rng.normal(size=length), 0.0)


@pytest.mark.parametrize(("gamma", "lam", "length"), TRACES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 128, "T"])
def test_the_length_of_a_piece_changes_no_bit(monkeypatch, gamma, lam, length, chunk):
    trace = rewarded(length, seed=4)
    expected = gae(*trace, gamma=gamma, lam=lam, bootstrap=0.3)
    monkeypatch.setattr("orchestrator.algorithms.gae.CHUNK", length if chunk == "T" else chunk)
    for ours, theirs in zip(gae(*trace, gamma=gamma, lam=lam, bootstrap=0.3), expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("gamma", "lam", "length"), TRACES)
@pytest.mark.parametrize("bits", [16, 100, 512])
def test_where_powers_are_rescaled_changes_no_bit(monkeypatch, gamma, lam, length, bits):
    trace = rewarded(length, seed=4)
    expected = gae(*trace, gamma=gamma, lam=lam, bootstrap=0.3)
    monkeypatch.setattr("orchestrator.algorithms.gae.RANGE_BITS", bits)
    for ours, theirs in zip(gae(*trace, gamma=gamma, lam=lam, bootstrap=0.3), expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("decay", [2.0**-4, 2.0**-4 - 2.0**-57, 0.0625001, 0.51])
def test_numbers_of_any_size_go_through_every_rescaling(decay):
    """Long and short of the border between the two ways, over hundreds of halvings."""
    values, mask, rewards = rewarded(2000, seed=6)
    for scale in (1e-150, 1.0, 1e120):
        computed = gae(scale * values, mask, scale * rewards, lam=decay, bootstrap=scale)
        expected = plain_loop(scale * values, mask, scale * rewards, 1.0, decay, scale)
        for ours, theirs in zip(computed, expected, strict=True):
            np.testing.assert_allclose(ours / scale, theirs / scale, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 400), min_size=2, max_size=6), st.permutations(range(6)), st.sampled_from([1, 7, 128]))
def test_shuffled_traces_in_other_pieces_are_the_same_to_the_bit(lengths, order, chunk):
    """Written side by side into one array, as a batch is; each with its own lambda."""

    def run(indices, chunk):
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("orchestrator.algorithms.gae.CHUNK", chunk)
            whole, start = np.full((2, sum(lengths)), math.nan), 0
            for i in indices:
                values, mask, rewards = rewarded(lengths[i], seed=i)
                lam, out = length_adaptive_lambda(int(mask.sum()), 1.5), whole[:, start : start + lengths[i]]
                found[i] = skip_observation_gae(values, mask, rewards, gamma=0.999, lam=lam, out=out)
                start += lengths[i]
        return {i: (a.tobytes(), r.tobytes()) for i, (a, r) in found.items()}

    shuffled = [i for i in order if i < len(lengths)]
    assert run(range(len(lengths)), 8192) == run(shuffled, chunk)


def test_two_lambdas_in_one_call_are_the_two_calls_to_the_bit():
    trace = rewarded(500, seed=8)
    both = skip_observation_gae(*trace, gamma=0.99, lam=0.9, value_lambda=0.7, bootstrap_value=0.2)
    assert both[0].tobytes() == gae(*trace, gamma=0.99, lam=0.9, bootstrap=0.2)[0].tobytes()
    assert both[1].tobytes() == gae(*trace, gamma=0.99, lam=0.7, bootstrap=0.2)[1].tobytes()


def test_out_is_overwritten_whatever_it_held():
    trace, out = rewarded(50, seed=8), np.full((2, 50), math.nan)
    rows = skip_observation_gae(*trace, gamma=0.99, lam=0.9, out=out)
    expected = gae(*trace, gamma=0.99, lam=0.9)
    for row, own, theirs in zip(rows, out, expected, strict=True):
        assert np.shares_memory(row, own) and own.tobytes() == theirs.tobytes()


def test_a_very_long_branch_agrees_with_the_plain_loop():
    """Long enough for many pieces."""
    rng = np.random.default_rng(9)
    mask = rng.random(131_072) < 0.7
    values, rewards = rng.random(131_072), np.zeros(131_072)
    rewards[np.flatnonzero(mask)[-1]] = 1.0
    lam = length_adaptive_lambda(int(mask.sum()), 1.5)
    computed = gae(values, mask, rewards, lam=lam)
    for ours, theirs in zip(computed, plain_loop(values, mask, rewards, 1.0, lam, 0.0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_precedes_a_token_changes_no_bit_of_it():
    rng = np.random.default_rng(2)
    values, rewards = rng.normal(size=1500), np.append(np.zeros(1499), 1.0)
    whole = gae(values, np.ones(1500), rewards, gamma=0.99, lam=0.97)
    for start in (1, 23, 24, 300, 923, 924, 1450, 1475, 1476, 1477, 1499):
        tail = gae(values[start:], np.ones(1500 - start), rewards[start:], gamma=0.99, lam=0.97)
        for a, b in zip(whole, tail, strict=True):
            assert a[start:].tobytes() == b.tobytes()
