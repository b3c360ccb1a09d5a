"""The job script under bash, with a small script for the launcher: signals, exit codes, and when the job comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.launch.planner import Site
from services.launch.slurm import Job, render
from tests.conftest import ROOT

CONFIG = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[deployment]
kind = "slurm"
[slurm]
setup = ["export FROM_SETUP='a b'"]
"""
WAITS = """
trap 'echo TERM >> "{folder}/told"; sleep 0.3; exit 75' TERM
echo "$FROM_SETUP $PWD $*" > "{folder}/started"
while :; do sleep 0.05; done
"""
DEADLINE_S = 60.0


class Batch:
    """The script of a job, as slurmd runs it."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.folder = folder
        path = folder / "small.toml"
        path.write_text(CONFIG)
        config = resolve([path], [("run.dir", str(folder / "run"))]).config
        self._put("python", launcher.replace("{folder}", str(folder)))
        self._put("scontrol", f'echo "$@" >> "{folder}/scontrol"')
        job = Job(folder / "run", folder, Site(ROOT, str(folder / "bin" / "python")), folder / "run")
        (folder / "job.sbatch").write_text(render(config, job))

    def _put(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        env = os.environ | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
        argv = ["bash", str(self.folder / "job.sbatch")]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as batch:
            try:
                yield batch
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(batch.pid, signal.SIGKILL)

    def run(self) -> int:
        with self.started() as batch:
            return batch.wait(timeout=DEADLINE_S)

    def wait_for(self, name: str) -> str:
        until = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists() or not (self.folder / name).read_text():
            assert time.monotonic() < until, f"no {name}"
            time.sleep(0.02)
        return (self.folder / name).read_text()

    @property
    def requeued(self) -> list[str]:
        path = self.folder / "scontrol"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("code", [0, 64, 69, 70, 73, 78, 130, 137, 143])
def test_the_launchers_exit_code_is_the_jobs_and_brings_no_job_back(code: int, tmp_path: Path) -> None:
    batch = Batch(tmp_path, f"exit {code}")
    assert batch.run() == code
    assert batch.requeued == []


def test_the_launcher_starts_once_in_the_users_folder_after_the_setup(tmp_path: Path) -> None:
    batch = Batch(tmp_path, WAITS)
    with batch.started() as running:
        words = f"a b {tmp_path} -m services.launch.slurm_job --run-dir {tmp_path}/run"
        assert batch.wait_for("started").strip() == words
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=DEADLINE_S)


def test_a_job_told_to_end_ahead_passes_it_on_as_sigterm_waits_and_comes_back(tmp_path: Path) -> None:
    """Scenario: SLURM sends USR1 to the batch shell alone; the launcher commits and ends with 75.
    Result: it was told once, the shell waited for it, the job is requeued by its id, and 75 is its code."""
    batch = Batch(tmp_path, WAITS)
    with batch.started() as running:
        batch.wait_for("started")
        running.send_signal(signal.SIGUSR1)
        assert running.wait(timeout=DEADLINE_S) == 75
        assert running.stdout is not None
        assert "the launcher ended with exit code 75 after USR1" in running.stdout.read()
    assert (tmp_path / "told").read_text() == "TERM\n"
    assert batch.requeued == ["requeue 42"]


def test_75_without_being_told_by_the_script_comes_back_too(tmp_path: Path) -> None:
    batch = Batch(tmp_path, "exit 75")
    assert batch.run() == 75
    assert batch.requeued == ["requeue 42"]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_a_cancelled_job_does_not_come_back(first: signal.Signals, tmp_path: Path) -> None:
    """SLURM would start a cancelled job again if its script asked for it while it ends."""
    batch = Batch(tmp_path, WAITS)
    with batch.started() as running:
        batch.wait_for("started")
        running.send_signal(first)
        batch.wait_for("told")
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=DEADLINE_S) == 75
    assert batch.requeued == []


def test_a_run_that_was_told_to_end_but_failed_does_not_come_back(tmp_path: Path) -> None:
    batch = Batch(tmp_path, WAITS.replace("exit 75", "exit 70"))
    with batch.started() as running:
        batch.wait_for("started")
        running.send_signal(signal.SIGUSR1)
        assert running.wait(timeout=DEADLINE_S) == 70
    assert batch.requeued == []
