"""EVPO: when the critic is the baseline, and what happens where it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms import build
from orchestrator.algorithms.evpo import explained_variance_of
from services.config.algorithm import EvpoConfig
from services.wire.samples import StopReason
from tests.samples import make_sample


def evpo(**kwargs):
    return build(EvpoConfig(type="evpo", **kwargs))


def group(rewards, values, group_id="g0"):
    """One action token each."""
    return [
        make_sample([1], reward=reward, values=[value], trace_id=f"{group_id}-{i}", group_id=group_id)
        for i, (reward, value) in enumerate(zip(rewards, values, strict=True))
    ]


def firsts(samples):
    return [float(sample.advantages[1]) for sample in samples]


@pytest.mark.parametrize(
    ("values", "explained", "uses_critic"),
    [
        ([0.5] * 4, 0.0, False),
        ([0.9, 0.1, 0.8, 0.3], 0.8525, True),
        ([0.1, 0.9, 0.2, 0.7], -1.7475, False),
        ([1.3, 0.3, 1.3, 0.3], 1.0, True),
    ],
)
def test_explained_variance_decides(values, explained, uses_critic):
    """The last critic is off by a constant, which explained variance does not see."""
    rewards = [1.0, 0.0, 1.0, 0.0]
    samples = group(rewards, values)
    metrics = evpo().credit([samples])
    returns = [sample.returns for sample in samples]
    assert explained_variance_of(samples, returns) == pytest.approx(explained, abs=1e-12)
    expected = np.array(rewards) - values if uses_critic else [0.5, -0.5, 0.5, -0.5]
    np.testing.assert_allclose(firsts(samples), expected, atol=1e-15)
    assert metrics["evpo/critic_fraction"] == float(uses_critic)
    assert [float(target[1]) for target in returns] == rewards, "the critic trains either way"


def test_a_critic_that_is_no_better_than_the_mean_is_not_used():
    """Strictly greater: explained variance of exactly 0, or of exactly the threshold, takes the mean."""
    good = group([1.0, 0.0], [0.75, 0.25])  # explains 0.75
    assert evpo(threshold=0.75).credit([good])["evpo/critic_fraction"] == 0.0
    assert firsts(good) == [0.5, -0.5]
    assert evpo(threshold=0.7).credit([good])["evpo/critic_fraction"] == 1.0
    assert firsts(good) == [0.25, -0.25]


@pytest.mark.parametrize("level", [0.0, 1.0, 0.1])
def test_returns_that_do_not_vary_leave_nothing_to_learn(level):
    samples = group([level] * 4, [0.9, 0.1, 0.8, 0.3])
    metrics = evpo().credit([samples])
    assert firsts(samples) == [0.0] * 4
    assert (metrics["evpo/critic_fraction"], metrics["credit/flat_groups"]) == (0.0, 1.0)


def test_each_group_decides_for_itself():
    good, bad = group([1.0, 0.0], [0.9, 0.1]), group([1.0, 0.0], [0.1, 0.9], "g1")
    metrics = evpo().credit([good, bad])
    assert metrics["evpo/critic_fraction"] == 0.5
    np.testing.assert_allclose(firsts(good), [0.1, -0.1], atol=1e-15)
    assert firsts(bad) == [0.5, -0.5]


def test_the_scope_of_a_batch_decides_once_and_takes_groups_of_one():
    batch = [group([1.0], [0.1], "g0"), group([0.0], [0.9], "g1"), group([1.0], [0.2], "g2"), group([0.0], [0.7], "g3")]
    metrics = evpo(scope="batch").credit(batch)
    assert metrics["evpo/critic_fraction"] == 0.0
    assert [firsts(samples)[0] for samples in batch] == [0.5, -0.5, 0.5, -0.5]


def test_the_scope_of_a_group_refuses_groups_of_one():
    with pytest.raises(ValueError, match="at least 2"):
        evpo().credit([group([1.0], [0.1])])
    assert (EvpoConfig(type="evpo").min_group, EvpoConfig(type="evpo", scope="batch").min_group) == (2, 1)


def test_many_equal_groups_are_counted():
    """Success rates uniform in [0, 1], eight traces: 2 of 9 groups are all alike."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(2000):
        rewards = (rng.random(8) < rng.random()).astype(float)
        groups.append(group(rewards, rng.random(8), str(index)))
    assert evpo().credit(groups)["credit/flat_groups"] / 2000 == pytest.approx(2 / 9, abs=0.03)


def test_values_at_one_common_prompt_explain_nothing():
    samples = [make_sample([1], reward=r, values=[0.4], trace_id=str(i)) for i, r in enumerate([1.0, 0.0, 0.0])]
    evpo().credit([samples])
    assert explained_variance_of(samples, [sample.returns for sample in samples]) == pytest.approx(0.0, abs=1e-15)


def test_rounding_does_not_make_a_critic_of_a_value_of_the_prompt():
    """Answers of any length, one value at all their tokens: 0 may come out as 2e-16, in about every eighth group."""
    rng = np.random.default_rng(0)
    groups = []
    for index, chance in enumerate(rng.random(200)):
        rewards, lengths = (rng.random(8) < chance).astype(float), rng.integers(4, 13, size=8)
        groups.append(
            [
                make_sample([1] * length, reward=reward, values=[chance] * length, trace_id=str(i), group_id=str(index))
                for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
            ]
        )
    assert evpo().credit(groups)["evpo/critic_fraction"] == 0.0
    found = [explained_variance_of(samples, [sample.returns for sample in samples]) for samples in groups]
    defined = [explained for explained in found if explained is not None]
    assert defined == pytest.approx([0.0] * len(defined), abs=1e-12) and max(defined) > 0


def test_the_target_lambda_moves_neither_the_decision_nor_the_mean():
    def batch():
        return [
            make_sample([1, 1], reward=r, values=v, trace_id=str(r)) for r, v in ((1.0, [0.2, 0.9]), (0.0, [0.9, 0.8]))
        ]

    one, half = batch(), batch()
    first, second = evpo().credit([one]), evpo(value_lambda=0.5).credit([half])
    assert first["evpo/critic_fraction"] == second["evpo/critic_fraction"] == 0.0
    assert firsts(one) == firsts(half) == [0.5, -0.5]
    assert one[0].returns.tobytes() != half[0].returns.tobytes()


def test_a_cut_trace_is_worth_what_the_critic_says_in_either_mode():
    cut = make_sample([1], reward=0.0, values=[0.5], stop_reason=StopReason.TRUNCATED_TURNS, bootstrap_value=0.6)
    other = make_sample([1], reward=0.0, values=[0.5], trace_id="t1")
    evpo(truncation="bootstrap").credit([[cut, other]])
    np.testing.assert_allclose(firsts([cut, other]), [0.3, -0.3], atol=1e-15)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=2, max_size=12))
def test_credit_is_one_of_the_two_baselines(pairs):
    samples = group([float(reward) for reward, _ in pairs], [value for _, value in pairs])
    metrics = evpo().credit([samples])
    rewards, values = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    expected = rewards - values if metrics["evpo/critic_fraction"] else rewards - rewards.mean()
    np.testing.assert_allclose(firsts(samples), expected, atol=1e-12)


def test_a_return_that_holds_the_critic_s_own_value_does_not_speak_for_the_critic():
    """Two ended traces that the critic has the wrong way round, and two cut ones whose returns are its own values."""
    ended = group([1.0, 0.0], [0.1, 0.9])
    cut = group([0.0, 0.0], [5.0, -5.0], group_id="cut")
    for sample, own in zip(cut, (5.0, -5.0), strict=True):
        sample.stop_reason, sample.bootstrap_value = StopReason.TRUNCATED_LENGTH, own
    algorithm = evpo(scope="batch", truncation="bootstrap")
    assert algorithm.credit([ended, cut])["evpo/critic_fraction"] == 0.0
    assert [sample.bootstrapped for sample in (*ended, *cut)] == [False, False, True, True]
    assert explained_variance_of(ended, [sample.returns for sample in ended]) < 0
