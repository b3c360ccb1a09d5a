"""A whole run with two engines behind the router, in which an engine, the router and its guard are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engines import full_logprobs
from tests.runs import ROOT, Finished, processes_of, read_lines, start_cli

SAO = str(ROOT / "tests" / "processes" / "configs" / "sao.toml")
NUM_STEPS = 14
VICTIMS = {"inference-1": 1, "router": 2, "router-guard": 3}
"""who is killed after how many steps"""


def events(run_dir: Path, *names: str) -> list[dict[str, object]]:
    return [row for row in read_lines(run_dir / "events.jsonl") if row["event"] in names]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Scenario: SIGKILL to one engine, the router and its guard, each after a step, in a run that asks for a token."""
    run_dir = tmp_path_factory.mktemp("routed") / "run"
    log = run_dir.with_suffix(".out")
    process = start_cli(
        *("run", SAO, "--run.dir", str(run_dir), "--deployment.num_inference_gpus", "2"),
        *("--orchestrator.max_steps", str(NUM_STEPS), "--runtime.token", "always"),
        log=log,
    )
    try:
        for victim, after in VICTIMS.items():
            wait_for(lambda after=after: num_steps(run_dir) >= after, process)
            pid = json.loads((run_dir / "run.json").read_text())["pids"][victim]
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: process.poll() is not None)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
    return Finished(process.returncode, log.read_text(), run_dir)


def test_the_run_ends_normally_and_leaves_nothing_running(run: Finished) -> None:
    assert run.code == 0, run.output[-3000:]
    assert not processes_of(run.dir)
    assert not list((run.dir / "logs").glob("failures/*"))
    assert len(run.context["inference_urls"]) == 2
    *_, finished = events(run.dir, "finished")  # an earlier one may be of making the model
    assert finished["killed"] == []


def test_each_that_was_killed_was_started_again_and_used_again(run: Finished) -> None:
    replaced = [(row["process"], row["exit_code"]) for row in events(run.dir, "process_replaced")]
    assert replaced == [(victim, 137) for victim in VICTIMS]
    names = [row["event"] for row in events(run.dir, "router_lost", "router_up")]
    assert names == ["router_up", "router_lost", "router_up"]
    moves = [(row["event"], row["engine"]) for row in events(run.dir, "engine_joined", "engine_left")]
    assert sorted(moves[:2]) == [("engine_joined", "inference-0"), ("engine_joined", "inference-1")]
    assert moves[2:] == [("engine_left", "inference-1"), ("engine_joined", "inference-1")]
    rows = run.rows("rollout")
    assert sum(row["rollout/engines_left"] for row in rows) == 1
    assert rows[-1]["rollout/engines_routed"] == 2
    assert sum(row["rollout/requests_resent"] for row in rows) > 0


def test_no_step_is_trained_twice_and_no_rollout_is_lost_or_there_twice(run: Finished) -> None:
    for stream in ("policy", "critic"):
        ledger = read_lines(run.dir / "logs" / f"ledger-{stream}.jsonl")
        assert sorted({entry["step"] for entry in ledger}) == list(range(NUM_STEPS))
        assert len({(entry["step"], entry["rank"]) for entry in ledger}) == len(ledger)
    rows = run.rows("rollout")
    dropped = {name for row in rows for name in row if name.startswith("rollout/dropped/")}
    assert dropped <= {"rollout/dropped/stale"}
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    names = [trace["trace_id"] for trace in read_lines(run.dir / "traces.jsonl")]
    assert len(set(names)) == len(names) == sum(row["rollout/num_traces"] for row in rows)


def test_each_span_behind_the_router_is_what_its_snapshot_says(run: Finished) -> None:
    traces = read_lines(run.dir / "traces.jsonl")
    assert len({version for trace in traces for _, _, version in trace["version_spans"]}) > NUM_STEPS / 2
    mixed = [trace for trace in traces if len({version for _, _, version in trace["version_spans"]}) > 1]
    for trace in mixed[:6] + traces[::40]:
        for start, end, version in trace["version_spans"]:
            folder = run.dir / "weights" / f"v{version:06d}" if version else Path(run.context["model_dir"])
            own = full_logprobs(folder, trace["token_ids"][:end])[start - 1 : end - 1]
            assert np.abs(own - np.array(trace["logprobs"][start:end])).max() < 1e-4


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"stream":"rollout"') if path.exists() else 0


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None, deadline_s: float = 280
) -> None:
    """Wait; a process that ends meanwhile ends the wait with an error."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "waited too long"
        assert process is None or process.poll() is None, "the run ended early"
        time.sleep(0.1)
