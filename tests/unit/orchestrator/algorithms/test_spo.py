"""SPO: the tracker's numbers, forgetting, normalisation, the prior file and the state."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms import build
from orchestrator.algorithms.spo import Tracker, forgetting_factor, sampling_weight
from services.config.algorithm import SpoConfig
from services.wire.errors import ConfigError
from services.wire.samples import VersionSpan
from tests.samples import make_sample

RHO = {"half_drift": 0.06, "rho_low": 0.875, "rho_high": 0.96}


def spo(**kwargs):
    return build(SpoConfig(type="spo", **kwargs))


def trace(reward, prompt_id="p", trace_id="t", version=0):
    sample = make_sample([1, 1], reward=reward, trace_id=trace_id, group_id=trace_id)
    sample.prompt_id = prompt_id
    sample.branch.version_spans = [VersionSpan(1, 3, version)]
    return sample


def test_golden_tracker():
    tracker = Tracker.from_prior(8, 3, rho_low=0.875)
    assert (tracker.hits, tracker.misses) == pytest.approx((3.1111, 4.8889), abs=1e-4)
    assert tracker.value == pytest.approx(0.388889, abs=1e-6)
    rho = forgetting_factor(0.03, **RHO)
    assert rho == 0.875, "2^(-1/2), clipped"
    tracker.update(1.0, rho)
    assert (tracker.hits, tracker.misses) == pytest.approx((3.7222, 4.2778), abs=1e-4)


@pytest.mark.parametrize(("drift", "rho"), [(0.0, 0.96), (0.06, 0.875), (1e9, 0.875), (0.01, 2 ** (-1 / 6))])
def test_the_further_the_policy_moved_the_more_is_forgotten(drift, rho):
    assert forgetting_factor(drift, **RHO) == pytest.approx(rho)


def test_prompts_that_are_sometimes_solved_weigh_most():
    assert sampling_weight(0.5) == pytest.approx(0.55)
    assert sampling_weight(0.0) == sampling_weight(1.0) == pytest.approx(0.05)


def test_weights_follow_the_trackers_and_never_leave_what_can_be_drawn_by():
    """Before, after one reward of 1 without forgetting's help, and for a prompt nobody has seen."""
    algorithm = spo()
    weight = algorithm.prompt_weight()
    assert weight("p") == pytest.approx(0.55)
    algorithm.credit([[trace(1.0)]])
    value = (0.96 * 4 + 1) / (0.96 * 8 + 1)
    assert weight("p") == pytest.approx(np.sqrt(value * (1 - value)) + 0.05) and weight("q") == pytest.approx(0.55)
    for _ in range(300):
        algorithm.credit([[trace(1.0)]])
    assert 0.05 < weight("p") < 0.06


def test_a_new_prompt_starts_at_one_half():
    assert spo().tracker("p").value == 0.5


def test_one_trace_alone_is_not_normalised():
    sample = trace(1.0)
    metrics = spo().credit([[sample]])
    assert sample.advantages.tolist() == [0, 0.5, 0.5]
    assert sample.returns is None
    assert metrics["credit/baseline_mean"] == 0.5


def test_advantages_are_normalised_over_the_traces_of_a_batch():
    batch = [[trace(reward, str(i), str(i))] for i, reward in enumerate([1.0, 0.0, 0.0, 1.0, 0.0])]
    spo().credit(batch)
    advantages = [float(samples[0].advantages[1]) for samples in batch]
    assert np.mean(advantages) == pytest.approx(0, abs=1e-12)
    assert np.std(advantages, ddof=1) == pytest.approx(1)


def test_equal_surprises_become_zeros():
    batch = [[trace(1.0, str(i), str(i))] for i in range(3)]
    spo().credit(batch)
    assert not any(samples[0].advantages.any() for samples in batch)


def test_the_baseline_is_the_tracker_before_the_reward():
    algorithm = spo(drift_per_version=0.0)
    algorithm.credit([[trace(1.0)]])
    second = trace(1.0)
    algorithm.credit([[second]])
    assert float(second.advantages[1]) == pytest.approx(1 - (0.96 * 4 + 1) / (0.96 * 8 + 1))


def test_versions_in_between_are_forgetting():
    def second_value(version):
        algorithm = spo(drift_per_version=0.01)
        algorithm.credit([[trace(1.0)]])
        algorithm.credit([[trace(0.0, version=version)]])
        return algorithm.tracker("p").value

    assert second_value(0) > second_value(1) > second_value(2) == second_value(100)


def test_a_reward_outside_zero_and_one_is_refused_with_its_trace():
    with pytest.raises(ValueError, match=r"trace t: spo needs rewards in \[0, 1\], got -1"):
        spo().credit([[trace(-1.0)]])


def test_offline_rollouts_are_the_prior(tmp_path):
    path = tmp_path / "prior.jsonl"
    path.write_text('{"prompt_id": "p", "num": 8, "hits": 3}\n\n{"prompt_id": "q", "num": 0, "hits": 0}\n')
    algorithm = spo(prior_file=str(path))
    assert algorithm.tracker("p").value == pytest.approx(0.388889, abs=1e-6)
    assert algorithm.tracker("q").value == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", ":1 is no object"),
        ("\n{", ":2 is no object"),
        ('{"prompt_id": "p", "num": 2}', ":1 is no object"),
        ('{"prompt_id": "p", "num": 2, "hits": 3}', ":1 has 3 hits of 2"),
        ('{"prompt_id": "p", "num": 2, "hits": NaN}', ":1 has nan hits of 2"),
    ],
)
def test_a_broken_prior_is_refused_with_its_line(tmp_path, text, said):
    path = tmp_path / "prior.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        spo(prior_file=str(path))


def test_a_missing_prior_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        spo(prior_file=str(tmp_path / "nowhere.jsonl"))


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match="trackers, not global, prompts"):
        spo().load_state_dict({"prompts": {}, "global": []})


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=30),
    st.integers(0, 30),
)
def test_a_restored_run_continues_with_the_same_numbers(visits, cut):
    """Trackers stay beliefs: positive, worth at most 1/(1 - rho_high) + 8 rewards, means within [0, 1]."""
    whole, first, second = spo(), spo(), spo()
    for index, (prompt_id, reward, version) in enumerate(visits):
        if index == min(cut, len(visits) - 1):
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            first = second
        ours, theirs = trace(reward, prompt_id, version=version), trace(reward, prompt_id, version=version)
        whole.credit([[ours]])
        first.credit([[theirs]])
        assert ours.advantages.tobytes() == theirs.advantages.tobytes()
        tracker = whole.tracker(prompt_id)
        assert tracker.hits > 0 and tracker.misses > 0 and 0 < tracker.value < 1
        assert tracker.hits + tracker.misses <= 33
    assert whole.state_dict() == first.state_dict()
