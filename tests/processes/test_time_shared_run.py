"""Whole runs in which engines, critic and policy take turns: they train what a run with devices for each role trains.

Notable:
- Two ranks a trainer and two engines behind the router. The run is pre-empted in the middle and resumed, so commits are
  written and read by roles that take turns.
- Values are packed for scoring as requests happen to meet, which moves their last bits: numbers are compared to 1e-3.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, Finished, processes_of, read_lines, run_cli, start_cli, wait_until

SAO = str(ROOT / "tests" / "processes" / "configs" / "sao.toml")
NUM_STEPS = 6
SAME_ROLLOUTS = (
    *("--orchestrator.max_off_policy_steps", "0", "--orchestrator.max_steps", str(NUM_STEPS)),
    *("--deployment.num_policy_gpus", "2", "--inference.max_num_seqs", "16"),
    *("--policy.optim.lr", "1e-4"),  # Adam makes steps of last bits: at ten times this they grow until a token differs
)
SHARED = (
    *("--deployment.sharing", "time", "--deployment.num_value_gpus", "none", "--deployment.num_inference_gpus", "2"),
    *("--checkpoint.interval_steps", "2"),
)
STREAMS = {
    "rollout": ("reward/mean", "rollout/staleness"),
    "credit": ("credit/advantage_abs_mean",),
    "critic": ("value/loss", "value/grad_norm", "value/explained_variance"),
    "policy": ("policy/loss", "policy/grad_norm", "policy/entropy"),
}


@pytest.fixture(scope="module")
def dedicated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_cli(tmp_path_factory.mktemp("dedicated") / "run", SAO, *SAME_ROLLOUTS)


def ends(process: subprocess.Popen[bytes], run_dir: Path, when: Callable[[], bool]) -> int:
    """Its exit code, after SIGTERM to the launcher as soon as `when` says so."""
    try:
        wait_until(lambda: when() or process.poll() is not None, deadline_s=240, what=f"a step of {run_dir}")
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Scenario: a time-shared run is told to end after its second step, and resumed."""
    run_dir = tmp_path_factory.mktemp("shared") / "run"
    log = run_dir.with_suffix(".first.out")
    words = ("run", SAO, "--run.dir", str(run_dir), *SAME_ROLLOUTS, *SHARED, "--runtime.shutdown_grace_s", "40")
    code = ends(start_cli(*words, log=log), run_dir, lambda: len(rows(run_dir, "turns")) >= 2)
    assert code == 75, log.read_text()[-3000:]
    assert not processes_of(run_dir)
    return run_cli(run_dir, SAO, *words[4:], "--resume")


def rows(run_dir: Path, stream: str) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [row for row in read_lines(path) if row["stream"] == stream] if path.is_file() else []


def test_both_runs_end_normally_and_leave_nothing_running(dedicated: Finished, shared: Finished) -> None:
    for run in (dedicated, shared):
        assert run.code == 0, run.output[-3000:]
        assert not processes_of(run.dir)
        assert not list((run.dir / "logs").glob("failures/*"))
    assert len(shared.context["inference_urls"]) == 2


def test_every_step_has_the_numbers_of_a_run_that_shares_nothing(dedicated: Finished, shared: Finished) -> None:
    for stream, names in STREAMS.items():
        ours, theirs = shared.rows(stream), dedicated.rows(stream)
        assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(NUM_STEPS))
        for name in names:
            assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-3, abs=1e-5), name


def test_one_role_is_awake_at_a_time_and_in_order(shared: Finished) -> None:
    turns = [event for event in read_lines(shared.dir / "events.jsonl") if event["event"] == "turn"]
    first = [turn for turn in turns if turn["before"] == "inference"]
    assert len(first) >= NUM_STEPS
    for before, turn in itertools.pairwise(turns):
        # the first of a start begins with engines that are awake
        assert turn["before"] == before["holder"] or turn["before"] == "inference"
    cycle = ["critic", "policy", "inference"]
    holders = [turn["holder"] for turn in turns]
    assert sum(holders[i : i + 3] == cycle for i in range(len(holders))) >= NUM_STEPS
    moved = [turn["sleep_bytes"] for turn in turns if turn["before"] in ("critic", "policy")]
    assert moved and all(num_bytes > 1_000_000 for num_bytes in moved)


def test_a_role_wakes_with_every_byte_that_slept(shared: Finished) -> None:
    for row in shared.rows("turns"):
        for role in ("critic", "policy"):
            woke, slept = (row.get(f"turns/{role}_{word}_bytes", 0.0) for word in ("wake", "sleep"))
            assert woke == slept or not woke or not slept, row
