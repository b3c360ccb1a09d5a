"""The launcher inside of a job, with stand-ins for SLURM's commands: every role on each of its nodes, all or none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import to_toml
from services.launch.rundir import create_run_dir
from services.runtime.commits import Commits
from tests.commits import make_commit
from tests.conftest import ROOT
from tests.processes.slurm_stand_ins import install

BASE = """\
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[runtime]
shutdown_grace_s = 20.0
[deployment]
kind = "slurm"
"""
SPLIT = """\
gpus_per_node = 3
num_train_nodes = 2
num_policy_gpus = 2
num_value_gpus_per_train_node = 1
"""
DEDICATED = """\
gpus_per_node = 1
num_value_nodes = 1
"""
STARTS = {
    ("policy", "n1"),
    ("policy", "n2"),
    ("value", "n1"),
    ("value", "n2"),
    ("inference", "n1"),
    ("orchestrator", "n1"),
}
DEADLINE_S = 90.0


class Job:
    """A job of two nodes."""

    def __init__(
        self, folder: Path, model: Path, *, deployment: str = SPLIT, is_made: bool = True, **acts: dict
    ) -> None:
        """Make the run directory; `acts` by "role@node" say what a role does of itself."""
        self.folder = folder
        self.run_dir = folder / "run"
        self.commands = install(folder)
        (folder / "behaviour.json").write_text(json.dumps(acts))
        path = folder / "small.toml"
        path.write_text(BASE + deployment)
        config = resolve([path], [("run.dir", str(self.run_dir)), ("model.path", str(model))]).config
        self.words: list[str] = []
        if is_made:
            create_run_dir(self.run_dir, config, overwrite=False)
        else:
            (folder / "resolved.toml").write_text(to_toml(config))
            self.words = ["--config", str(folder / "resolved.toml")]

    @contextmanager
    def started(self, **env: str) -> Iterator[subprocess.Popen[bytes]]:
        """The launcher; killed with everything it started where the test fails."""
        job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1+n2", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"} | env
        paths = {"PATH": f"{self.commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-m", "services.launch.slurm_job", "--run-dir", str(self.run_dir), *self.words]
        with open(self.folder / "log", "ab") as log:
            launcher = subprocess.Popen(argv, cwd=self.folder, env=os.environ | paths | job, stdout=log, stderr=log)
        try:
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()

    def run(self, **env: str) -> int:
        """Its exit code."""
        with self.started(**env) as launcher:
            return launcher.wait(timeout=DEADLINE_S)

    def notes(self, word: str) -> list[tuple[str, str, int]]:
        """Role, node and pid of every note of a kind, in order."""
        path = self.folder / "notes"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(role, node, int(pid)) for kind, role, node, pid in lines if kind == word]

    def wait_for_all(self, num: int = len(STARTS)) -> None:
        """Until so many roles have started."""
        until = time.monotonic() + DEADLINE_S
        while len(self.notes("started")) < num or not (self.run_dir / "run.json").exists():
            assert time.monotonic() < until, self.said
            time.sleep(0.1)

    @property
    def said(self) -> str:
        """What the launcher printed."""
        return (self.folder / "log").read_text()

    def alive(self) -> list[str]:
        """Roles that still live."""
        return [f"{role}@{node}" for role, node, pid in self.notes("started") if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_every_role_starts_once_on_each_of_its_nodes_and_the_orchestrators_end_is_the_runs(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Both nodes have one address here, as on a machine that plays both: the ports are disjoint all the same."""
    job = Job(tmp_path, tiny_model, **{"orchestrator@n1": {"when_started": 6, "code": 0}})
    assert job.run() == 0, job.said
    started = [(role, node) for role, node, _ in job.notes("started")]
    assert sorted(started) == sorted(STARTS)
    assert sorted((role, node) for role, node, _ in job.notes("asked")) == sorted(STARTS - {("orchestrator", "n1")})
    assert job.alive() == []
    steps = [json.loads(line) for line in (tmp_path / "sruns").read_text().splitlines()]
    for role, words in steps:
        assert f"--job-name={role}" in words and "--kill-on-bad-exit=1" in words and "--overlap" in words
        assert "--cpus-per-task=2" in words and "--export=ALL" in words
    context = json.loads((job.run_dir / "run.json").read_text())
    assert [(host["name"], host["address"]) for host in context["hosts"]] == [("n1", "127.0.0.1"), ("n2", "127.0.0.1")]
    urls = [
        context[key] for key in ("policy_url", "value_url", "orchestrator_url", "policy_grid_url", "critic_grid_url")
    ]
    ports = [url.rpartition(":")[2] for url in [*urls, *context["inference_urls"]]]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("failing", ["inference@n1", "policy@n2", "value@n1", "orchestrator@n1"])
def test_a_failing_roles_code_is_the_jobs_and_ends_all(failing: str, tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, **{failing: {"when_started": 6, "code": 78}})
    assert job.run() == 78, job.said
    assert f"{failing.partition('@')[0]} failed first (exit code 78)" in job.said
    assert len(job.notes("started")) == len(STARTS)
    assert job.alive() == []


@pytest.mark.parametrize(("has_commit", "code"), [(True, 75), (False, 143)])
def test_a_launcher_that_is_told_to_end_asks_the_orchestrator_first(
    has_commit: bool, code: int, tmp_path: Path, tiny_model: Path
) -> None:
    job = Job(tmp_path, tiny_model)
    with job.started() as launcher:
        job.wait_for_all()
        if has_commit:
            make_commit(Commits(job.run_dir / "checkpoints"), 3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=DEADLINE_S) == code, job.said
    asked = [(role, node) for role, node, _ in job.notes("asked")]
    assert asked[0] == ("orchestrator", "n1") and sorted(asked) == sorted(STARTS)
    assert job.alive() == []


def test_a_launcher_that_is_killed_takes_every_step_with_it(tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model)
    with job.started() as launcher:
        job.wait_for_all()
        launcher.kill()
        launcher.wait()
    until = time.monotonic() + DEADLINE_S
    while job.alive():
        assert time.monotonic() < until, job.alive()
        time.sleep(0.1)


def test_a_job_that_slurm_starts_again_before_there_was_a_commit_begins_anew(tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, **{"inference@n1": {"when_started": 6, "code": 69}})
    (job.run_dir / "slurm-42.log").write_text("of SLURM\n")
    assert job.run() == 69, job.said
    (job.run_dir / "metrics.jsonl").write_text("of the first start\n")
    (tmp_path / "behaviour.json").write_text(json.dumps({"orchestrator@n1": {"when_started": 12, "code": 0}}))
    assert job.run() == 0, job.said
    assert "ended without a commit; starting anew" in job.said
    assert not (job.run_dir / "metrics.jsonl").exists() and not list((job.run_dir / "logs").glob("failures*"))
    assert (job.run_dir / "slurm-42.log").read_text() == "of SLURM\n"


def test_a_script_that_was_only_rendered_makes_the_run_directory_in_the_job(tmp_path: Path, tiny_model: Path) -> None:
    acts = {"orchestrator@n1": {"when_started": 6, "code": 0}}
    job = Job(tmp_path, tiny_model, is_made=False, **acts)
    assert not job.run_dir.exists()
    assert job.run() == 0, job.said
    assert (job.run_dir / "config.resolved.toml").read_text() == (tmp_path / "resolved.toml").read_text()


def test_a_port_lost_on_another_node_is_found_there_and_all_are_chosen_anew(tmp_path: Path, tiny_model: Path) -> None:
    """Scenario: the critic's port, on the second node, goes to a foreign program before the critic binds it.
    Result: that node says so, and everything starts again on other ports."""
    job = Job(tmp_path, tiny_model, deployment=DEDICATED, **{"value@n2": {"when_file": "stolen", "code": 69}})
    with job.started() as launcher:
        job.wait_for_all(4)
        port = int(json.loads((job.run_dir / "run.json").read_text())["value_url"].rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            (tmp_path / "behaviour.json").write_text(json.dumps({"orchestrator@n1": {"when_started": 8, "code": 0}}))
            (tmp_path / "stolen").touch()
            assert launcher.wait(timeout=DEADLINE_S) == 0, job.said
    events = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["ports"] for event in events if event["event"] == "ports_lost"] == [{"value_http_port": port}]
    assert f":{port}" not in (job.run_dir / "run.json").read_text()
    assert len(job.notes("started")) == 8 and job.alive() == []


def test_a_job_of_another_size_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model)
    assert job.run(SLURM_JOB_NODELIST="n1+n2+n3") == 78
    assert "the roles need 2 nodes, job 42 has 3" in job.said
    assert job.notes("started") == []
