"""Prefix replay: where a trace may be cut, and that the prefix is prompt and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms import build
from orchestrator.prefix_replay import check_prefix, cut_at, cut_by_entropy, suffix_only, turn_boundaries
from services.config.algorithm import SaoConfig
from services.wire.errors import ContractError
from services.wire.samples import TrainingSample, VersionSpan, validate_branch
from tests.samples import make_sample

THREE_TURNS = [1, 1, 0, 1, 0, 0, 1, 1]
"""After one prompt token: turns at 1-2, 4 and 7-8."""


def branch(mask=THREE_TURNS, **kwargs):
    return make_sample(mask, **kwargs).branch


def test_a_trace_is_cut_after_an_observation():
    assert turn_boundaries(branch().action_mask).tolist() == [4, 7]
    assert turn_boundaries(branch([1, 1, 0]).action_mask).tolist() == []
    assert turn_boundaries(np.zeros(0, dtype=bool)).tolist() == []


def test_an_index_from_the_data_must_be_a_turn_boundary():
    assert cut_at(branch(), 7) == 7
    for index in (0, 1, 3, 5, 8, 9):
        with pytest.raises(ContractError, match=rf"cut {index} is no turn boundary .* \[4, 7\]"):
            cut_at(branch(), index)


def test_the_least_certain_turn_is_replayed():
    """By mean, not by sum or length: two tokens of 1 nat against one of 1.5. The first turn is never the choice."""
    entropies = np.array([0, 9, 9, 99, 1.5, 99, 99, 1, 1])
    assert cut_by_entropy(branch(), entropies) == 4
    assert cut_by_entropy(branch(), np.array([0, 9, 9, 99, 0.5, 99, 99, 1, 1])) == 7
    assert cut_by_entropy(branch(), np.ones(9)) == 4, "the earliest of equals"
    assert cut_by_entropy(branch([1, 1, 0])) is None


def test_without_entropies_the_sampled_tokens_speak():
    recorded = branch()
    recorded.logprobs = np.array([0, -9, -9, 0, -0.1, 0, 0, -2.0, -0.1], dtype=np.float32)
    assert cut_by_entropy(recorded) == 7


@pytest.mark.parametrize("bad", [np.ones(8), np.array([0, 1, 1, 0, math.nan, 0, 0, 1, 1])])
def test_entropies_that_do_not_fit_are_refused(bad):
    with pytest.raises(ContractError, match="entropies"):
        cut_by_entropy(branch(), bad)


def test_only_the_suffix_trains():
    replay = suffix_only(branch(step_rewards=[0.5, 0, 0, 0.25, 0, 0, 0, 0]), 4)
    validate_branch(replay)
    assert replay.action_mask.tolist() == replay.loss_mask.tolist() == [False] * 4 + [True, False, False, True, True]
    assert replay.logprobs.tolist() == [0, 0, 0, 0, -0.5, 0, 0, -0.5, -0.5]
    assert replay.version_spans == [VersionSpan(4, 5, 0), VersionSpan(7, 9, 0)]
    assert replay.step_rewards is not None and replay.step_rewards.tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0, 0]


def test_credit_counts_the_suffix_alone():
    """Scenario: values and rewards of the prefix change. Result: nothing moves; lambda is that of three tokens."""
    samples = []
    for noise in (0.0, 7.0):
        values = np.array([0, noise, noise, noise, 0.5, noise, noise, 0.4, 0.3])
        source = make_sample(THREE_TURNS)
        samples.append(TrainingSample("t", "g", suffix_only(source.branch, 4), 1.0, source.stop_reason, values=values))
    metrics = [build(SaoConfig(type="sao")).credit([[sample]]) for sample in samples]
    assert metrics[0]["credit/lambda_mean"] == pytest.approx(1 - 1 / 4.5)
    assert metrics[0]["credit/action_tokens"] == 3
    assert samples[0].advantages is not None and samples[1].advantages is not None
    assert samples[0].advantages.tobytes() == samples[1].advantages.tobytes()


@pytest.mark.parametrize("cut", [0, -1, 9, 12])
def test_a_cut_without_prefix_or_suffix_is_refused(cut):
    with pytest.raises(ContractError, match=f"cut {cut} leaves"):
        suffix_only(branch(), cut)


def test_a_cut_after_the_last_action_is_refused():
    with pytest.raises(ContractError, match="cut 3 leaves no prefix or no action token"):
        suffix_only(branch([1, 1, 0, 0]), 3)


def test_a_branch_that_leaves_its_prefix_is_no_replay():
    prefix = branch().token_ids[:4]
    check_prefix(branch(), prefix)
    with pytest.raises(ContractError, match="leaves its prefix at token 2 of 4"):
        check_prefix(branch(), np.array([0, 1, 9, 3]))
    with pytest.raises(ContractError, match="9 tokens, not more than its prefix of 9"):
        check_prefix(branch(), branch().token_ids)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_every_boundary_gives_a_valid_branch_and_leaves_the_source_alone(mask):
    source = branch(mask)
    before = [array.tobytes() for array in (source.action_mask, source.loss_mask, source.logprobs)]
    for cut in turn_boundaries(source.action_mask):
        replay = suffix_only(source, cut_at(source, int(cut)))
        validate_branch(replay)
        assert replay.action_mask[cut] and not replay.action_mask[:cut].any() and not source.action_mask[cut - 1]
        assert replay.num_action_tokens == int(source.action_mask[cut:].sum())
    assert before == [array.tobytes() for array in (source.action_mask, source.loss_mask, source.logprobs)]
