"""Step-level credit: what a step is, what it is worth, and what then trains the critic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms import build
from orchestrator.algorithms.gae import skip_observation_gae
from orchestrator.algorithms.steps import last_tokens, num_transitions, step_gae, step_starts
from services.config.algorithm import PpoConfig, SaoConfig, VapoConfig
from services.packing.grid import build_grid
from services.wire.samples import StopReason
from tests.samples import make_sample

GAP_VALUES = [0.5, 0.4, 9.0, 9.0, 0.2, 0.1]
GAP_MASK = [1, 1, 0, 0, 1, 1]
STEPWISE = ["step_mean", "step_last"]


def sao(granularity, **kwargs):
    return build(SaoConfig(type="sao", granularity=granularity, **kwargs))


def gap(**kwargs):
    return make_sample(GAP_MASK, values=GAP_VALUES, **kwargs)


@pytest.mark.parametrize(("granularity", "advantages"), [("step_mean", [0.266667, 0.85]), ("step_last", [0.3, 0.9])])
def test_golden_steps(granularity, advantages):
    sample = gap()
    metrics = sao(granularity).credit([[sample]])
    first, second = advantages
    np.testing.assert_allclose(sample.advantages, [0, first, first, 0, 0, second, second], atol=1e-6)
    assert sample.returns.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert metrics["credit/lambda_mean"] == pytest.approx(2 / 3), "by steps, not by tokens"


def test_only_the_last_token_of_a_step_trains_the_critic():
    """The policy trains on all tokens; with the mean of a step so does the critic."""
    last, mean = gap(), gap()
    sao("step_last").credit([[last]])
    sao("step_mean").credit([[mean]])
    assert last.value_loss_mask.tolist() == [False, False, True, False, False, False, True]
    assert mean.value_loss_mask is None and last.policy_loss_mask is None

    def grid(sample, stream):
        (item,) = build_grid(
            [sample],
            stream=stream,
            seq_len=8,
            num_data_ranks=1,
            run_id="r",
            epoch=0,
            step=0,
            policy_version=0,
            temperature=1.0,
            loss_name="x",
            loss_constants={},
        )
        return item.header.mini_batches[0].tokens, item.arrays["loss_mask"].tolist()

    assert grid(last, "critic") == (2, [0, 0, 1, 0, 0, 0, 1])
    assert grid(last, "policy") == (4, [0, 1, 1, 0, 0, 1, 1])
    assert grid(mean, "critic") == (4, [0, 1, 1, 0, 0, 1, 1])


def test_a_last_token_that_is_another_branch_s_does_not_train_the_critic_twice():
    copy = gap(loss_mask=[0, 0, 0, 0, 1, 1])
    sao("step_last").credit([[copy]])
    assert copy.value_loss_mask.tolist() == [False] * 6 + [True]


def test_credit_by_tokens_again_clears_the_mask():
    sample = gap()
    sao("step_last").credit([[sample]])
    sao("token").credit([[sample]])
    assert sample.value_loss_mask is None


@pytest.mark.parametrize("granularity", STEPWISE)
def test_a_single_step_has_no_successor(granularity):
    sample = make_sample([1, 1, 1], values=[0.2, 0.4, 0.6])
    metrics = sao(granularity).credit([[sample]])
    worth = {"step_mean": 0.4, "step_last": 0.6}[granularity]
    np.testing.assert_allclose(sample.advantages[1:], 1 - worth, atol=1e-15)
    assert metrics["credit/lambda_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("granularity", STEPWISE)
def test_a_step_reward_stays_with_its_step(granularity):
    sample = make_sample(GAP_MASK, values=[0] * 6, step_rewards=[0, 0.25, 0, 0, 0, 0])
    build(PpoConfig(type="ppo", lam=0.0, gamma=0.9, whiten=False, granularity=granularity)).credit([[sample]])
    np.testing.assert_allclose(sample.advantages, [0, 0.25, 0.25, 0, 0, 1, 1], atol=1e-15)
    np.testing.assert_allclose(sample.returns, [0, 1.15, 1.15, 0, 0, 1, 1], atol=1e-15)


@pytest.mark.parametrize("granularity", STEPWISE)
def test_a_cut_step_bootstraps(granularity):
    cut = make_sample(GAP_MASK, values=[0] * 6, reward=0.0, stop_reason=StopReason.TRUNCATED_TURNS, bootstrap_value=0.3)
    sao(granularity, truncation="bootstrap").credit([[cut]])
    np.testing.assert_array_equal(cut.returns, [0, 0.3, 0.3, 0, 0, 0.3, 0.3])


@pytest.mark.parametrize("granularity", STEPWISE)
def test_a_branch_without_a_step_gets_zeros(granularity):
    empty = make_sample([0, 0], values=[1.0, 2.0])
    metrics = sao(granularity).credit([[empty]])
    assert not empty.advantages.any() and not empty.returns.any()
    assert "credit/lambda_mean" not in metrics


def test_the_value_of_a_step_does_not_know_what_observations_are_worth():
    first, second = gap(), make_sample(GAP_MASK, values=[0.5, 0.4, -7.0, 3.0, 0.2, 0.1])
    for sample in (first, second):
        sao("step_mean").credit([[sample]])
    assert first.advantages.tobytes() == second.advantages.tobytes()


def test_every_algorithm_that_always_uses_its_critic_knows_steps():
    for config in (SaoConfig(type="sao"), PpoConfig(type="ppo"), VapoConfig(type="vapo")):
        sample = gap()
        build(config.model_copy(update={"granularity": "step_mean"})).credit([[sample]])
        assert sample.advantages[1] == sample.advantages[2]


masks = st.lists(st.booleans(), min_size=1, max_size=40)


@settings(deadline=None, max_examples=100)
@given(masks)
def test_steps_are_the_runs_of_the_action_mask(mask):
    mask = np.array(mask)
    text = "".join("x" if action else " " for action in mask)
    steps = text.split()
    assert num_transitions(mask, "step_mean") == len(steps)
    assert num_transitions(mask, "token") == sum(map(len, steps))
    ends = np.flatnonzero(last_tokens(mask))
    assert [len(step) for step in steps] == (ends - step_starts(mask) + 1).tolist()


@settings(deadline=None, max_examples=100)
@given(masks, st.integers(0, 2**32 - 1), st.sampled_from(STEPWISE), st.floats(0, 1), st.floats(0, 1))
def test_steps_of_one_token_are_tokens(mask, seed, granularity, gamma, lam):
    """Every action followed by an observation: then all three granularities agree."""
    rng = np.random.default_rng(seed)
    mask = np.stack([mask, np.zeros(len(mask), dtype=bool)], axis=1).reshape(-1).astype(bool)
    values = rng.normal(size=len(mask))
    rewards = np.where(mask, rng.normal(size=len(mask)), 0.0)
    kwargs = {"gamma": gamma, "lam": lam, "bootstrap_value": 0.5}
    by_steps = step_gae(values, mask, rewards, granularity=granularity, **kwargs)
    for a, b in zip(by_steps, skip_observation_gae(values, mask, rewards, **kwargs), strict=True):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None, max_examples=50)
@given(masks, st.integers(0, 2**32 - 1), st.sampled_from(STEPWISE))
def test_with_lambda_one_targets_do_not_depend_on_values(mask, seed, granularity):
    rng = np.random.default_rng(seed)
    mask = np.array(mask)
    rewards = np.where(mask, rng.normal(size=len(mask)), 0.0)
    kwargs = {"granularity": granularity, "gamma": 0.99, "lam": 1.0}
    _, first = step_gae(rng.normal(size=len(mask)), mask, rewards, **kwargs)
    _, second = step_gae(rng.normal(size=len(mask)), mask, rewards, **kwargs)
    assert first.tobytes() == second.tobytes()
