"""The processes of one run, each under its guard: start, poll, end.

Notable:
- One pipe for all guards: its only writing end is here, so the end of this process, however it comes, ends the fleet.
  Closing it on purpose is the immediate stop.
- A guard that is itself killed cannot clean up; this process is a subreaper too and sweeps what carries the run's id
  in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.launch.planner import ProcessPlan
from services.runtime.guard import become_subreaper, descendants
from services.runtime.logs import log_path

RUN_ID_VARIABLE = "COUNTERPOINT_RUN_ID"
POLL_S = 0.05
_KILL_DEADLINE_S = 8.0
_PID_DEADLINE_S = 10.0


class Fleet:
    """Guarded processes; every one of them has ended when `stop` or `kill` returns."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._death_read, self._death_write = os.pipe()
        self._guards: dict[str, subprocess.Popen[bytes]] = {}
        self.log_starts: dict[str, int] = {}
        """bytes that each process's log held before it was started"""
        become_subreaper()

    @property
    def names(self) -> list[str]:
        """Names of all processes started, in order."""
        return list(self._guards)

    def start(self, process: ProcessPlan) -> None:
        """Start one process; its output goes to `logs/<name>.log`."""
        argv = [
            *(sys.executable, "-m", "services.runtime.guard", "--death-fd", str(self._death_read), "--"),
            *process.argv,
        ]
        env = {**os.environ, **process.env, RUN_ID_VARIABLE: self._run_id}
        with open(log_path(self._run_dir, process.name), "ab") as log:
            self.log_starts[process.name] = log.tell()
            self._guards[process.name] = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._death_read,),
                start_new_session=True,
            )

    def exits(self) -> dict[str, int]:
        """Exit codes of the processes that have ended, by name (128 + signal where one ended it)."""
        codes = {}
        for name, guard in self._guards.items():
            code = guard.poll()
            if code is not None:
                codes[name] = code if code >= 0 else 128 - code
        return codes

    def pids(self) -> dict[str, int]:
        """Process ids of the guarded processes; waits the moment that their guards need to start them."""
        until = time.monotonic() + _PID_DEADLINE_S
        pids: dict[str, int] = {}
        while len(pids) < len(self._guards) and time.monotonic() < until:
            for name, guard in self._guards.items():
                if name not in pids:
                    below = descendants(guard.pid)
                    if below:
                        pids[name] = below[0]
                    elif guard.poll() is not None:
                        pids[name] = guard.pid
            time.sleep(0.01)
        return pids

    def own_pids(self) -> list[int]:
        """All living processes of the fleet, guards and descendants."""
        return [pid for guard in self._guards.values() for pid in (guard.pid, *descendants(guard.pid))]

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to one process, if it still lives."""
        guard = self._guards.get(name)
        if guard is not None and guard.poll() is None:
            guard.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> list[str]:
        """Ask all to end, wait, then end the rest by force.

        Args:
            grace_s: How long they may take.
            hurry: Polled; True ends the wait at once.

        Returns:
            Names of the processes that had to be killed.
        """
        for guard in self._guards.values():
            if guard.poll() is None:
                guard.send_signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        while self._alive() and time.monotonic() < until and not hurry():
            time.sleep(POLL_S)
        late = self._alive()
        self.kill()
        return late

    def kill(self) -> None:
        """End everything now and wait until it is gone."""
        if self._death_write >= 0:
            os.close(self._death_write)
            os.close(self._death_read)
            self._death_write = self._death_read = -1
        until = time.monotonic() + _KILL_DEADLINE_S
        while self._alive() and time.monotonic() < until:
            time.sleep(POLL_S)
        for guard in self._guards.values():
            if guard.poll() is None:
                guard.kill()
                guard.wait()
        self._sweep_orphans()

    def _alive(self) -> list[str]:
        return [name for name, guard in self._guards.items() if guard.poll() is None]

    def _sweep_orphans(self) -> None:
        mark = f"{RUN_ID_VARIABLE}={self._run_id}".encode()
        until = time.monotonic() + _KILL_DEADLINE_S
        while time.monotonic() < until:
            orphans = [pid for pid in descendants(os.getpid()) if mark in _environment(pid)]
            if not orphans:
                return
            for pid in orphans:
                _kill_and_reap(pid)
            time.sleep(POLL_S)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # ended meanwhile


def _kill_and_reap(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass  # ended, or a grandchild that its own parent reaps
