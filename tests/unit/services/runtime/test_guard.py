"""The guard with real processes: nothing below it survives, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.runtime.guard import descendants

ROOT = Path(__file__).parents[4]
GRANDCHILDREN = r"""
import os, subprocess, sys, time
# a grandchild in a session of its own, and one that has been orphaned on purpose
a = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"%d\n" % os.getpid())  # one write a line: two processes share the pipe
        time.sleep(600)
    os._exit(0)
os.wait()
os.write(1, b"%d\n" % a.pid)
{then}
"""


class Guarded:
    """A guard around a script, and the pipe that stands for the launcher's life."""

    def __init__(self, script: str) -> None:
        death_read, self.death_write = os.pipe()
        argv = [sys.executable, "-m", "services.runtime.guard", "--death-fd", str(death_read), "--"]
        self.process = subprocess.Popen(
            [*argv, sys.executable, "-c", script],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(death_read,),
            start_new_session=True,
        )
        os.close(death_read)

    def pids(self, num: int) -> list[int]:
        assert self.process.stdout is not None
        return [int(self.process.stdout.readline()) for _ in range(num)]

    def close(self) -> None:
        if self.death_write >= 0:
            os.close(self.death_write)
            self.death_write = -1
        self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def guard(request):
    guarded = Guarded(request.param)
    yield guarded
    guarded.close()


def is_gone(pid: int, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # dead; whoever adopted it has not looked yet
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("guard", [GRANDCHILDREN.format(then="time.sleep(600)")], indirect=True)
def test_when_the_launcher_is_gone_everything_below_goes(guard):
    pids = guard.pids(2)
    assert set(pids) <= set(descendants(guard.process.pid))
    os.close(guard.death_write)
    guard.death_write = -1
    assert guard.process.wait(timeout=10) == 137
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("guard", [GRANDCHILDREN.format(then="sys.exit(7)")], indirect=True)
def test_when_the_child_ends_its_orphans_are_killed_and_its_code_is_kept(guard):
    pids = guard.pids(2)
    assert guard.process.wait(timeout=10) == 7
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("guard", ["import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], indirect=True)
def test_a_child_ended_by_a_signal_is_reported_as_128_plus_signal(guard):
    assert guard.process.wait(timeout=10) == 128 + signal.SIGSEGV


@pytest.mark.parametrize(
    "guard",
    [
        """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(600)
"""
    ],
    indirect=True,
)
def test_sigterm_is_forwarded_to_the_child(guard):
    guard.pids(1)
    guard.process.send_signal(signal.SIGTERM)
    assert guard.process.wait(timeout=10) == 5


@pytest.mark.parametrize("guard", ["import os, time; print(os.getpid(), flush=True); time.sleep(600)"], indirect=True)
def test_when_the_guard_is_killed_the_child_dies_with_it(guard):
    (pid,) = guard.pids(1)
    guard.process.kill()
    assert is_gone(pid)


def test_a_command_that_cannot_start_is_69_and_a_wrong_call_is_64():
    read, write = os.pipe()
    argv = [sys.executable, "-m", "services.runtime.guard"]
    call = [*argv, "--death-fd", str(read), "--", "/nowhere/program"]
    done = subprocess.run(call, cwd=ROOT, pass_fds=(read,), capture_output=True, text=True, timeout=30)
    assert done.returncode == 69
    assert "cannot start /nowhere/program: No such file" in done.stderr
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=30).returncode == 64
    os.close(read)
    os.close(write)


def test_the_guard_imports_nothing_heavy():
    heavy = {"loguru", "msgspec", "pydantic"}
    script = f"import sys; import services.runtime.guard; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
