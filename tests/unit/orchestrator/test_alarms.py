"""Alarms by numbers: each on a row that shows what it is about, on no healthy row, none too early, none every step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.alarms import REPEAT_STEPS, Alarms, WatchedMetrics
from services.config.schema import Config
from services.wire.errors import AlarmRaised
from tests.runs import read_lines

K = 2
CRITIC = {
    "value/updates": 10,
    "value/head_norm": 0.4,
    "value/value_std": 0.1,
    "value/explained_variance": 0.3,
    "value/target_oob_fraction": 0.0,
}
"""Of its fifth step: healthy, as are the next two."""
POLICY = {
    "policy/version": 5,
    "policy/loss_tokens": 100.0,
    "policy/entropy": 0.5,
    "policy/kl_rollout": 0.001,
    "policy/kl_reference": 0.02,
    "policy/mismatch_tokens": 40.0,
    "policy/mismatch_log_ratio": -1e-4,
    "policy/mismatch_mean": 0.004,
    "policy/mismatch_max": 0.02,
}
CREDIT = {"credit/advantage_abs_mean": 0.2}
HEALTHY = {"critic": CRITIC, "policy": POLICY, "credit": CREDIT}


def config_of(**monitor: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "tiny:add"},
            "algorithm": {"type": "sao"},
            "env": [{"type": "add"}],
            "value": {"updates_per_batch": K},
            "orchestrator": {"max_steps": 4},
            "monitor": monitor,
        }
    )


def alarms_of(folder: Path, *, is_replay: bool = False, **monitor: Any) -> Alarms:
    return Alarms(config_of(**monitor), folder, is_replay=is_replay)


def names(alarms: Alarms, stream: str, step: int, **changes: Any) -> list[str]:
    """Alarms about a healthy row with a few changes, by the last component of the metric."""
    row = HEALTHY[stream]
    full = {name: changes.get(name.rsplit("/")[-1], value) for name, value in row.items()}
    return [alarm.name for alarm in alarms.look(stream, step, full)]


def series(alarms: Alarms, stream: str, steps: Iterable[int], **changes: Any) -> list[list[str]]:
    return [names(alarms, stream, step, **changes) for step in steps]


def test_a_healthy_run_rings_nothing(tmp_path: Path) -> None:
    alarms = alarms_of(tmp_path, negative_ev_steps=1, zero_advantage_steps=1)
    for step in range(4, 40):
        for stream in HEALTHY:
            assert names(alarms, stream, step) == []
    assert alarms.look("rollout", 3, {"reward/mean": 0.0}) == []


@pytest.mark.parametrize(
    ("name", "stream", "changes", "fine"),
    [
        ("constant_values", "critic", {"value_std": 9.9e-7}, {"value_std": 1e-6}),
        ("constant_values", "critic", {"value_std": 0.0}, {"value_std": None}),
        ("head_norm_zero", "critic", {"head_norm": 0.0}, {"head_norm": 1e-30}),
        ("targets_out_of_range", "critic", {"target_oob_fraction": 0.011}, {"target_oob_fraction": 0.01}),
        ("entropy_collapse", "policy", {"entropy": 9e-4}, {"entropy": 1e-3}),
        ("kl_explosion", "policy", {"kl_rollout": 1.1}, {"kl_rollout": 1.0}),
        ("kl_explosion", "policy", {"kl_reference": 3.0}, {"kl_reference": None}),
        ("logprob_mismatch", "policy", {"mismatch_log_ratio": -0.011}, {"mismatch_log_ratio": -0.01}),
        ("logprob_mismatch", "policy", {"mismatch_log_ratio": 0.5}, {"mismatch_tokens": 0, "mismatch_log_ratio": 9.0}),
    ],
)
def test_an_alarm_rings_beyond_its_threshold_and_not_at_it(
    name: str, stream: str, changes: dict[str, Any], fine: dict[str, Any], tmp_path: Path
) -> None:
    assert names(alarms_of(tmp_path), stream, 4, **changes) == [name]
    assert names(alarms_of(tmp_path), stream, 4, **fine) == []


def test_explained_variance_below_zero_rings_when_it_lasts(tmp_path: Path) -> None:
    """Steps without one (the returns did not vary) neither break a series nor lengthen it; a step of 0 breaks it."""
    alarms = alarms_of(tmp_path, negative_ev_steps=3)
    assert series(alarms, "critic", range(5, 7), explained_variance=-0.1) == [[], []]
    assert names(alarms, "critic", 7, explained_variance=None) == []
    assert series(alarms, "critic", range(8, 10), explained_variance=-0.1) == [["negative_ev"], ["negative_ev"]]
    assert names(alarms, "critic", 10, explained_variance=0.0) == []
    assert series(alarms, "critic", range(11, 14), explained_variance=-5.0) == [[], [], ["negative_ev"]]


def test_advantages_of_zero_ring_when_they_last(tmp_path: Path) -> None:
    alarms = alarms_of(tmp_path)
    assert series(alarms, "credit", range(1, 4), advantage_abs_mean=0.0) == [[], [], ["zero_advantages"]]
    assert names(alarms, "credit", 4, advantage_abs_mean=1e-12) == []
    assert series(alarms, "credit", range(5, 7), advantage_abs_mean=0.0) == [[], []]


def test_nothing_about_values_rings_before_the_first_update(tmp_path: Path) -> None:
    """Scenario: a fresh critic of K = 2 updates a step, all of it bad. Result: its first row is from before its first
    update and says nothing; its second rings. A critic whose updates are refused is armed by none of them."""
    bad = {"value_std": 0.0, "explained_variance": -1.0, "target_oob_fraction": 0.5}
    alarms = alarms_of(tmp_path, negative_ev_steps=1)
    assert names(alarms, "critic", 0, updates=K, **bad) == []
    rung = ["constant_values", "negative_ev", "targets_out_of_range"]
    assert names(alarms, "critic", 1, updates=2 * K, **bad) == rung
    refused = alarms_of(tmp_path, negative_ev_steps=1)
    assert series(refused, "critic", range(3), updates=0, head_norm=0.0, **bad) == [[], [], []]
    assert names(alarms, "critic", 0, updates=K, head_norm=0.0) == ["head_norm_zero"], "its norm is of after the step"


def test_nothing_about_the_policy_s_drift_rings_before_its_first_update(tmp_path: Path) -> None:
    alarms = alarms_of(tmp_path, zero_advantage_steps=1)
    assert names(alarms, "policy", 0, version=1, entropy=0.0, kl_rollout=9.0) == []
    assert names(alarms, "policy", 1, version=2, entropy=0.0, kl_rollout=9.0) == ["entropy_collapse", "kl_explosion"]
    assert names(alarms, "policy", 2, loss_tokens=0.0, entropy=0.0) == [], "a batch without a token has no entropy"
    assert names(alarms, "credit", 0, advantage_abs_mean=0.0) == []
    assert names(alarms, "credit", 1, advantage_abs_mean=0.0) == ["zero_advantages"]


def test_a_row_without_numbers_rings_nothing(tmp_path: Path) -> None:
    """The trainer's status keeps the last few rows only, and a refused update has no means."""
    alarms = alarms_of(tmp_path)
    assert [alarms.look(stream, 7, {}) for stream in HEALTHY] == [[], [], []]
    assert alarms.look("critic", 7, {"value/updates": 20}) == []


# ---------------------------------------------------------------------------------------------------------------------
# What follows


def written(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name != "time_s"} for row in read_lines(folder / "metrics.jsonl")
    ]


def test_an_alarm_marks_every_row_and_speaks_once_in_a_hundred_steps(tmp_path: Path) -> None:
    alarms = alarms_of(tmp_path)
    metrics = WatchedMetrics(tmp_path, alarms)
    for step in range(5, 5 + REPEAT_STEPS + 1):
        flickers = step % 2 == 1  # it comes and goes
        metrics.add("critic", step, CRITIC | {"value/value_std": 0.0 if flickers else 1.0})
    rows = written(tmp_path)
    assert [row.get("alarm/constant_values") for row in rows[:4]] == [1.0, None, 1.0, None]
    events = read_lines(tmp_path / "events.jsonl")
    assert [(event["event"], event["name"], event["step"]) for event in events] == [
        ("alarm", "constant_values", 5),
        ("alarm", "constant_values", 5 + REPEAT_STEPS),
    ]
    assert "spread by 0 (limit 1e-06)" in events[0]["what"] and "zeroed" in events[0]["likely"]
    assert [(one["name"], one["step"]) for one in alarms.told] == [("constant_values", 5), ("constant_values", 105)]


def test_stop_ends_the_run_with_the_row_written_and_off_asks_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir(), (tmp_path / "off").mkdir()
    bad = CRITIC | {"value/value_std": 0.0}
    metrics = WatchedMetrics(tmp_path / "stop", alarms_of(tmp_path / "stop", alarms="stop"))
    metrics.add("critic", 4, CRITIC)
    with pytest.raises(AlarmRaised, match="constant_values at step 5: the critic says the same everywhere"):
        metrics.add("critic", 5, bad)
    assert [row.get("alarm/constant_values") for row in written(tmp_path / "stop")] == [None, 1.0]
    quiet = WatchedMetrics(tmp_path / "off", alarms_of(tmp_path / "off", alarms="off"))
    quiet.add("critic", 5, bad)
    quiet.add("policy", 0, POLICY | {"policy/version": 1, "policy/mismatch_log_ratio": 9.0})
    assert written(tmp_path / "off")[0] == {"step": 5, "stream": "critic", **bad}
    assert not (tmp_path / "off" / "events.jsonl").exists() or read_lines(tmp_path / "off" / "events.jsonl") == []


# ---------------------------------------------------------------------------------------------------------------------
# The gate of the first step


def temperature_row(sampled_at: float, trained_at: float) -> dict[str, Any]:
    """What the trainer says of one token with logits [2, 1], for all of the mass that the engine sampled it with."""
    logits = np.array([2.0, 1.0])
    engine, trainer = (t - np.log(np.exp(t).sum()) for t in (logits / sampled_at, logits / trained_at))
    gap = trainer - engine
    return {
        "policy/version": 1,
        "policy/mismatch_tokens": 1000.0,
        "policy/mismatch_log_ratio": float(np.exp(engine) @ gap),
        "policy/mismatch_mean": float(np.exp(engine) @ np.abs(gap)),
        "policy/mismatch_max": float(np.abs(gap).max()),
    }


def test_an_engine_that_samples_at_another_temperature_ends_the_run_at_its_first_step(tmp_path: Path) -> None:
    """Logits [2, 1]: log-probabilities are -.31326 at temperature 1 and -.17301 at .6 (ratio .8691 at zero lag)."""
    logits = np.array([2.0, 1.0])
    assert logits[0] - np.log(np.exp(logits).sum()) == pytest.approx(-0.31326, abs=1e-5)
    row = POLICY | temperature_row(0.6, 1.0)
    assert row["policy/mismatch_log_ratio"] == pytest.approx(0.84113 * -0.14025 + 0.15887 * 0.52641, abs=1e-5)
    metrics = WatchedMetrics(tmp_path, alarms_of(tmp_path))
    with pytest.raises(AlarmRaised) as caught:
        metrics.add("policy", 0, row)
    for cause in ("temperature", "tokenizer", "weights", "model.dtype", "1000 tokens", "mean log-ratio -0.0343"):
        assert cause in str(caught.value)
    assert len(str(caught.value)) < 600, "the failure record keeps no more"
    assert written(tmp_path)[0]["alarm/logprob_mismatch"] == 1.0
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["name"] == "logprob_mismatch" and event["step"] == 0
    agreeing = WatchedMetrics(tmp_path, alarms_of(tmp_path))
    agreeing.add("policy", 0, POLICY | temperature_row(0.6, 0.6))


def test_the_gate_waits_for_tokens_of_the_version_in_training_and_later_steps_only_ring(tmp_path: Path) -> None:
    """A start from a commit begins with a batch that is all older: its gate is the first step with tokens to judge."""
    metrics = WatchedMetrics(tmp_path, alarms_of(tmp_path))
    metrics.add("policy", 7, POLICY | {"policy/mismatch_tokens": 0.0, "policy/mismatch_log_ratio": 0.0})
    with pytest.raises(AlarmRaised):
        metrics.add("policy", 8, POLICY | {"policy/mismatch_log_ratio": -0.2})
    metrics = WatchedMetrics(tmp_path, alarms_of(tmp_path))
    metrics.add("policy", 7, POLICY)
    metrics.add("policy", 8, POLICY | {"policy/mismatch_log_ratio": -0.2})
    assert written(tmp_path)[-1]["alarm/logprob_mismatch"] == 1.0


def test_a_replay_gates_the_first_version_alone(tmp_path: Path) -> None:
    """Under another learning rate its later versions are not those that sampled the record."""
    off = {"version": 3, "mismatch_log_ratio": -0.2}
    assert names(alarms_of(tmp_path, is_replay=True), "policy", 2, **off) == []
    (alarm,) = alarms_of(tmp_path, is_replay=True).look("policy", 0, POLICY | temperature_row(0.6, 1.0))
    assert alarm.name == "logprob_mismatch" and alarm.is_gate


def test_every_alarm_is_on_the_metrics_page_with_its_key_and_default(tmp_path: Path) -> None:
    import re

    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    (table,) = re.findall(r"^\| name \| when \| key \|.*?(?=\n\n)", page, re.S | re.M)
    listed = re.findall(r"^\| `([a-z_]+)` \|", table, re.M)
    source = (Path(__file__).parents[3] / "orchestrator" / "alarms.py").read_text()
    assert sorted(listed) == sorted(set(re.findall(r'Alarm\(\s*"([a-z_]+)"', source)))
    defaults = json.loads(config_of().monitor.model_dump_json())
    told = {"min_value_std": "1e-6", "negative_ev_steps": "20 steps", "max_oob_fraction": "1 %", "min_entropy": "0.001"}
    told |= {"zero_advantage_steps": "3 batches", "max_kl": "above 1 nat", "max_mismatch": "above 0.01"}
    numbers = [1e-6, 20, 0.01, 0.001, 3, 1.0, 0.01]
    assert [defaults[key] for key in told] == numbers
    for key, text in told.items():
        (row,) = [line for line in table.splitlines() if f"`monitor.{key}`" in line]
        assert text in row, key
