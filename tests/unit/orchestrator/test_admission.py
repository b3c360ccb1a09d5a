"""Admission: what is invalid is dropped by cause, what is stale is dropped apart, and too much of it stops the run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from orchestrator.admission import MIN_OUTCOMES, Outcomes, cause_of_invalid
from orchestrator.loop import drop_stale
from orchestrator.producer import Group, samples_of
from services.config.schema import Config
from services.wire.errors import BadData
from services.wire.samples import StopReason, Trace, VersionSpan
from tests.rollouts import make_trace

# ---- validity


def test_a_valid_trace_has_no_cause() -> None:
    assert cause_of_invalid(make_trace(), max_tokens=4) is None
    assert cause_of_invalid(make_trace(reward=0.0, stop_reason=StopReason.TRUNCATED_TURNS), max_tokens=4) is None


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), None, "1"])
def test_a_reward_that_is_no_finite_number_is_a_cause(reward: Any) -> None:
    assert cause_of_invalid(make_trace(reward=reward), max_tokens=10) == "nonfinite_reward"


@pytest.mark.parametrize("logprob", [float("nan"), -float("inf")])
def test_a_log_probability_that_is_not_finite_is_a_cause_and_never_becomes_zero(logprob: float) -> None:
    trace = make_trace()
    trace.branches[0].logprobs[-1] = logprob
    assert cause_of_invalid(trace, max_tokens=10) == "missing_logprob"


def test_a_log_probability_off_the_mask_is_nobodys_concern() -> None:
    trace = make_trace()
    trace.branches[0].logprobs[0] = np.nan
    assert cause_of_invalid(trace, max_tokens=10) is None


def test_an_infinite_step_reward_is_a_cause() -> None:
    trace = make_trace()
    trace.branches[0].step_rewards = np.array([0, 0, np.inf, 0])
    assert cause_of_invalid(trace, max_tokens=10) == "nonfinite_reward"


def test_a_branch_longer_than_the_trainers_take_is_a_cause() -> None:
    assert cause_of_invalid(make_trace(), max_tokens=3) == "over_long"


def test_an_aborted_trace_is_never_trained_on() -> None:
    assert cause_of_invalid(make_trace(stop_reason=StopReason.ABORTED), max_tokens=10) == "aborted"


def test_a_trace_without_an_action_is_a_cause() -> None:
    trace = make_trace(versions=())
    assert cause_of_invalid(trace, max_tokens=10) == "no_action"


@pytest.mark.parametrize("breakage", ["spans", "first_token", "lengths"])
def test_a_branch_that_breaks_the_wire_contract_is_a_cause(breakage: str) -> None:
    trace = make_trace(num_prompt=0 if breakage == "first_token" else 2)
    (branch,) = trace.branches
    if breakage == "spans":
        branch.version_spans = [VersionSpan(2, 3, 0)]
    if breakage == "lengths":
        branch.loss_mask = branch.loss_mask[:-1]
    assert cause_of_invalid(trace, max_tokens=10) == "contract"


def test_a_branch_without_actions_makes_no_sample() -> None:
    trace = make_trace()
    silent = make_trace(versions=()).branches[0]
    trace.branches.append(silent)
    assert [sample.branch for sample in samples_of(trace)] == [trace.branches[0]]


# ---- how much of it is too much


def outcomes_after(pattern: str, **limits: Any) -> Outcomes:
    """`g` good, `e` an environment's error, `n` a NaN."""
    outcomes = Outcomes(**({"max_bad_fraction": 0.5, "window": 200} | limits))
    for number, letter in enumerate(pattern):
        if letter == "g":
            outcomes.good()
        else:
            outcomes.bad({"e": "env_error", "n": "nonfinite_reward"}[letter], f"task {number}")
    return outcomes


def test_drops_are_counted_by_cause_and_counted_once() -> None:
    outcomes = outcomes_after("geng" * 3)
    outcomes.drop("stale", 2)
    assert outcomes.take_counts() == {"env_error": 3, "nonfinite_reward": 3, "stale": 2}
    assert outcomes.take_counts() == {}


def test_the_run_stops_when_more_than_the_allowed_share_is_bad_and_says_why() -> None:
    with pytest.raises(BadData) as caught:
        outcomes_after("ge" * (MIN_OUTCOMES // 2) + "n")
    assert str(caught.value) == (
        "52% of the last 21 rollouts were invalid (10 env_error, 1 nonfinite_reward); "
        "orchestrator.max_bad_fraction is 50%; for example task 19"
    )
    assert caught.value.exit_code == 70


def test_exactly_the_allowed_share_goes_on() -> None:
    outcomes_after("ge" * 100)


def test_a_bad_start_alone_stops_nothing() -> None:
    outcomes_after("e" * (MIN_OUTCOMES - 1))
    with pytest.raises(BadData, match="100%"):
        outcomes_after("e" * MIN_OUTCOMES)


def test_bad_rollouts_that_end_first_do_not_outvote_the_good_ones_still_running() -> None:
    """128 run at a time, a fifth is bad and ends at once, each is replaced: 32 bad before the first good one ends."""
    outcomes = outcomes_after("e" * 32, num_concurrent=128)
    for _ in range(96):
        outcomes.good()
    outcomes.bad("env_error", "task")
    with pytest.raises(BadData, match="last 128"):
        outcomes_after("e" * 128, num_concurrent=128)


def test_a_window_smaller_than_the_usual_minimum_still_counts() -> None:
    with pytest.raises(BadData, match="last 4"):
        outcomes_after("geee", window=4)


def test_only_the_last_window_counts() -> None:
    outcomes_after("e" * 15 + "g" * 40 + "e" * 10, window=20)
    with pytest.raises(BadData):
        outcomes_after("g" * 100 + "e" * 11, window=20)


def test_no_bad_rollout_is_allowed_at_share_zero() -> None:
    with pytest.raises(BadData, match=r"1 env_error.*for example task 30"):
        outcomes_after("g" * 30 + "e", max_bad_fraction=0.0)


def test_at_share_one_only_a_fruitless_wait_is_the_end() -> None:
    outcomes = outcomes_after("en" * 200 + "e", max_bad_fraction=1.0)
    outcomes.drop("group_too_small", 3)
    with pytest.raises(BadData) as caught:
        outcomes.fruitless(404, 720.0)
    assert str(caught.value) == (
        "no valid group among the last 404 rollouts, in 720 s or more (dropped: 201 env_error, 200 nonfinite_reward, "
        "3 group_too_small); for example task 400"
    )


def test_a_later_start_counts_on_and_judges_by_the_same_window() -> None:
    first = outcomes_after("g" * 10 + "e" * 9, window=20)
    state = json.loads(json.dumps(first.state_dict()))
    again = Outcomes(max_bad_fraction=0.5, window=20)
    again.load_state_dict(state)
    assert again.dropped == first.dropped
    again.bad("env_error", "x")  # ten of twenty: exactly the allowed share
    with pytest.raises(BadData):
        again.bad("env_error", "x")


def test_stale_traces_never_count_as_bad() -> None:
    outcomes = outcomes_after("g")
    outcomes.drop("stale", 1000)
    outcomes.good()


# ---- staleness


def config_of(algorithm: str, **orchestrator: int) -> Config:
    value = {} if algorithm == "grpo" else {"value": {}}
    return Config.model_validate(
        {
            "model": {"path": "tiny:add"},
            "algorithm": {"type": algorithm},
            "env": [{"type": "add"}],
            "orchestrator": orchestrator,
        }
        | value
    )


def group_of(*versions: tuple[int, ...]) -> Group:
    traces: list[Trace] = [make_trace(versions=own, trace_id=f"0/{i}") for i, own in enumerate(versions)]
    return Group(traces, [sample for trace in traces for sample in samples_of(trace)])


def test_staleness_is_that_of_the_oldest_action_token() -> None:
    outcomes = outcomes_after("")
    config = config_of("sao", max_off_policy_steps=1)
    assert drop_stale(group_of((3, 4)), 4, config, outcomes) is not None
    assert drop_stale(group_of((3, 4, 5)), 5, config, outcomes) is None
    assert outcomes.take_counts() == {"stale": 1}


def test_stale_traces_leave_the_rest_of_their_group_with_its_samples_in_order() -> None:
    outcomes = outcomes_after("")
    fresh = drop_stale(group_of((5,), (2,), (4, 5), (5,)), 5, config_of("ppo", max_off_policy_steps=1), outcomes)
    assert fresh is not None
    assert [trace.trace_id for trace in fresh.traces] == ["0/0", "0/2", "0/3"]
    assert [sample.trace_id for sample in fresh.samples] == ["0/0", "0/2", "0/3"]
    assert outcomes.take_counts() == {"stale": 1}


def test_a_grpo_group_left_with_fewer_than_two_is_dropped_and_counted() -> None:
    outcomes = outcomes_after("")
    config = config_of("grpo", max_off_policy_steps=0, group_size=3, batch_size=3)
    assert drop_stale(group_of((5,), (4,), (4,)), 5, config, outcomes) is None
    assert outcomes.take_counts() == {"stale": 2, "group_too_small": 1}
    assert drop_stale(group_of((5,), (4,), (5,)), 5, config, outcomes) is not None
    assert drop_stale(group_of((4,), (4,), (4,)), 5, config, outcomes) is None
    assert outcomes.take_counts() == {"stale": 4}
