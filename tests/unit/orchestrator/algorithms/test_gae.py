"""Skip-observation GAE: numbers checked by hand, an independent slow reference, and what is refused."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms.gae import length_adaptive_lambda, skip_observation_gae

GAP_VALUES = [0.5, 0.4, 9.0, 9.0, 0.2, 0.1]
GAP_MASK = [1, 1, 0, 0, 1, 1]


def gae(values, mask, rewards, *, gamma=1.0, lam=1.0, bootstrap=0.0):
    return skip_observation_gae(
        np.array(values, dtype=np.float64),
        np.array(mask, dtype=bool),
        np.array(rewards, dtype=np.float64),
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap,
    )


def outcome(mask, reward):
    """Reward on the last action token."""
    rewards = np.zeros(len(mask))
    rewards[np.flatnonzero(mask)[-1]] = reward
    return rewards


def slow_reference(values, mask, rewards, gamma, lam, bootstrap):
    """O(n^2): each advantage as its own sum of discounted errors, with exact summation."""
    positions = [t for t in range(len(mask)) if mask[t]]
    n = len(positions)
    errors = []
    for k, t in enumerate(positions):
        following = values[positions[k + 1]] if k + 1 < n else bootstrap
        errors.append(rewards[t] + gamma * following - values[t])
    advantages = [0.0] * len(mask)
    returns = [0.0] * len(mask)
    for k, t in enumerate(positions):
        advantages[t] = math.fsum((gamma * lam) ** (j - k) * errors[j] for j in range(k, n))
        returns[t] = math.fsum([advantages[t], values[t]])
    return np.array(advantages), np.array(returns)


def test_a_gap_between_actions_is_skipped():
    advantages, returns = gae(GAP_VALUES, GAP_MASK, outcome(GAP_MASK, 1.0), lam=0.95)
    np.testing.assert_allclose(advantages, [0.3913875, 0.51725, 0, 0, 0.755, 0.9], atol=1e-12)
    np.testing.assert_allclose(returns, [0.8913875, 0.91725, 0, 0, 0.955, 1.0], atol=1e-12)


def test_a_gap_of_any_length_costs_one_factor():
    mask = [1, 0, 0, 0, 0, 0, 1]
    advantages, _ = gae([0.0] * 7, mask, outcome(mask, 2.0), gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantages, [0.9, 0, 0, 0, 0, 0, 2.0], atol=1e-15)


def test_a_trace_that_ends_in_an_observation_keeps_its_reward():
    mask = [1, 1, 1, 0, 0]
    advantages, returns = gae([0.5, 0.4, 0.3, 7, 7], mask, outcome(mask, 1.0))
    np.testing.assert_allclose(advantages, [0.5, 0.6, 0.7, 0, 0], atol=1e-15)
    np.testing.assert_array_equal(returns, [1, 1, 1, 0, 0])


def test_one_token():
    advantages, returns = gae([0.25], [1], [1.0])
    assert advantages.tolist() == [0.75]
    assert returns.tolist() == [1.0]


def test_one_token_that_was_cut_counts_the_value_at_the_cut():
    advantages, returns = gae([0.25], [1], [0.5], gamma=0.9, lam=0.3, bootstrap=2.0)
    np.testing.assert_allclose(advantages, [0.5 + 0.9 * 2.0 - 0.25], atol=1e-15)
    np.testing.assert_allclose(returns, [2.3], atol=1e-15)


def test_a_cut_trace_bootstraps():
    advantages, returns = gae([0.2, 0.3, 0.4], [1, 1, 1], [0, 0, 0], bootstrap=0.5)
    np.testing.assert_allclose(advantages, [0.3, 0.2, 0.1], atol=1e-15)
    np.testing.assert_array_equal(returns, [0.5, 0.5, 0.5])


def test_two_traces_of_different_lengths():
    first, _ = gae([0.1, 0.2, 0.3, 0.4], [1] * 4, [0, 0, 0, 1], lam=0.95)
    second, _ = gae([0.6, 0.5], [1] * 2, [0, 0], lam=0.95)
    np.testing.assert_allclose(first, [0.799675, 0.7365, 0.67, 0.6], atol=1e-12)
    np.testing.assert_allclose(second, [-0.575, -0.5], atol=1e-12)


def test_two_traces_of_one_bin_are_credited_apart():
    first, _ = gae([0.5, 0.4, 0.3], [1] * 3, [0, 0, 1], lam=0.95)
    second, _ = gae([0.6, 0.5], [1] * 2, [0, 0], lam=0.95)
    np.testing.assert_allclose(np.concatenate([first, second]), [0.43675, 0.565, 0.7, -0.575, -0.5], atol=1e-12)


def test_terminal_step_is_not_off_by_one():
    """Chain of three with lambda 0: the only value is on the last state, so returns are one-step looks ahead."""
    _, returns = gae([0, 0, 1], [1, 1, 1], [0, 0, 1], gamma=0.95, lam=0.0)
    np.testing.assert_allclose(returns, [0, 0.95, 1], atol=1e-15)


@pytest.mark.parametrize(
    ("kwargs", "rewards", "advantages"),
    [
        ({"lam": 1 - 1 / 6}, [0, 0, 0, 0, 0, 1], [0.184722, 0.341667, 0, 0, 0.65, 0.9]),
        ({"lam": 1.0}, [0, 0, 0, 0, 0, 1], [0.5, 0.6, 0, 0, 0.8, 0.9]),
        ({"lam": 1 - 1 / 6, "bootstrap": 0.3}, [0] * 6, [-0.22037, -0.144444, 0, 0, 0.066667, 0.2]),
        ({"lam": 0.5, "gamma": 0.9}, [0, 0.25, 0, 0, 0, 1], [-0.066762, 0.16275, 0, 0, 0.295, 0.9]),
    ],
)
def test_golden_advantages(kwargs, rewards, advantages):
    computed, _ = gae(GAP_VALUES, GAP_MASK, rewards, **kwargs)
    np.testing.assert_allclose(computed, advantages, atol=1e-6)


def test_golden_targets():
    _, plain = gae(GAP_VALUES, GAP_MASK, outcome(GAP_MASK, 1.0))
    _, cut = gae(GAP_VALUES, GAP_MASK, [0.0] * 6, bootstrap=0.3)
    _, stepped = gae(GAP_VALUES, GAP_MASK, [0, 0.25, 0, 0, 0, 1], gamma=0.9)
    assert plain.tolist() == [1, 1, 0, 0, 1, 1]
    assert cut.tolist() == [0.3, 0.3, 0, 0, 0.3, 0.3]
    np.testing.assert_allclose(stepped, [0.954, 1.06, 0, 0, 0.9, 1], atol=1e-12)


def test_skipping_equals_plain_gae_when_nothing_decays():
    """With gamma = lam = 1 the sum telescopes, so observations could as well have been transitions."""
    skipped, _ = gae(GAP_VALUES, GAP_MASK, outcome(GAP_MASK, 1.0))
    plain, _ = gae(GAP_VALUES, [1] * 6, outcome(GAP_MASK, 1.0))
    actions = np.array(GAP_MASK, dtype=bool)
    np.testing.assert_allclose(skipped[actions], plain[actions], atol=1e-14)


@pytest.mark.parametrize("junk", [0.0, -123.456, 1e300, math.nan, math.inf])
def test_values_off_the_mask_change_no_bit(junk):
    noisy = [0.5, 0.4, junk, -junk, 0.2, 0.1]
    expected = gae(GAP_VALUES, GAP_MASK, outcome(GAP_MASK, 1.0), gamma=0.97, lam=0.9)
    computed = gae(noisy, GAP_MASK, outcome(GAP_MASK, 1.0), gamma=0.97, lam=0.9)
    for a, b in zip(expected, computed, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 10_000])
def test_the_length_of_an_observation_changes_no_bit(gap):
    rng = np.random.default_rng(3)
    values = rng.normal(size=8)
    spread = np.concatenate([values[:3], rng.normal(size=gap), values[3:]])
    mask = np.array([True] * 3 + [False] * gap + [True] * 5)
    advantages, _ = gae(spread, mask, outcome(mask, 1.0), gamma=0.9, lam=0.8)
    whole, _ = gae(values, [1] * 8, [0] * 7 + [1.0], gamma=0.9, lam=0.8)
    assert advantages[mask].tobytes() == whole.tobytes()


def test_targets_with_lambda_one_do_not_depend_on_values_by_a_single_bit():
    rng = np.random.default_rng(1)
    mask = rng.random(200) < 0.6
    rewards = np.where(mask & (rng.random(200) < 0.1), rng.normal(size=200), 0.0)
    _, first = gae(rng.normal(size=200), mask, rewards, gamma=0.99, lam=1.0)
    _, second = gae(rng.normal(size=200) * 1e6, mask, rewards, gamma=0.99, lam=1.0)
    assert first.tobytes() == second.tobytes()


def test_no_action_token_gives_zeros():
    advantages, returns = gae([math.nan, 1.0], [0, 0], [0, 0], bootstrap=3.0)
    assert advantages.tolist() == [0, 0]
    assert returns.tolist() == [0, 0]


def test_order_of_traces_changes_no_bit():
    rng = np.random.default_rng(5)
    traces = [(rng.normal(size=n), rng.random(n) < 0.5) for n in rng.integers(1, 64, size=50)]

    def run(order):
        return {i: gae(*traces[i], np.zeros(len(traces[i][1])), gamma=0.9, lam=0.7, bootstrap=0.1) for i in order}

    forward, backward = run(range(50)), run(reversed(range(50)))
    for i in range(50):
        assert forward[i][0].tobytes() == backward[i][0].tobytes()
        assert forward[i][1].tobytes() == backward[i][1].tobytes()


def test_inputs_are_not_changed():
    values, mask, rewards = np.array(GAP_VALUES), np.array(GAP_MASK, dtype=bool), outcome(GAP_MASK, 1.0)
    before = [hashlib.sha256(array.tobytes()).hexdigest() for array in (values, mask, rewards)]
    skip_observation_gae(values, mask, rewards, gamma=0.9, lam=0.9)
    assert before == [hashlib.sha256(array.tobytes()).hexdigest() for array in (values, mask, rewards)]


def test_a_thousand_random_traces_agree_with_the_slow_reference():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        n = int(rng.integers(1, 40))
        mask = rng.random(n) < rng.random()
        values = rng.normal(size=n)
        rewards = np.where(mask & (rng.random(n) < 0.3), rng.normal(size=n), 0.0)
        gamma, lam = (float(x) for x in rng.choice([0.0, 0.5, 0.9, 0.99, 1.0], size=2))
        bootstrap = float(rng.choice([0.0, rng.normal()]))
        advantages, returns = gae(values, mask, rewards, gamma=gamma, lam=lam, bootstrap=bootstrap)
        slow_advantages, slow_returns = slow_reference(values, mask, rewards, gamma, lam, bootstrap)
        np.testing.assert_allclose(advantages, slow_advantages, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(returns, slow_returns, rtol=1e-12, atol=1e-12)


def test_results_do_not_share_memory_with_the_next_call():
    first, _ = gae([0.5, 0.25], [1, 1], [0, 1.0])
    kept = first.copy()
    gae([9.0, 9.0], [1, 1], [0, 9.0])
    assert first.tobytes() == kept.tobytes()


unit = st.floats(0, 1)
number = st.floats(-10, 10)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(number, st.booleans(), number), min_size=1, max_size=30), unit, unit, number)
def test_any_trace_agrees_with_the_slow_reference(tokens, gamma, lam, bootstrap):
    values, mask, raw = (np.array(column) for column in zip(*tokens, strict=True))
    rewards = np.where(mask, raw, 0.0)
    advantages, returns = gae(values, mask, rewards, gamma=gamma, lam=lam, bootstrap=bootstrap)
    slow_advantages, slow_returns = slow_reference(values, mask, rewards, gamma, lam, bootstrap)
    np.testing.assert_allclose(advantages, slow_advantages, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(returns, slow_returns, rtol=1e-11, atol=1e-11)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.timeout(20)
def test_a_long_trace_is_credited():
    mask = np.ones(131_072, dtype=bool)
    advantages, returns = gae(np.zeros(131_072), mask, outcome(mask, 1.0), lam=1.0)
    assert set(advantages.tolist()) == {1.0}
    assert set(returns.tolist()) == {1.0}


@pytest.mark.parametrize("bad", [-0.1, 1.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["gamma", "lam", "value_lambda"])
def test_a_factor_outside_zero_and_one_is_refused(field, bad):
    with pytest.raises(ValueError, match=field):
        skip_observation_gae(np.zeros(96), np.ones(96), np.zeros(96), **({"gamma": 1.0, "lam": 1.0} | {field: bad}))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_on_an_action_token_is_refused(bad):
    with pytest.raises(ValueError, match="rewards"):
        gae([0, 0], [1, 1], [0, bad])
    with pytest.raises(ValueError, match="values"):
        gae([0, bad], [1, 1], [0, 0])
    with pytest.raises(ValueError, match="bootstrap_value"):
        gae([0, 0], [1, 1], [0, 0], bootstrap=bad)


@pytest.mark.parametrize("stray", [1.0, -1e-30, math.nan])
def test_a_reward_off_the_action_mask_is_refused(stray):
    with pytest.raises(ValueError, match="rewards"):
        gae([0, 0], [1, 0], [1.0, stray])


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="values"):
        gae([0, 0, 0], [1, 1], [0, 0])
    with pytest.raises(ValueError, match="rewards"):
        gae([0, 0], [1, 1], [0])


@pytest.mark.parametrize(("n", "expected"), [(1, 1 / 3), (2, 2 / 3), (4, 5 / 6), (100, 149 / 150)])
def test_adaptive_lambda(n, expected):
    assert length_adaptive_lambda(n, 1.5) == pytest.approx(expected, abs=1e-15)


def test_adaptive_lambda_is_clamped_at_zero():
    assert length_adaptive_lambda(1, 0.5) == 0.0
    assert length_adaptive_lambda(1, 1e-320) == 0.0
    assert length_adaptive_lambda(0, 1.5) == 0.0


@pytest.mark.parametrize(("alpha", "weight"), [(1.5, 0.513), (0.4, 0.082)])
def test_adaptive_lambda_gives_the_terminal_error_one_weight_at_any_length(alpha, weight):
    for n in (2_000, 100_000):
        assert length_adaptive_lambda(n, alpha) ** (n - 1) == pytest.approx(weight, abs=1e-3)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9), st.floats(min_value=1e-300, max_value=1e300))
def test_adaptive_lambda_stays_in_zero_to_one(n, alpha):
    assert 0.0 <= length_adaptive_lambda(n, alpha) <= 1.0


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_adaptive_lambda_refuses_a_bad_alpha(alpha):
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(4, alpha)


def test_adaptive_lambda_refuses_a_negative_count():
    with pytest.raises(ValueError, match="num_action_tokens"):
        length_adaptive_lambda(-1, 1.5)
