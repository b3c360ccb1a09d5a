"""Where rewards go, what a cut is worth, and which lambda feeds what."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.algorithms.credit import assign_credit, assign_gae, bootstrap_value, credit_metrics, token_rewards
from orchestrator.algorithms.gae import skip_observation_gae
from services.config.algorithm import PpoConfig
from services.wire.errors import ContractError, NonFiniteError
from services.wire.samples import StopReason
from tests.samples import make_sample

GAP_VALUES = [0.5, 0.4, 9.0, 9.0, 0.2, 0.1]
GAP_MASK = [1, 1, 0, 0, 1, 1]


def credit(sample, *, gamma=1.0, lam=0.95, value_lambda=1.0, truncation="terminal"):
    assign_credit(sample, gamma=gamma, lam=lam, value_lambda=value_lambda, truncation=truncation)
    return sample


def test_the_reward_is_on_the_last_action_token_whatever_follows():
    """The end token carries it, whether or not anything (an observation, padding) comes after."""
    assert token_rewards(make_sample([1, 1, 1, 0, 0], prompt=0 + 1)).tolist() == [0, 0, 0, 1, 0, 0]
    assert token_rewards(make_sample([1, 1, 1])).tolist() == [0, 0, 0, 1]
    padded = credit(make_sample([1, 1, 1, 0, 0], values=[0.1, 0.2, 0.3, 5, 5]))
    full = credit(make_sample([1, 1, 1], values=[0.1, 0.2, 0.3]))
    assert padded.advantages[:4].tobytes() == full.advantages.tobytes()


def test_a_prompt_heavy_branch_is_credited_like_a_short_one():
    long = credit(make_sample([1, 1], values=[0.1, 0.2], prompt=256))
    short = credit(make_sample([1, 1], values=[0.1, 0.2]))
    assert long.advantages[-2:].tobytes() == short.advantages[-2:].tobytes()
    assert not long.advantages[:-2].any()


def test_step_rewards_add_to_the_outcome():
    sample = make_sample([1, 0, 1], reward=2.0, step_rewards=[0.5, 0, 0.25])
    assert token_rewards(sample).tolist() == [0, 0.5, 0, 2.25]
    assert sample.branch.step_rewards is not None
    assert sample.branch.step_rewards.tolist() == [0, 0.5, 0, 0.25]


def test_a_step_reward_on_an_observation_is_refused():
    with pytest.raises(ValueError, match="trace t0: step_rewards"):
        token_rewards(make_sample([1, 0, 1], step_rewards=[0, 1.0, 0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_reward_is_refused_with_its_trace(bad):
    with pytest.raises(NonFiniteError, match="trace t0: reward"):
        credit(make_sample([1], reward=bad, values=[0.0]))


@pytest.mark.parametrize(
    ("stop_reason", "truncation", "expected"),
    [
        (StopReason.TERMINATED, "terminal", 0.0),
        (StopReason.TERMINATED, "bootstrap", 0.0),
        (StopReason.ABORTED, "bootstrap", 0.0),
        (StopReason.TRUNCATED_LENGTH, "terminal", 0.0),
        (StopReason.TRUNCATED_TURNS, "terminal", 0.0),
        (StopReason.TRUNCATED_LENGTH, "bootstrap", 0.5),
        (StopReason.TRUNCATED_TURNS, "bootstrap", 0.5),
    ],
)
def test_only_a_cut_trace_bootstraps_and_only_where_configured(stop_reason, truncation, expected):
    sample = make_sample([1], stop_reason=stop_reason, bootstrap_value=0.5)
    assert bootstrap_value(sample, truncation) == expected
    assert credit(make_sample([1], values=[0.0], stop_reason=stop_reason), truncation=truncation).bootstrapped == (
        expected > 0
    )


def test_a_sample_that_is_credited_again_forgets_an_earlier_bootstrap():
    sample = make_sample([1], values=[0.0], stop_reason=StopReason.TRUNCATED_TURNS)
    assert credit(sample, truncation="bootstrap").bootstrapped
    assert not credit(sample, truncation="terminal").bootstrapped


def test_a_cut_trace_is_worth_its_reward_or_the_critic_s_word():
    kwargs = {"reward": 0.0, "values": [0.2, 0.3, 0.4], "bootstrap_value": 0.5}
    cut = make_sample([1, 1, 1], stop_reason=StopReason.TRUNCATED_LENGTH, **kwargs)
    credit(cut, lam=1.0)
    np.testing.assert_allclose(cut.advantages, [0, -0.2, -0.3, -0.4], atol=1e-15)
    credit(cut, lam=1.0, truncation="bootstrap")
    np.testing.assert_allclose(cut.advantages, [0, 0.3, 0.2, 0.1], atol=1e-15)
    np.testing.assert_array_equal(cut.returns, [0, 0.5, 0.5, 0.5])


def test_the_policy_lambda_does_not_move_the_targets():
    first = credit(make_sample(GAP_MASK, values=GAP_VALUES), lam=0.2)
    second = credit(make_sample(GAP_MASK, values=GAP_VALUES), lam=0.9)
    assert first.returns.tobytes() == second.returns.tobytes()
    assert first.advantages.tobytes() != second.advantages.tobytes()


def test_the_value_lambda_does_not_move_the_advantages():
    first = credit(make_sample(GAP_MASK, values=GAP_VALUES), value_lambda=0.95)
    second = credit(make_sample(GAP_MASK, values=GAP_VALUES), value_lambda=0.5)
    assert first.advantages.tobytes() == second.advantages.tobytes()
    np.testing.assert_allclose(first.returns, [0, 0.8913875, 0.91725, 0, 0, 0.955, 1], atol=1e-12)
    np.testing.assert_allclose(second.returns[-2:], [0.5 * 0.1 + 0.5, 1.0], atol=1e-12)


def test_a_branch_without_action_tokens_gets_zeros():
    sample = credit(make_sample([0, 0], values=[1.0, 2.0], bootstrap_value=3.0))
    assert sample.advantages.tolist() == [0, 0, 0]
    assert sample.returns.tolist() == [0, 0, 0]


def test_an_unscored_sample_is_refused_with_its_trace():
    with pytest.raises(ContractError, match="trace t0: values"):
        credit(make_sample([1]))


def test_a_non_finite_value_is_refused_with_its_trace():
    with pytest.raises(NonFiniteError, match="trace t0: values"):
        credit(make_sample([1], values=[math.nan]))
    cut = make_sample([1], values=[0.0], stop_reason=StopReason.TRUNCATED_TURNS, bootstrap_value=math.inf)
    with pytest.raises(NonFiniteError, match="trace t0: values"):
        credit(cut, truncation="bootstrap")


def test_credit_leaves_everything_but_advantages_and_returns():
    sample = make_sample(GAP_MASK, values=GAP_VALUES)
    kept = [sample.values, sample.branch.action_mask, sample.branch.loss_mask, sample.branch.logprobs]
    before = [array.tobytes() for array in kept]
    credit(sample)
    assert before == [array.tobytes() for array in kept]
    assert sample.policy_loss_mask is None


@pytest.mark.parametrize("value_lambda", [1.0, 0.5])
def test_a_batch_is_credited_as_each_sample_alone(value_lambda):
    """To the bit, in one array whose rows no two samples share."""
    samples = [make_sample([1] * n + [0, 1], values=np.linspace(-1, 1, n + 2), trace_id=f"t{n}") for n in (3, 1, 70)]
    metrics = assign_gae(samples, PpoConfig(type="ppo", gamma=0.9, lam=0.5, value_lambda=value_lambda), lambda _: 0.5)
    assert metrics["credit/lambda_mean"] == 0.5
    for sample in samples:
        values, mask = sample.values, sample.branch.action_mask
        advantages, _ = skip_observation_gae(values, mask, token_rewards(sample), gamma=0.9, lam=0.5)
        _, returns = skip_observation_gae(values, mask, token_rewards(sample), gamma=0.9, lam=value_lambda)
        assert sample.advantages.tobytes() == advantages.tobytes() and sample.returns.tobytes() == returns.tobytes()
    assert assign_gae([], PpoConfig(type="ppo"), lambda _: 0.5) == {}


def test_metrics_count_tokens_and_samples():
    samples = [
        credit(make_sample([1, 1], values=[0.5, 0.5])),
        credit(make_sample([1, 0], values=[0, 0], reward=-1.0, stop_reason=StopReason.TRUNCATED_TURNS)),
        credit(make_sample([0], values=[0])),
    ]
    metrics = credit_metrics(samples)
    assert metrics["credit/action_tokens"] == 3
    assert metrics["credit/empty_samples"] == 1
    assert metrics["credit/truncated_samples"] == 1
    assert metrics["credit/return_mean"] == pytest.approx(1 / 3)
    flat = [0.5 * 0.95, 0.5, -1.0]
    assert metrics["credit/advantage_mean"] == pytest.approx(sum(flat) / 3)
    assert metrics["credit/advantage_abs_mean"] == pytest.approx(sum(map(abs, flat)) / 3)


def test_the_sizes_of_advantages_of_failed_and_successful_traces_are_compared_by_token():
    """By hand: failed tokens |-.5|, |-.5|, |-.2| make .4 in the mean, successful ones .1 and .3 make .2: ratio 2."""

    def samples(*rewards):
        numbers = [[-0.5, -0.5], [-0.2], [0.1, 0.3]]
        out = [make_sample([1] * len(a), values=[0] * len(a), reward=r) for a, r in zip(numbers, rewards, strict=True)]
        for sample, advantages in zip(out, numbers, strict=True):
            sample.advantages = np.array([9.0, *advantages])  # the prompt token is not sampled
        return out

    ratio = "credit/advantage_abs_ratio"
    assert credit_metrics(samples(0.0, 0.0, 1.0))[ratio] == pytest.approx(2.0)
    assert credit_metrics(samples(-1.0, 0.9, 3.0))[ratio] == pytest.approx(2.0), "the middle is 1"
    assert ratio not in credit_metrics(samples(1.0, 1.0, 1.0)), "nothing failed"
    flat = samples(0.0, 0.0, 1.0)
    flat[2].advantages = np.zeros(3)
    assert ratio not in credit_metrics(flat)
    flat[2].branch.action_mask[:] = False
    assert ratio not in credit_metrics(flat), "the only success has no token"


def test_metrics_of_an_empty_batch_have_no_means():
    assert credit_metrics([]) == {
        "credit/action_tokens": 0,
        "credit/empty_samples": 0,
        "credit/truncated_samples": 0,
    }
