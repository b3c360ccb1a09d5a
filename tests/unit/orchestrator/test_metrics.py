"""Rows of metrics.jsonl and traces.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from orchestrator.algorithms.shaping import shape
from orchestrator.metrics import JsonLines, Metrics, rollout_row, trace_row, versions_of
from orchestrator.producer import Group, samples_of
from services.config.orchestrator import RewardConfig
from services.wire.samples import StopReason
from tests.rollouts import make_trace


def test_a_row_has_step_stream_and_time_and_the_newest_is_kept(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.add("rollout", 0, {"reward/mean": 1 / 3, "rollout/num_traces": 3})
    metrics.add("critic", 0, {"value/loss": 0.5})
    metrics.add("rollout", 1, {"reward/mean": 0.5, "note": None})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["stream"]) for row in rows] == [(0, "rollout"), (0, "critic"), (1, "rollout")]
    assert all(row["time_s"] >= 0 for row in rows)
    assert rows[0]["reward/mean"] == 0.333333333 and rows[0]["rollout/num_traces"] == 3
    assert metrics.latest["rollout"]["step"] == 1 and metrics.rewards == [0.333333333, 0.5]


def test_means_are_over_traces_and_never_over_means() -> None:
    """A group of three and a group of one: the mean of means would be 0.5."""
    groups = [[make_trace(reward=1.0, trace_id=f"0/{i}") for i in range(3)], [make_trace(reward=0.0, trace_id="1/0")]]
    admitted = [Group(traces, []) for traces in groups]
    row = rollout_row([trace for traces in groups for trace in traces], admitted, 0)
    assert row["reward/mean"] == row["reward/mean_admitted"] == 0.75


def test_stale_traces_count_in_the_mean_of_finished_ones_only() -> None:
    """Without them the reward of a run would depend on how fast its trainer is."""
    fresh, stale = make_trace(reward=1.0, versions=(3,)), make_trace(reward=0.0, versions=(0,))
    row = rollout_row([fresh, stale], [Group([fresh], [])], 3)
    assert row["reward/mean"] == 0.5 and row["reward/mean_admitted"] == 1.0
    assert row["rollout/num_traces"] == 1


def test_staleness_is_measured_from_the_oldest_token() -> None:
    traces = [make_trace(versions=(4,)), make_trace(versions=(2, 4))]
    row = rollout_row(traces, [Group(traces, [])], 4)
    assert row["rollout/staleness"] == 1.0 and row["rollout/staleness_max"] == 2.0
    assert row["rollout/mixed_version_traces"] == 1.0
    assert versions_of(traces[1]) == {2, 4}


def test_the_shaped_mean_is_over_traces_and_the_other_means_stay_the_environments() -> None:
    """Rewards 1 and 0, shaped by 2 r - 0.5 into 1.5 and -0.5; the trace with two branches counts once."""
    traces = [make_trace(reward=1.0, trace_id="0/0"), make_trace(reward=0.0, trace_id="0/1")]
    traces[0].branches.append(make_trace().branches[0])
    config = RewardConfig(scale=2.0, offset=-0.5)
    group = Group(traces, [sample for trace in traces for sample in shape(samples_of(trace), trace, config)])
    row = rollout_row(traces, [group], 0)
    assert row["reward/mean"] == row["reward/mean_admitted"] == row["reward/shaped_mean"] == 0.5
    row = rollout_row(traces, [Group(traces[:1], group.samples[:2])], 0)
    assert (row["reward/mean_admitted"], row["reward/shaped_mean"]) == (1.0, 1.5)
    written = trace_row(0, traces[0], group.samples[0])
    assert (written["reward"], written["shaped_reward"]) == (1.0, 1.5)


def test_stop_reasons_are_counted_apart() -> None:
    reasons = [StopReason.TERMINATED, StopReason.TERMINATED, StopReason.TRUNCATED_TURNS]
    traces = [make_trace(stop_reason=reason, num_turns=i + 1) for i, reason in enumerate(reasons)]
    row = rollout_row(traces, [Group(traces, [])], 0)
    assert row["rollout/stop/terminated"] == 2 and row["rollout/stop/truncated_turns"] == 1
    assert row["rollout/stop/truncated_length"] == 0 and row["rollout/turns"] == 2.0
    assert row["rollout/length"] == 2.0


def test_a_batch_without_traces_has_numbers_all_the_same() -> None:
    assert all(np.isfinite(value) for value in rollout_row([], [], 0).values())


@pytest.mark.parametrize("scored", [True, False])
def test_a_trace_is_written_with_all_that_trains(scored: bool) -> None:
    trace = make_trace(versions=(1, 2))
    (sample,) = samples_of(trace)
    if scored:
        sample.values, sample.critic_step = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5]), 7
    row = json.loads(json.dumps(trace_row(3, trace, sample)))
    assert (row["step"], row["trace_id"], row["stop_reason"]) == (3, "0/0", "terminated")
    assert row["action_mask"] == [0, 0, 1, 1, 1, 1] and row["version_spans"] == [[2, 4, 1], [4, 6, 2]]
    assert (row["values"] is not None) == scored and row["returns"] is None
    assert row["critic_step"] == (7 if scored else -1)


def test_a_full_disk_is_warned_about_and_stops_nothing(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "missing" / "metrics.jsonl")
    lines.write({"step": 0})
    lines.write({"step": 1})
    assert not (tmp_path / "missing").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A later start


def test_rows_that_ran_ahead_of_a_commit_are_removed_but_for_its_own(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.add("rollout", 0, {"reward/mean": 0.25})
    num_bytes = metrics.num_bytes
    metrics.add("commit", 1, {"checkpoint/bytes": 10})
    metrics.add("rollout", 1, {"reward/mean": 0.5})
    metrics.add("commit", 2, {"checkpoint/bytes": 10})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "str')  # a crash in the middle of a row
    again = Metrics(tmp_path)
    again.go_on_from(1, num_bytes)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["stream"]) for row in rows] == [(0, "rollout"), (1, "commit")]
    assert again.rewards == [0.25] and set(again.latest) == {"rollout", "commit"}
    again.add("rollout", 1, {"reward/mean": 0.75})
    assert again.latest["rollout"]["time_s"] >= rows[-1]["time_s"]


def test_a_file_that_lost_its_end_loses_the_row_that_is_not_whole(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "traces.jsonl")
    lines.cut(100)
    assert lines.num_bytes == 0 and list(lines.rows()) == []
    lines.write({"step": 0})
    lines.write({"step": 1})
    num_bytes = lines.num_bytes
    (tmp_path / "traces.jsonl").write_bytes((tmp_path / "traces.jsonl").read_bytes()[:-3])
    lines.cut(num_bytes)
    assert list(lines.rows()) == [{"step": 0}]
    assert (tmp_path / "traces.jsonl").read_text() == '{"step":0}\n'


@pytest.mark.parametrize("size", [10, 2**16 - 1, 2**16, 3 * 2**16])
def test_rows_of_any_length_are_cut_where_they_end(tmp_path: Path, size: int) -> None:
    lines = JsonLines(tmp_path / "traces.jsonl")
    for step in range(3):
        lines.write({"step": step, "text": "x" * size})
    lines.cut(lines.num_bytes - 5)
    assert [row["step"] for row in lines.rows()] == [0, 1]
    lines.cut(3)
    assert lines.num_bytes == 0


def test_a_commit_whose_row_was_never_written_gets_one(tmp_path: Path) -> None:
    Metrics(tmp_path).add("rollout", 0, {"reward/mean": 0.25})
    again = Metrics(tmp_path)
    again.go_on_from(1, again.num_bytes)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["stream"]) for row in rows] == [(0, "rollout"), (1, "commit")]
