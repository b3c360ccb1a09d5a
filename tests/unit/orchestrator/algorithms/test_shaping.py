"""Reward shaping: its numbers by hand, what it never does, and the range that the resolver is told."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms import build
from orchestrator.algorithms.shaping import overlong_ramp, shape, shaped_reward
from orchestrator.producer import samples_of
from services.config.algorithm import GrpoConfig
from services.config.orchestrator import RewardConfig
from services.wire.samples import Trace
from tests.rollouts import make_trace

DAPO = {"overlong_limit_tokens": 20480, "overlong_buffer_tokens": 4096}


def config(**keys: Any) -> RewardConfig:
    return RewardConfig.model_validate(keys)


# ---- numbers by hand


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (16384, 0), (16385, 1 / 4096), (18432, 0.5), (20479, 4095 / 4096), (20480, 1), (20481, 1), (10**6, 1)],
)
def test_the_ramp_is_dapos_equation_13(num_tokens: int, expected: float) -> None:
    """R_length = 0, ((L_max - L_cache) - |y|) / L_cache, -1 with L_max = 20480 and L_cache = 4096."""
    assert overlong_ramp(num_tokens, 20480, 4096) == pytest.approx(expected, abs=1e-15)
    if 16384 < num_tokens <= 20480:
        assert -overlong_ramp(num_tokens, 20480, 4096) == ((20480 - 4096) - num_tokens) / 4096


@pytest.mark.parametrize(
    ("keys", "reward", "num_tokens", "expected"),
    [
        ({}, 0.25, 1000, 0.25),
        ({"scale": 2.0, "offset": -1.0}, 1.0, 5, 1.0),
        ({"scale": 2.0, "offset": -1.0}, 0.0, 5, -1.0),
        ({"scale": 4.0, "clip": [-1.0, 3.0]}, 1.0, 5, 3.0),
        (DAPO, 1.0, 18432, 0.5),
        (DAPO, -1.0, 30000, -2.0),
        (DAPO | {"overlong_penalty": 0.5}, 1.0, 20480, 0.5),
        ({"length_penalty": 0.01, "length_free_tokens": 100}, 1.0, 100, 1.0),
        ({"length_penalty": 0.01, "length_free_tokens": 100}, 1.0, 130, 0.7),
        # 2 * 0.5 + 0.25 - 0.5 * 1 - 0.01 * 20480, and 2 * 0.5 + 0.25 - 1 - 0.01 * (20480 - 20400)
        (DAPO | {"scale": 2, "offset": 0.25, "overlong_penalty": 0.5, "length_penalty": 0.01}, 0.5, 20480, -204.05),
        (DAPO | {"scale": 2, "offset": 0.25, "length_penalty": 0.01, "length_free_tokens": 20400}, 0.5, 20480, -0.55),
        (DAPO | {"clip": [0, 1]}, 0.25, 20480, 0.0),
    ],
)
def test_each_term_by_hand(keys: dict[str, Any], reward: float, num_tokens: int, expected: float) -> None:
    assert shaped_reward(reward, num_tokens, config(**keys)) == pytest.approx(expected, abs=1e-12)


# ---- what it never does


def fingerprint(*things: Any) -> str:
    return hashlib.sha256(pickle.dumps(things)).hexdigest()


def with_steps(trace: Trace) -> Trace:
    for branch in trace.branches:
        branch.step_rewards = np.where(branch.action_mask, 0.25, 0.0)
    return trace


@st.composite
def reward_configs(draw: st.DrawFn) -> RewardConfig:
    limit = draw(st.integers(1, 60))
    keys: dict[str, Any] = {
        "scale": draw(st.floats(0.01, 10)),
        "offset": draw(st.floats(-5, 5)),
        "overlong_penalty": draw(st.floats(0, 3)),
        "length_penalty": draw(st.floats(0, 0.5)),
        "length_free_tokens": draw(st.integers(0, 60)),
    }
    if draw(st.booleans()):
        keys |= {"overlong_limit_tokens": limit, "overlong_buffer_tokens": draw(st.integers(1, limit))}
    if draw(st.booleans()):
        low = draw(st.floats(-3, 3))
        keys["clip"] = [low, low + draw(st.floats(0.1, 3))]
    return config(**keys)


@settings(deadline=None, max_examples=100)
@given(reward=st.floats(-2, 2), num_tokens=st.integers(1, 30), shaping=reward_configs(), steps=st.booleans())
def test_nothing_that_goes_in_is_changed(reward: float, num_tokens: int, shaping: RewardConfig, steps: bool) -> None:
    trace = make_trace(reward=reward, tokens_per_version=num_tokens)
    if steps:
        with_steps(trace)
    samples = samples_of(trace)
    before = fingerprint(trace, samples, shaping)
    shaped = shape(samples, trace, shaping)
    assert fingerprint(trace, samples, shaping) == before
    assert [sample.reward for sample in shaped] == [shaped_reward(reward, num_tokens, shaping)]
    assert trace.reward == samples[0].reward == reward
    shaped[0].reward = 99.0
    if shaped[0].branch.step_rewards is not None and shaping.scale != 1.0:
        shaped[0].branch.step_rewards[:] = 99.0
    assert fingerprint(trace, samples, shaping) == before


@given(
    rewards=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    lengths=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    shaping=reward_configs(),
)
def test_it_never_falls_with_the_reward_and_never_rises_with_the_length(
    rewards: tuple[float, float], lengths: tuple[int, int], shaping: RewardConfig
) -> None:
    (worse, better), (shorter, longer) = sorted(rewards), sorted(lengths)
    assert shaped_reward(worse, shorter, shaping) <= shaped_reward(better, shorter, shaping)
    assert shaped_reward(worse, longer, shaping) <= shaped_reward(worse, shorter, shaping)


@given(
    share=st.floats(0, 1),
    bounds=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    max_tokens=st.integers(1, 80),
    num_tokens=st.integers(1, 80),
    shaping=reward_configs(),
)
def test_every_shaped_reward_lies_in_the_range_that_the_resolver_checks(
    share: float, bounds: tuple[float, float], max_tokens: int, num_tokens: int, shaping: RewardConfig
) -> None:
    low, high = sorted(bounds)
    least, most = shaping.range_of(low, high, max_tokens)
    shaped = shaped_reward(low + share * (high - low), min(num_tokens, max_tokens), shaping)
    assert least - 1e-9 <= shaped <= most + 1e-9
    limit = shaping.overlong_limit_tokens
    if limit is None or limit <= max_tokens:
        assert shaped_reward(low, max_tokens, shaping) == pytest.approx(least, abs=1e-9), "the bound is attained"


# ---- turns, branches, filters


def test_rewards_of_turns_are_scaled_and_get_no_offset_no_penalty_and_no_clip() -> None:
    trace = with_steps(make_trace(reward=1.0, tokens_per_version=3))
    (sample,) = shape(samples_of(trace), trace, config(scale=2.0, offset=-1.0, clip=[0.0, 0.25], length_penalty=0.1))
    assert sample.reward == 0.25
    assert sample.branch.step_rewards is not None and sample.branch.step_rewards.tolist() == [0, 0, 0.5, 0.5, 0.5]


def test_without_settings_the_sample_is_as_it_was() -> None:
    trace = with_steps(make_trace(reward=1 / 3))
    (before,), (after,) = samples_of(trace), shape(samples_of(trace), trace, config())
    assert after.reward == 1 / 3 and after.branch is before.branch
    assert after.prompt_id == before.prompt_id and after.trace_id == before.trace_id


def test_a_token_that_branches_share_counts_once() -> None:
    """Two branches of 4 sampled tokens, 2 of them shared: the second copy of those does not train."""
    trace = make_trace(tokens_per_version=4)
    trace.branches.append(make_trace(tokens_per_version=4).branches[0])
    trace.branches[1].loss_mask[2:4] = False
    samples = shape(samples_of(trace), trace, config(length_penalty=0.1))
    assert [sample.reward for sample in samples] == [pytest.approx(1.0 - 0.6)] * 2


def test_the_filter_of_equal_rewards_sees_shaped_ones() -> None:
    """Two wrong answers, one of them overlong: equal before shaping, and something to learn from after it."""
    traces = [make_trace(reward=0.0, tokens_per_version=n, trace_id=f"0/{i}") for i, n in enumerate((2, 8))]
    algorithm = build(GrpoConfig(type="grpo", filter_equal_rewards=True))
    for keys, filtered in (({}, 1.0), ({"overlong_limit_tokens": 8, "overlong_buffer_tokens": 4}, 0.0)):
        group = [sample for trace in traces for sample in shape(samples_of(trace), trace, config(**keys))]
        assert algorithm.credit([group])["credit/filtered_groups"] == filtered
