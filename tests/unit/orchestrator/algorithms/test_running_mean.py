"""The running mean: what a reward is compared with, and what is remembered of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms import build
from services.config.algorithm import RunningMeanConfig
from tests.samples import make_sample


def running_mean(**kwargs):
    return build(RunningMeanConfig(type="running_mean", **kwargs))


def trace(reward, prompt_id="p", trace_id="t"):
    sample = make_sample([1, 1], reward=reward, trace_id=trace_id, group_id=trace_id)
    sample.prompt_id = prompt_id
    return sample


def advantage_of(algorithm, reward, prompt_id="p"):
    sample = trace(reward, prompt_id)
    algorithm.credit([[sample]])
    assert sample.returns is None
    return float(sample.advantages[1])


def test_the_baseline_is_of_the_rewards_before_this_one():
    algorithm = running_mean(prior=0.25)
    assert [advantage_of(algorithm, reward) for reward in (1.0, 0.0, 1.0)] == [0.75, -1.0, 0.5]


def test_the_first_reward_of_all_is_only_recorded():
    algorithm = running_mean()
    sample = trace(1.0)
    metrics = algorithm.credit([[sample]])
    assert not sample.advantages.any()
    assert metrics["credit/unknown_baselines"] == 1.0 and "credit/baseline_mean" not in metrics
    assert advantage_of(algorithm, 0.0) == -1.0


def test_a_new_prompt_is_compared_with_everybody():
    algorithm = running_mean()
    for reward in (1.0, 0.0, 0.0, 0.0):
        advantage_of(algorithm, reward, "old")
    assert advantage_of(algorithm, 1.0, "new") == 0.75
    assert advantage_of(algorithm, 1.0, "new") == 0.0, "then with itself"


def test_a_prompt_is_compared_with_its_last_eight():
    algorithm = running_mean(prior=0.0)
    for reward in [1.0] * 4 + [0.0] * 8:
        advantage_of(algorithm, reward)
    assert advantage_of(algorithm, 1.0) == 1.0, "the four ones are forgotten"


def test_the_global_scope_forgets_after_128():
    algorithm = running_mean(scope="global", prior=0.0)
    for index in range(1 + 128):
        advantage_of(algorithm, float(index == 0), str(index))
    assert advantage_of(algorithm, 1.0, "any") == 1.0
    assert advantage_of(algorithm, 1.0, "any") == 1 - 1 / 128


def test_traces_of_a_group_follow_one_another():
    algorithm = running_mean(prior=0.0)
    samples = [trace(1.0, trace_id="a"), trace(1.0, trace_id="b"), trace(0.0, trace_id="c")]
    algorithm.credit([samples])
    assert [float(sample.advantages[1]) for sample in samples] == [1.0, 0.0, -1.0]


def test_a_branched_trace_is_remembered_once():
    algorithm = running_mean(prior=0.0)
    algorithm.credit([[trace(1.0, trace_id="a"), trace(1.0, trace_id="a"), trace(1.0, trace_id="a")]])
    algorithm.credit([[trace(0.0, trace_id="b")]])
    assert algorithm.state_dict()["prompts"] == {"p": [1.0, 0.0]}


def test_without_a_name_the_group_stands_for_the_prompt():
    algorithm = running_mean(prior=0.0)
    algorithm.credit([[make_sample([1], reward=1.0, group_id="g7")]])
    assert algorithm.state_dict()["prompts"] == {"g7": [1.0]}


def test_windows_of_another_size_keep_the_latest():
    algorithm = running_mean(prompt_window=2)
    algorithm.load_state_dict({"global": [1, 0], "prompts": {"p": [1, 1, 0, 0]}})
    assert algorithm.baseline("p") == 0.0


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match="global and prompts, not trackers"):
        running_mean().load_state_dict({"trackers": {}})


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5)), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from(["prompt", "global"]),
    st.integers(1, 4),
)
def test_a_restored_run_continues_with_the_same_numbers(rewards, cut, scope, window):
    """Scenario: the state goes through JSON somewhere in the stream. Also: the baseline is the mean of a slice."""
    kwargs = {"scope": scope, "prompt_window": window, "global_window": 5, "prior": 0.5}
    whole, first, second = (running_mean(**kwargs) for _ in range(3))
    history: list[tuple[str, float]] = []
    for index, (prompt_id, reward) in enumerate(rewards):
        if index == min(cut, len(rewards) - 1):
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            first = second
        own = [r for p, r in history if p == prompt_id][-window:] if scope == "prompt" else []
        seen = own or [r for _, r in history][-5:] or [0.5]
        expected = reward - float(np.mean(seen))
        assert advantage_of(whole, reward, prompt_id) == advantage_of(first, reward, prompt_id)
        assert float(np.mean(seen)) + expected == pytest.approx(reward)
        history.append((prompt_id, reward))
    assert whole.state_dict() == first.state_dict()
