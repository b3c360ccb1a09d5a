"""The process boundary, from outside: exit codes, failure records, logs, signals, the parent's death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from services.runtime.lifecycle import GUARD_PID_VARIABLE, FailureRecord, cause_of, read_failures

ROOT = Path(__file__).parents[4]
PRELUDE = """
import os, sys, threading, time
from pathlib import Path
from services.runtime.lifecycle import install_stop_handlers, run_process
from services.wire.errors import *
run_dir = Path(sys.argv[1])
def go(main): run_process("value-1", run_dir, main)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.resolved.toml").write_text('[monitor]\nlog_level = "DEBUG"\n')
    return tmp_path


def start(run_dir: Path, body: str, **kwargs) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(run_dir)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **kwargs.pop("env", {})}
    return subprocess.Popen(
        argv, cwd=run_dir.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def finish(run_dir: Path, body: str, **kwargs) -> tuple[int, str]:
    process = start(run_dir, body, **kwargs)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def record(run_dir: Path) -> FailureRecord:
    (found,) = read_failures(run_dir)
    return found


@pytest.mark.parametrize(
    ("raising", "code", "cause", "secondary"),
    [
        (
            "ConfigError(['a.toml:1: x: bad; fix: y', 'second'])",
            78,
            "ConfigError: a.toml:1: x: bad; fix: y; second",
            False,
        ),
        ("DeadlineExceeded('the critic', 3)", 69, "DeadlineExceeded: waited 3 s for the critic", True),
        ("PeerLost('rank 0')", 69, "PeerLost: rank 0", True),
        ("NonFiniteError('loss')", 70, "NonFiniteError: loss", False),
        ("CannotWrite('disk')", 73, "CannotWrite: disk", False),
        ("OSError(28, 'No space left on device')", 73, "OSError: [Errno 28] No space left on device", False),
        ("ZeroDivisionError('x')", 70, "ZeroDivisionError: x", False),
        ("ExceptionGroup('two', [PeerLost('p'), ValueError('v')])", 70, "ValueError: v", False),
        ("KeyboardInterrupt()", 130, "KeyboardInterrupt", False),
    ],
)
def test_an_error_becomes_its_exit_code_and_a_record(run_dir, raising, code, cause, secondary):
    returncode, stderr = finish(run_dir, f"def main(): raise {raising}\ngo(main)")
    found = record(run_dir)
    assert returncode == code
    assert (found.name, found.exit_code, found.cause, found.secondary) == ("value-1", code, cause, secondary)
    assert cause in stderr
    assert cause in (run_dir / "logs" / "value-1.log").read_text()


def test_returning_means_success_even_with_a_stuck_thread(run_dir):
    body = "def main(): threading.Thread(target=time.sleep, args=(600,)).start()\ngo(main)"
    assert finish(run_dir, body)[0] == 0
    assert read_failures(run_dir) == []
    assert "ends normally" in (run_dir / "logs" / "value-1.log").read_text()


def test_sys_exit_keeps_its_code_and_leaves_no_record(run_dir):
    assert finish(run_dir, "go(lambda: sys.exit(143))")[0] == 143
    assert read_failures(run_dir) == []


def test_a_process_without_a_run_directory_is_a_configuration_error(tmp_path):
    code, stderr = finish(tmp_path / "absent", "go(lambda: None)")
    assert code == 78
    assert "config.resolved.toml: missing" in stderr


def test_a_foreign_package_of_our_name_is_named(run_dir, tmp_path):
    intruder = tmp_path / "elsewhere" / "value_service" / "__init__.py"
    intruder.parent.mkdir(parents=True)
    intruder.write_text("")
    path = f"{tmp_path / 'elsewhere'}:{ROOT}"
    code, stderr = finish(run_dir, "go(lambda: None)", env={"PYTHONPATH": path})
    assert code == 78
    assert f"package value_service comes from {intruder}" in stderr


WAITING = """
def main():
    stop = install_stop_handlers()
    print("ready", flush=True)
    stop.wait(60)
    print("stopping", flush=True)
    time.sleep({pause})
go(main)
"""


def test_the_first_signal_asks_and_the_second_ends_at_once(run_dir):
    process = start(run_dir, WAITING.format(pause=60))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    process.communicate()


def test_in_a_run_a_second_signal_changes_nothing(run_dir):
    """Whoever signals all processes of a run at once signals each several times: by its guard and its agent too."""
    process = start(run_dir, WAITING.format(pause=1), env={GUARD_PID_VARIABLE: str(os.getpid())})
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    process.communicate()


def test_a_process_that_stops_when_asked_ends_with_zero(run_dir):
    process = start(run_dir, WAITING.format(pause=0))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    process.communicate()


def test_a_process_dies_with_its_parent(run_dir, tmp_path):
    child = PRELUDE + "def main():\n    print(os.getpid(), flush=True)\n    time.sleep(600)\ngo(main)"
    argv = f"[sys.executable, '-c', {child!r}, {str(run_dir)!r}]"
    parent = f"import subprocess, sys\nsubprocess.Popen({argv})\nsys.stdin.read()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", parent], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.communicate()


def test_records_are_read_in_the_order_of_failure_and_garbage_is_ignored(run_dir):
    folder = run_dir / "logs" / "failures"
    folder.mkdir(parents=True)
    for name, time_s in (("policy-0", 2.0), ("value-0", 1.0)):
        row = {"name": name, "pid": 1, "exit_code": 70, "cause": "x", "time_s": time_s}
        (folder / f"{name}.json").write_text(json.dumps(row))
    (folder / "half.json").write_text('{"name": "ha')
    assert [found.name for found in read_failures(run_dir)] == ["value-0", "policy-0"]


def test_a_cause_is_one_line():
    assert cause_of(ValueError("first\n\n  second")) == "ValueError: first; second"
    assert cause_of(ValueError()) == "ValueError"
