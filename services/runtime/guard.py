"""A small wrapper around every process of a run: nothing that the process starts outlives it or the launcher.

Usage: `python -m services.runtime.guard --death-fd N -- argv...`

Notable:
- Child subreaper: orphans below it (workers of torchrun and of vLLM live in sessions of their own) are handed to the
  guard by the kernel, so walking parent ids finds every one of them.
- The launcher holds the only writing end of the pipe N; when it ends, for whatever reason, the pipe reports end of
  file and the guard kills everything below it. The launcher closes the pipe itself to end a run at once.
- The child dies by PDEATHSIG if the guard itself is killed; the launcher then sweeps what the child had started.
- SIGTERM and SIGINT are forwarded. The guard ends with the child's code, or 128 + signal.
- Whoever holds the pipe can also speak through it: a byte is the number of a signal for the child. Where a guard is on
  another node (`services.launch.on_node`), no other way leads to that process alone.
- Standard library only, and nothing heavy: there is one guard per process of a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
EXIT_USAGE = 64
EXIT_CANNOT_START = 69
GUARD_PID_VARIABLE = "COUNTERPOINT_GUARD_PID"
ASKING = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process to end."""

_SWEEP_DEADLINE_S = 5.0


def main(argv: list[str]) -> int:
    """Run the command in `argv` under guard and return its exit code."""
    if len(argv) < 4 or argv[0] != "--death-fd" or argv[2] != "--" or not argv[1].isdigit():
        sys.stderr.write("usage: python -m services.runtime.guard --death-fd N -- argv...\n")
        return EXIT_USAGE
    return guard(argv[3:], int(argv[1]))


def guard(command: list[str], death_fd: int, *, forwarded: tuple[signal.Signals, ...] = ASKING) -> int:
    """Run a command under guard.

    Args:
        command: An argv list.
        death_fd: A pipe: end of file ends everything, a byte is a signal for the command.
        forwarded: Signals to the guard that the command gets too.

    Returns:
        The command's exit code, 128 + signal where one ended it.
    """
    os.set_inheritable(death_fd, False)
    become_subreaper()
    child = _start(command)
    code = _watch(child, death_fd, forwarded)
    sweep(_SWEEP_DEADLINE_S)
    return code


def become_subreaper() -> None:
    """Have orphaned descendants handed to this process instead of to pid 1."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root_pid: int) -> list[int]:
    """All living processes below `root_pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent = _parent_of(int(entry))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry))
    found = [root_pid]
    for pid in found:
        found.extend(children.get(pid, []))
    return found[1:]


def sweep(deadline_s: float) -> None:
    """SIGKILL everything below this process and reap it; orphans appear as they are handed over, so look again."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        for pid in descendants(os.getpid()):
            _kill(pid, signal.SIGKILL)
        if not _reap_all():
            return
        time.sleep(0.01)


def _start(command: list[str]) -> int:
    guard_pid = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    _become(command, guard_pid)


def _become(command: list[str], guard_pid: int) -> NoReturn:
    """In the child: new session, die with the guard, then exec."""
    try:
        os.setsid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard_pid:
            os._exit(EXIT_CANNOT_START)
        os.environ[GUARD_PID_VARIABLE] = str(guard_pid)
        os.execvp(command[0], command)  # noqa: S606 - an argv list of the planner, no shell
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(EXIT_CANNOT_START)


def _watch(child: int, death_fd: int, forwarded: tuple[signal.Signals, ...]) -> int:
    """Forward signals until the child ends or the launcher is gone; return the code to end with."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    code = _reap(child)  # it may have ended before the handlers were in place
    while code is None:
        readable, _, _ = select.select([wake_read, death_fd], [], [], 5.0)
        if death_fd in readable:
            words = _read(death_fd)
            if not words:
                return 128 + signal.SIGKILL
            _pass_on(words, ASKING, child)
        if wake_read in readable:
            _pass_on(os.read(wake_read, 512), forwarded, child)
        code = _reap(child)
    return code


def _read(death_fd: int) -> bytes:
    """What was said; nothing where the other end is gone."""
    try:
        return os.read(death_fd, 512)
    except OSError:
        return b""


def _pass_on(numbers: bytes, allowed: tuple[signal.Signals, ...], child: int) -> None:
    for number in numbers:
        if number in allowed:
            _kill(child, number)


def _reap(child: int) -> int | None:
    """Collect ended children, adopted ones too; the child's exit code once it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return EXIT_CANNOT_START
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _reap_all() -> bool:
    """Collect what has ended; False when no child is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended on its own
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
