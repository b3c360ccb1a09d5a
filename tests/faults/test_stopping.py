"""Whole runs that are stopped or lose a process: in time, by the right name and code, and nothing is left.

Notable:
- Every test starts one run of the demo, made small, and waits until it trains; so there are as few as there can be.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.runtime.commits import Commits
from services.runtime.ports import is_free
from tests.runs import ROOT, processes_of, read_lines, run_cli, start_cli, wait_until

SAO = str(ROOT / "configs" / "demo" / "sao.toml")
GRPO = str(ROOT / "tests" / "processes" / "configs" / "grpo.toml")
SMALL = ("--orchestrator.batch_size", "16", "--orchestrator.max_steps", "10000", "--eval", "none")
GRACE_S = 10.0
"""`runtime.shutdown_grace_s` of a local run."""
MARGIN_S = 5.0
"""For interpreters to end on a loaded machine; a process that ignores its signal takes longer than this."""


@dataclass
class Launched:
    """A run that trains."""

    process: subprocess.Popen[bytes]
    dir: Path
    log: Path
    context: dict[str, Any]

    def ended(self, *, within_s: float) -> tuple[int, str]:
        """Exit code and last line, once the launcher has ended in time and nothing of the run is left."""
        started = time.monotonic()
        code = self.process.wait(timeout=within_s + 60)
        elapsed = time.monotonic() - started
        output = self.log.read_text()
        assert elapsed < within_s, f"took {elapsed:.1f} s:\n{output[-2000:]}"
        assert self.left() == {}
        assert self.taken_ports() == []
        return code, output.strip().splitlines()[-1]

    def left(self) -> dict[int, str]:
        """Living processes that name the run directory, or carry the run's id in their environment."""
        mark = f"COUNTERPOINT_RUN_ID={self.context['run_id']}".encode()
        found = processes_of(self.dir)
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # ended meanwhile
        return found

    def taken_ports(self) -> list[int]:
        """Ports of the run that somebody still listens on."""
        urls = [*self.context["inference_urls"], *(v for k, v in self.context.items() if k.endswith("_url") and v)]
        return [port for url in urls if (port := urlsplit(url).port) is not None and not is_free(port)]


@contextmanager
def launched(run_dir: Path, config: str, *settings: str) -> Iterator[Launched]:
    """Start a run and wait until the policy has published twice."""
    log = run_dir.with_suffix(".out")
    process = start_cli("run", config, "--run.dir", str(run_dir), *SMALL, *settings, log=log)

    def trains() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        metrics = run_dir / "metrics.jsonl"
        return metrics.is_file() and sum(row["stream"] == "policy" for row in read_lines(metrics)) >= 2

    try:
        wait_until(trains, deadline_s=200, what="the run to train")
        yield Launched(process, run_dir, log, json.loads((run_dir / "run.json").read_text()))
    finally:
        if process.poll() is None:
            process.kill()  # the guards end the rest
            process.wait()


def test_ctrl_c_commits_ends_everything_in_time_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    """Of a run that asks for its token, which is another one after the resume."""
    asking = ("--runtime.token", "always")
    with launched(tmp_path / "run", SAO, *asking) as run:
        first = [(run.dir / name).read_text() for name in ("token", "grid.key")]
        run.process.send_signal(signal.SIGINT)
        code, last = run.ended(within_s=GRACE_S + MARGIN_S)
    assert code == 75
    assert "--resume" in last
    stopped = next(e for e in read_lines(run.dir / "events.jsonl") if e["event"] == "stopped_by_signal")
    assert stopped["killed"] == [], "everything ends by itself"
    assert not list((run.dir / "logs").glob("failures/*")), "an end on request is no failure"
    (step,) = Commits(run.dir / "checkpoints").steps()

    more = (*SMALL, *asking, "--orchestrator.max_steps", str(step + 2), "--resume")
    resumed = run_cli(run.dir, SAO, *more)
    assert resumed.code == 0, resumed.output[-3000:]
    assert not {*first} & {(run.dir / name).read_text() for name in ("token", "grid.key")}
    assert resumed.context["epoch"] == 2 and resumed.context["run_id"] == run.context["run_id"]
    for stream in ("rollout", "critic", "policy"):
        assert [row["step"] for row in resumed.rows(stream)] == list(range(step + 2)), stream
    assert [row["value/updates"] for row in resumed.rows("critic")] == [2 * (n + 1) for n in range(step + 2)]
    assert [row["policy/version"] for row in resumed.rows("policy")] == list(range(1, step + 3))


def test_sigterm_to_a_rank_of_the_policy_commits_and_ends_everything_in_time(tmp_path: Path) -> None:
    """Whoever is told to end: the run ends as a whole, between two steps, with a commit."""
    with launched(tmp_path / "run", GRPO) as run:
        ledger = read_lines(run.dir / "logs" / "ledger-policy.jsonl")
        os.kill(next(entry["pid"] for entry in ledger if entry["rank"] == 1), signal.SIGTERM)
        code, last = run.ended(within_s=GRACE_S + 2 * MARGIN_S)
    assert code == 75
    assert "--resume" in last
    assert len(Commits(run.dir / "checkpoints").steps()) == 1


def test_a_killed_rank_of_the_critic_is_named(tmp_path: Path) -> None:
    with launched(tmp_path / "run", SAO) as run:
        ledger = read_lines(run.dir / "logs" / "ledger-critic.jsonl")
        os.kill(next(entry["pid"] for entry in ledger if entry["rank"] == 1), signal.SIGKILL)
        code, last = run.ended(within_s=GRACE_S + 2 * MARGIN_S)
    assert code == 69
    assert last.startswith("value-1 failed first (exit code 69): killed by SIGKILL")
    assert str(run.dir / "logs" / "value.log") in last


def test_a_killed_inference_server_is_named_and_the_run_goes_on_where_it_may(tmp_path: Path) -> None:
    """One restart is allowed: the first loss is told and survived, the second ends the run."""
    allowed = ("--checkpoint.interval_steps", "1", "--deployment.max_restarts", "1")
    named = "inference failed first (exit code 69): killed by SIGKILL"
    with launched(tmp_path / "run", SAO, *allowed) as run:
        wait_until(lambda: bool(Commits(run.dir / "checkpoints").steps()), deadline_s=60, what="a commit")
        os.kill(run.context["pids"]["inference"], signal.SIGKILL)

        def trains_again() -> bool:
            assert run.process.poll() is None, run.log.read_text()[-3000:]
            resumed = [event["step"] for event in read_lines(run.dir / "events.jsonl") if event["event"] == "resumed"]
            rows = read_lines(run.dir / "metrics.jsonl")
            return bool(resumed) and max(row["step"] for row in rows if row["stream"] == "policy") > resumed[0]

        wait_until(trains_again, deadline_s=200, what="the run to go on")
        assert named in run.log.read_text() and "restart 1 of 1" in run.log.read_text()
        os.kill(json.loads((run.dir / "run.json").read_text())["pids"]["inference"], signal.SIGKILL)
        code, last = run.ended(within_s=GRACE_S + 2 * MARGIN_S)
    assert code == 69
    assert last.startswith(named)


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """Everything is gone and every port free within ten seconds, without anybody cleaning up."""
    with launched(tmp_path / "run", SAO) as run:
        assert len(run.left()) >= 8, "launcher, four guards, two agents, three ranks, engine and orchestrator"
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not run.left(), deadline_s=10, what="everything to be gone")
        assert run.taken_ports() == []


@pytest.fixture(autouse=True)
def _model(tiny_model: Path) -> None:
    """Made before any clock runs."""
