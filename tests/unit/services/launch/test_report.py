"""Reading metrics and drawing them: series, charts, the summary, the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from services.launch.live import LiveView, status_line
from services.launch.report import draw, summary, text_report
from services.launch.rows import Series, chart, read_rows, series, sparkline
from services.wire.errors import UsageError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rows = []
    for step in range(20):
        rows.append(
            {"step": step, "stream": "rollout", "time_s": step, "reward/mean": step / 20, "rollout/staleness": 0.5}
        )
        rows[-1]["rollout/dropped/stale"] = 2.0
        rows.append({"step": step, "stream": "critic", "time_s": step, "value/explained_variance": 0.01 * step})
    rows.append({"step": 0, "stream": "eval", "eval/add/accuracy": 0.25, "eval/version": 0})
    rows.append({"step": 20, "stream": "eval", "eval/add/accuracy": 0.75, "eval/version": 20})
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"step": 20, "stre'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "config.resolved.toml").write_text("")
    return tmp_path


def test_a_half_written_last_row_is_left_out(run_dir):
    assert len(read_rows(run_dir)) == 42


def test_the_last_row_of_a_step_counts_and_nonfinite_values_do_not():
    rows = [
        {"stream": "policy", "step": 1, "x": 1.0},
        {"stream": "policy", "step": 0, "x": 5.0},
        {"stream": "policy", "step": 1, "x": 2.0},
        {"stream": "policy", "step": 2, "x": float("nan")},
        {"stream": "critic", "step": 0, "x": 9.0},
    ]
    assert series(rows, "policy", "x") == Series([0, 1], [5.0, 2.0])


def test_the_summary_says_how_it_began_and_ended(run_dir):
    text = summary(run_dir)
    assert "20 steps" in text
    assert "0.025 -> 0.925" in text
    assert "0.250 -> 0.750" in text
    assert "stale 40" in text
    assert str(run_dir) in text


def test_a_run_without_a_finished_step_can_be_reported(tmp_path):
    (tmp_path / "config.resolved.toml").write_text("")
    assert "no finished step yet" in text_report(tmp_path)


def test_what_is_no_run_directory_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="is not a run directory"):
        text_report(tmp_path)


def test_the_picture_is_a_png(run_dir):
    target = run_dir / "report.png"
    draw([run_dir, run_dir], target)
    assert target.read_bytes()[:4] == b"\x89PNG"


def test_a_chart_keeps_its_width_and_ends():
    lines = chart(Series(list(range(200)), [float(i) for i in range(200)]), width=40, height=5)
    assert max(len(line) for line in lines) <= 55
    assert "step 0" in lines[-1]
    assert "step 199" in lines[-1]
    assert sparkline([0.0, 1.0]) == "▁█"
    assert chart(Series([], [])) == ["(no data)"]


def test_a_status_becomes_one_line_that_says_who_waits_for_whom():
    status = {
        "step": 3,
        "max_steps": 9,
        "reward_mean": 0.5,
        "explained_variance": None,
        "tokens_per_s": {"policy": 12.3},
        "waiting_for": {"orchestrator": "critic step 3", "policy": ""},
    }
    assert status_line(status) == "step 3/9 | reward 0.500 | tok/s policy 12 | orchestrator waits for critic step 3"
    assert status_line(None) == "processes are starting"


def test_the_summary_tells_each_alarm_with_its_steps(run_dir):
    rows = [{"step": step, "stream": "critic", "alarm/constant_values": 1.0} for step in (12, 13, 17)]
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + path.read_text())
    assert "constant_values in 3 step(s), 12 to 17" in summary(run_dir)


def test_an_alarm_of_the_status_is_said_once():
    """Scenario: two looks show the same alarm, the second also a later one of the same name."""
    stream = io.StringIO()
    view = LiveView(stream)
    alarm = {"name": "constant_values", "step": 12, "text": "spread by 0; likely: a zeroed head"}
    for alarms in ([], [alarm], [alarm, alarm | {"step": 112}]):
        view._say_alarms({"alarms": alarms})
    view._say_alarms(None)
    view._say_alarms({})
    lines = [line for line in stream.getvalue().splitlines() if line]
    assert lines == [
        "ALARM constant_values at step 12: spread by 0; likely: a zeroed head",
        "ALARM constant_values at step 112: spread by 0; likely: a zeroed head",
    ]
