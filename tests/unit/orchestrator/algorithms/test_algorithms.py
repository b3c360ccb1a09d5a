"""SAO, PPO and GRPO as the loop calls them."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from orchestrator.algorithms import ALGORITHMS, build
from services.config.algorithm import AlgorithmFacts, GrpoConfig, PpoConfig, SaoConfig, VapoConfig
from services.config.validate import ALGORITHMS as CONFIGS
from services.wire.errors import ConfigError, ContractError, NonFiniteError
from services.wire.samples import StopReason
from tests.samples import make_sample

GAP_VALUES = [0.5, 0.4, 9.0, 9.0, 0.2, 0.1]
GAP_MASK = [1, 1, 0, 0, 1, 1]


def sao(**kwargs):
    return build(SaoConfig(type="sao", **kwargs))


def ppo(**kwargs):
    return build(PpoConfig(type="ppo", **kwargs))


def vapo(**kwargs):
    return build(VapoConfig(type="vapo", **kwargs))


def grpo(**kwargs):
    return build(GrpoConfig(type="grpo", **kwargs))


def single(reward, trace_id, group_id="g0", mask=(1, 1)):
    return make_sample(list(mask), reward=reward, trace_id=trace_id, group_id=group_id, values=[0.0] * len(mask))


def group(*rewards, group_id="g0"):
    return [single(reward, f"{group_id}-{i}", group_id) for i, reward in enumerate(rewards)]


def firsts(samples):
    return [float(sample.advantages[1]) for sample in samples]


# SAO ------------------------------------------------------------------------------------------------------------------


def test_sao_uses_lambda_by_action_tokens_and_monte_carlo_targets():
    sample = make_sample(GAP_MASK, values=GAP_VALUES)
    metrics = sao().credit([[sample]])
    np.testing.assert_allclose(sample.advantages, [0, 0.184722, 0.341667, 0, 0, 0.65, 0.9], atol=1e-6)
    assert sample.returns.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert metrics["credit/lambda_mean"] == pytest.approx(5 / 6)


def test_sao_bootstraps_a_cut_trace_where_configured():
    cut = make_sample(
        GAP_MASK, values=GAP_VALUES, reward=0.0, stop_reason=StopReason.TRUNCATED_TURNS, bootstrap_value=0.3
    )
    sao(truncation="bootstrap").credit([[cut]])
    np.testing.assert_allclose(cut.advantages, [0, -0.22037, -0.144444, 0, 0, 0.066667, 0.2], atol=1e-6)
    np.testing.assert_array_equal(cut.returns, [0, 0.3, 0.3, 0, 0, 0.3, 0.3])


def test_sao_lambda_differs_by_branch_and_is_reported():
    metrics = sao().credit([[single(1, "a", mask=(1,))], [single(1, "b", mask=(1, 1, 1, 1))]])
    assert metrics["credit/lambda_min"] == pytest.approx(1 / 3)
    assert metrics["credit/lambda_max"] == pytest.approx(5 / 6)


def test_sao_targets_do_not_move_with_alpha_or_whitening():
    targets = []
    for kwargs in ({"alpha": 1.5}, {"alpha": 0.05}, {"whiten": True}):
        sample = make_sample(GAP_MASK, values=GAP_VALUES)
        sao(**kwargs).credit([[sample, single(0, "b")]])
        targets.append(sample.returns.tobytes())
    assert len(set(targets)) == 1


def test_sao_credits_eight_traces_alike_however_they_are_grouped():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(8, 5))

    def batch():
        return [make_sample([1, 1, 0, 1, 1], values=values[i], reward=i % 2, trace_id=str(i)) for i in range(8)]

    one_group, eight_groups = batch(), batch()
    sao().credit([one_group])
    sao().credit([[sample] for sample in reversed(eight_groups)])
    for a, b in zip(one_group, eight_groups, strict=True):
        assert a.advantages.tobytes() == b.advantages.tobytes()


def test_sao_whitens_over_loss_tokens_only():
    """The prefix shared by two branches trains in the first only, so it counts once."""
    first = make_sample([1, 1], reward=1.0, values=[0, 0], trace_id="a")
    second = make_sample([1, 1], reward=0.0, values=[0, 0], trace_id="a", loss_mask=[0, 1])
    sao(whiten=True, alpha=1e9).credit([[first, second]])
    counted = np.concatenate([first.advantages[first.branch.loss_mask], second.advantages[second.branch.loss_mask]])
    assert counted.mean() == pytest.approx(0, abs=1e-12)
    assert counted.std(ddof=1) == pytest.approx(1)


def test_a_batch_without_action_tokens_is_credited_with_zeros():
    empty = make_sample([0, 0], values=[0, 0])
    for algorithm in (sao(whiten=True), ppo()):
        metrics = algorithm.credit([[empty]])
        assert not empty.advantages.any()
        assert metrics["credit/action_tokens"] == 0
        assert "credit/lambda_mean" not in metrics
    assert sao().credit([])["credit/action_tokens"] == 0


@pytest.mark.parametrize("algorithm", [sao(), ppo()])
def test_an_unscored_sample_is_refused(algorithm):
    with pytest.raises(ContractError, match="values"):
        algorithm.credit([[make_sample([1])]])


@pytest.mark.parametrize("algorithm", [sao(), ppo(), grpo()])
def test_a_nan_reward_is_refused(algorithm):
    with pytest.raises(NonFiniteError, match="reward"):
        algorithm.credit([group(1.0, math.nan)])


# PPO ------------------------------------------------------------------------------------------------------------------


def test_ppo_uses_one_lambda():
    sample = make_sample(GAP_MASK, values=GAP_VALUES)
    metrics = ppo(lam=0.95, whiten=False).credit([[sample]])
    np.testing.assert_allclose(sample.advantages, [0, 0.3913875, 0.51725, 0, 0, 0.755, 0.9], atol=1e-12)
    assert sample.returns.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert metrics["credit/lambda_mean"] == 0.95


def test_ppo_whitens_the_advantages_and_not_the_targets():
    samples = group(1.0, 0.0)
    ppo().credit([samples])
    flat = np.concatenate([sample.advantages[1:] for sample in samples])
    assert flat.mean() == pytest.approx(0, abs=1e-12)
    assert flat.std(ddof=1) == pytest.approx(1)
    assert samples[0].returns.tolist() == [0, 1, 1]
    assert samples[1].returns.tolist() == [0, 0, 0]


def test_ppo_takes_groups_of_one():
    samples = [[single(1.0, "a", "g0")], [single(0.0, "b", "g1")]]
    ppo().credit(samples)
    assert samples[0][0].advantages[1] > 0 > samples[1][0].advantages[1]


# VAPO -----------------------------------------------------------------------------------------------------------------


def test_vapo_is_sao_s_credit_with_its_own_alpha_for_the_clipped_ratio():
    ours, theirs = make_sample(GAP_MASK, values=GAP_VALUES), make_sample(GAP_MASK, values=GAP_VALUES)
    vapo(alpha=1.5, whiten=False).credit([[ours]])
    sao().credit([[theirs]])
    assert ours.advantages.tobytes() == theirs.advantages.tobytes()
    assert ours.returns.tobytes() == theirs.returns.tobytes()
    config = VapoConfig(type="vapo")
    assert (config.policy_loss, config.alpha, config.value_lambda) == ("ppo_clip", 0.05, 1.0)
    assert config.loss_constants() == {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 0.0}


def test_vapo_s_short_answers_are_one_step_looks_ahead():
    """1/alpha = 20 action tokens and fewer: lambda is clamped at 0."""
    metrics = vapo().credit([[make_sample([1] * 20, values=[0.5] * 20)]])
    assert metrics["credit/lambda_max"] == 0.0
    assert vapo().credit([[make_sample([1] * 40, values=[0.5] * 40)]])["credit/lambda_max"] == pytest.approx(0.5)


# GRPO -----------------------------------------------------------------------------------------------------------------


def test_grpo_divides_by_the_population_deviation_of_each_group():
    narrow, wide = group(0.0, 1.0), group(0.0, 10.0, group_id="g1")
    grpo().credit([narrow, wide])
    assert firsts(narrow) == [-1.0, 1.0]
    assert firsts(wide) == [-1.0, 1.0]


def test_grpo_without_division_keeps_the_differences():
    narrow, wide = group(0.0, 1.0), group(0.0, 10.0, group_id="g1")
    grpo(std_normalize=False).credit([narrow, wide])
    assert firsts(narrow) == [-0.5, 0.5]
    assert firsts(wide) == [-5.0, 5.0]


@pytest.mark.parametrize("level", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("std_normalize", [True, False])
def test_grpo_gives_a_group_of_equal_rewards_zeros(level, std_normalize):
    samples = group(level, level, level)
    metrics = grpo(std_normalize=std_normalize).credit([samples])
    assert firsts(samples) == [0.0, 0.0, 0.0]
    assert metrics["credit/flat_groups"] == 1


def test_grpo_gives_one_advantage_to_all_action_tokens_and_nothing_elsewhere():
    sample = make_sample([1, 0, 1], reward=1.0, trace_id="a")
    grpo().credit([[sample, single(0.0, "b")]])
    assert sample.advantages.tolist() == [0, 1, 0, 1]
    assert sample.returns is None


@pytest.mark.parametrize("lonely", [[], [single(1.0, "a")], [single(1.0, "a"), single(0.0, "a")]])
def test_grpo_refuses_a_group_of_fewer_than_two_traces(lonely):
    """Two branches of one trace are still one trace."""
    with pytest.raises(ValueError, match="at least 2"):
        grpo().credit([lonely])


def test_grpo_baseline_counts_a_trace_once_however_it_branches():
    branched = [single(1.0, "a"), single(1.0, "a"), single(1.0, "a"), single(0.0, "b")]
    grpo(std_normalize=False).credit([branched])
    assert firsts(branched) == [0.5, 0.5, 0.5, -0.5]


def test_grpo_scores_step_rewards_too():
    stepped = make_sample([1, 1], reward=0.0, step_rewards=[1.0, 0.0], trace_id="a")
    other = single(0.0, "b")
    grpo(std_normalize=False).credit([[stepped, other]])
    assert firsts([stepped, other]) == [0.5, -0.5]


def test_grpo_s_loss_is_a_setting():
    clipped, masked = GrpoConfig(type="grpo"), GrpoConfig(type="grpo", loss="dis")
    assert (clipped.policy_loss, masked.policy_loss) == ("ppo_clip", "dis")
    assert clipped.loss_constants() == {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 0.0}
    assert masked.loss_constants() == {"eps_low": 0.3, "eps_high": 5.0}
    coding = GrpoConfig(type="grpo", loss="dis", eps_low=0.8, eps_high=3.0)
    assert coding.loss_constants() == {"eps_low": 0.8, "eps_high": 3.0}


def test_grpo_refuses_to_bootstrap():
    with pytest.raises(ConfigError, match="truncation"):
        grpo(truncation="bootstrap")


# registry -------------------------------------------------------------------------------------------------------------


def test_the_registry_names_every_configured_algorithm():
    assert set(ALGORITHMS) == set(CONFIGS)
    for name, config in CONFIGS.items():
        assert type(build(config(type=name))) is ALGORITHMS[name]


def test_an_unknown_algorithm_is_refused_with_the_choices():
    class Other(AlgorithmFacts):
        type: str = "other"

    with pytest.raises(ConfigError, match="'other'; known: evpo, grpo, ppo"):
        build(Other())


def test_credit_assignment_never_imports_torch():
    code = "import sys, orchestrator.algorithms; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
