"""Told to end: all processes at once, before they are ready, and twice; the matrix is in `scripts/soak_signals.py`.

Notable:
- One run of the demo, made small, is started three times; what a launcher makes of exits is told by small scripts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from services.launch.supervisor import Signals
from services.runtime.commits import Commits
from tests.faults.test_stopping import GRACE_S, MARGIN_S, SAO, SMALL, Launched, launched
from tests.processes.fleets import FOREVER, Said, small_config, supervisor
from tests.processes.test_supervisor import living, run_id_of, with_scripts
from tests.runs import read_lines, start_cli, wait_until

AT_ONCE_S = 5.0
"""After a second signal to the launcher, on a loaded machine."""
TABLE = """
E1130 00:54 77 api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 99) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 98)
  traceback : To enable traceback see: ...
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 99)
"""
"""What torchrun's agent leaves in its log."""


def group_that_ends(code: int, other: int) -> str:
    return f"print({TABLE.format(code=code, other=other)!r}, flush=True); sys.exit(1)"


@pytest.mark.parametrize("other", [-signal.SIGTERM, -signal.SIGINT])
def test_ranks_that_were_told_before_they_could_answer_are_no_failure(tmp_path: Path, other: int) -> None:
    """A rank imports for seconds before it has a handler: it dies by the signal, and its agent ends with 1."""
    code, lines = with_scripts(tmp_path, value=group_that_ends(-signal.SIGTERM, other))
    assert code == 128 + signal.SIGTERM
    assert "failed first" not in lines[-1]
    assert living(run_id_of(tmp_path)) == []


def test_whoever_lost_such_a_rank_is_none_either(tmp_path: Path) -> None:
    lost = "fail('orchestrator', 69, 'DependencyLost: value does not answer', secondary=True)"
    code, _ = with_scripts(tmp_path, value=group_that_ends(-signal.SIGTERM, -signal.SIGTERM), orchestrator=lost)
    assert code == 128 + signal.SIGTERM


def test_a_rank_that_failed_is_a_failure_although_its_agent_ended_the_others_by_the_same_signal(tmp_path: Path) -> None:
    code, lines = with_scripts(tmp_path, value=group_that_ends(1, -signal.SIGTERM))
    assert code == 70
    assert "value failed first" in lines[-1]


def test_what_killed_a_rank_in_an_earlier_start_says_nothing_of_this_one(tmp_path: Path) -> None:
    """The log of a group goes on where that start ended."""
    view, signals = Said(), Signals()
    scripts = dict.fromkeys(("inference", "policy", "value"), FOREVER) | {"orchestrator": "os.kill(os.getpid(), 15)"}
    try:
        run = supervisor(small_config(tmp_path), scripts, view, signals)
        (tmp_path / "run" / "logs" / "value.log").write_text(TABLE.format(code=-signal.SIGKILL, other=-signal.SIGTERM))
        code = run.run()
    finally:
        signals.close()
    assert code == 128 + signal.SIGTERM, view.lines


def everybody_of(run: Launched) -> list[int]:
    """Launcher, guards, agents, ranks, engine and orchestrator; a process that ends meanwhile is not among them."""
    pids = [run.process.pid, *run.left()]
    return [pid for pid in dict.fromkeys(pids) if pid != os.getpid()]


def test_all_at_once_while_it_trains_then_while_it_starts_then_twice(tmp_path: Path) -> None:
    """Scenario: SIGTERM to every process of a run, guards included, as a batch system sends it: each gets several. Then
    the same while a resumed start loads. Then two signals to the launcher of a third. Result: 75 each time, by
    themselves and with every trained step in the commit but for the third, and at once there; a commit always verifies.
    """
    with launched(tmp_path / "run", SAO) as run:
        tell(run)
        code, last = run.ended(within_s=GRACE_S + MARGIN_S)
    assert code == 75 and "--resume" in last
    (step,) = Commits(run.dir / "checkpoints").steps()
    trained = [entry["step"] for entry in read_lines(run.dir / "logs" / "ledger-policy.jsonl")]
    assert trained == list(range(step)), "every step that was trained is in the commit"
    assert_ended_by_itself(run)

    starting = resumed(run)
    time.sleep(1.5)  # nobody is ready: interpreters of ranks need longer for their imports
    tell(starting)
    code, _ = starting.ended(within_s=GRACE_S + MARGIN_S)
    assert code == 75
    assert Commits(run.dir / "checkpoints").steps() == [step]
    assert_ended_by_itself(starting)

    again = resumed(run)
    rows = run.dir / "metrics.jsonl"
    wait_until(lambda: max(row["step"] for row in read_lines(rows)) > step, deadline_s=120, what="the run to train")
    again.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    again.process.send_signal(signal.SIGTERM)
    code, _ = again.ended(within_s=AT_ONCE_S)
    assert code == 75
    commit = Commits(run.dir / "checkpoints").newest(allow_fallback=False)
    assert commit is not None and commit.step >= step


def tell(run: Launched) -> None:
    for pid in everybody_of(run):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue  # the signal before ended it


def assert_ended_by_itself(run: Launched) -> None:
    stopped = [event for event in read_lines(run.dir / "events.jsonl") if event["event"] == "stopped_by_signal"]
    assert stopped[-1]["killed"] == []
    assert not list((run.dir / "logs" / "failures").glob("*")), "an end on request is no failure"


def resumed(run: Launched) -> Launched:
    """The next start, as soon as its processes are known."""
    log = run.dir.with_suffix(".again.out")
    process = start_cli("run", SAO, "--run.dir", str(run.dir), *SMALL, "--resume", log=log)

    def context() -> dict:
        return json.loads((run.dir / "run.json").read_text())

    wait_until(lambda: context()["pids"].get("launcher") == process.pid, deadline_s=60, what="the next start")
    return Launched(process, run.dir, log, context())


@pytest.fixture(autouse=True)
def _model(tiny_model: Path) -> None:
    """Made before any clock runs."""
