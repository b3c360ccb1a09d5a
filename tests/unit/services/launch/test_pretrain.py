"""`counterpoint pretrain-value` and `record`: which processes start, where, and what a person is told."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.config.ports import port_names
from services.config.resolve import resolve
from services.launch.models import ModelSource
from services.launch.planner import Plan, Site, plan
from services.launch.pretrain import draw, pretraining_plan, pretraining_summary, resolve_beside
from services.launch.progress import ProgressView
from services.launch.record import record, recording_plan
from services.runtime.after import split_wait
from services.runtime.progress import Progress, ProgressFile, read_progress
from services.wire.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[4]
DEMO = str(ROOT / "configs" / "demo" / "sao.toml")


def laid_out(make: Any, *settings: tuple[str, str], **more: Any) -> Plan:
    config = resolve([DEMO], settings).config
    ports = {name: 5000 + number for number, name in enumerate(port_names(config))}
    where = {"run_dir": Path("/run"), "run_id": "r", "epoch": 1, "model": ModelSource(Path("/model"))}
    return make(config, ports, **where, site=Site(ROOT), **more)


def test_pretraining_starts_the_critics_group_alone_with_another_module() -> None:
    own, run = laid_out(pretraining_plan), laid_out(plan)
    (value,) = own.processes
    (served,) = (process for process in run.processes if process.name == "value")
    assert own.final == "value" and value.is_group and value.num_ranks == 2
    assert [word.replace("value_service.pretrain", "value_service.main") for word in value.argv] == served.argv
    assert "value_service.pretrain" in value.argv and value.ports == {} and value.env == served.env
    assert run.final == "orchestrator"


def test_recording_starts_inference_and_a_recorder_and_no_trainer() -> None:
    own = laid_out(recording_plan, words=["--rows", "7"])
    assert [process.name for process in own.processes] == ["inference", "recorder"]
    assert own.final == "recorder"
    assert own.processes[1].argv[-5:] == ["orchestrator.record_rows", "--run-dir", "/run", "--rows", "7"]


def test_nobody_of_them_waits_for_those_of_a_run_that_it_would_share_devices_with() -> None:
    """A wait for the policy would last: there is none."""
    settings = (("deployment.sharing", "time"), ("deployment.num_value_gpus", "none"))
    waiting = [process.name for process in laid_out(plan, *settings).processes if split_wait(process.argv)[0]]
    assert waiting == ["inference", "value"]
    for own in (laid_out(pretraining_plan, *settings), laid_out(recording_plan, *settings, words=[])):
        assert all(process.argv == split_wait(process.argv)[1] for process in own.processes)
        assert own.processes[0].argv[0] == sys.executable


def test_its_directory_is_beside_the_runs_unless_one_is_given() -> None:
    assert resolve_beside([DEMO], [], "-pretrain").run.dir == "runs/sao-pretrain"
    assert resolve_beside([DEMO], [("run.name", "x")], "-record").run.dir == "runs/x-record"
    assert resolve_beside([DEMO], [("run.dir", "here")], "-record").run.dir == "here"


@pytest.mark.parametrize(("words", "error"), [({"rows": 0}, UsageError), ({"suffixes": -1}, UsageError)])
def test_numbers_that_make_no_sense_are_refused(words: dict, error: type) -> None:
    with pytest.raises(error):
        record([DEMO], [], ProgressView(io.StringIO()), **words)


def test_suffixes_need_environments_that_can_be_cut() -> None:
    with pytest.raises(ConfigError, match="add cannot be brought into the middle of an episode"):
        record([DEMO], [], ProgressView(io.StringIO()), suffixes=2)


def test_progress_is_a_line_where_there_is_no_terminal(tmp_path: Path) -> None:
    out, file = io.StringIO(), ProgressFile(tmp_path)
    view = ProgressView(out)
    file.show(Progress(9, 9, "updates", "of an earlier start"))
    view.begin(SimpleNamespace(context=SimpleNamespace(run_dir=tmp_path), processes=[]))  # pyright: ignore
    assert read_progress(tmp_path) is None
    file.show(Progress(3, 8, "updates", "loss 0.5"), now=True)
    view.tick()
    file.show(Progress(8, 8, "updates", "exported", is_finished=True), now=True)
    view.end()
    view.end()
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()[1:]]
    assert lines == ["3/8 updates | loss 0.5", "8/8 updates | exported"]


def test_the_summary_tells_each_policy_and_the_calibration_of_the_last_measurement(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "stream": "pretrain", "value/loss": 0.5} for step in range(4)]
    for step, explained in ((1, 0.1), (3, 0.25)):
        for policy in ({}, {"policy_id": "sft"}):
            numbers = {"rows": 5, "value/loss_tokens": 40.0, "value/explained_variance": explained}
            rows.append({"step": step, "stream": "held_out"} | policy | numbers)
    bins = {"value/calibration/2/tokens": 40.0, "value/calibration/2/value": 0.25, "value/calibration/2/return": 0.5}
    rows[-2] |= bins | {"value/calibration_error": 0.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = pretraining_summary(tmp_path)
    assert "4 updates" in text and "0.100" not in text
    assert [line.split()[:4] for line in text.splitlines() if "0.250" in line][:2] == [
        ["all", "5", "40", "0.250"],
        ["sft", "5", "40", "0.250"],
    ]
    assert ["bin", "3", "40", "0.250", "0.500"] in [line.split() for line in text.splitlines()]
    draw(tmp_path)
    assert (tmp_path / "pretraining.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_held_out_rows_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "stream": "pretrain", "value/loss": 0.5}\n')
    assert "nothing was held out" in pretraining_summary(tmp_path)
    draw(tmp_path)
