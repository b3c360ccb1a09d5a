"""The process boundary: how a process of a run starts, fails and ends.

Notable:
- `run_process` is one of the three places that may catch exceptions: it turns the classes of `services.wire.errors`
  into exit codes and leaves a failure record for the supervisor, which names the process that failed first.
- PDEATHSIG alone is not enough (it fires when the spawning *thread* ends and is lost over a double fork), so it is
  the second line: the guard around every process (`services.runtime.guard`) is the first.
- A process ends by `os._exit`, failed or not: neither threads of libraries nor their exit hooks (process groups,
  sockets, executors) can keep it alive past the grace time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from loguru import logger

from services.runtime.durable import write_atomic
from services.runtime.logs import setup_logging
from services.runtime.roots import check_root
from services.wire.errors import EXIT_BUG, EXIT_CANNOT_WRITE, EXIT_DONE, ConfigError, CounterpointError, DependencyLost

GUARD_PID_VARIABLE = "COUNTERPOINT_GUARD_PID"
"""Set by the guard in its child's environment."""

_STOP_REQUESTED = threading.Event()
"""Set once a signal has asked this process to end."""
_PR_SET_PDEATHSIG = 1
_CANNOT_WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS})
_MAX_CAUSE_CHARS = 600


class FailureRecord(msgspec.Struct, frozen=True):
    """What a process says about its own failure: `RUN_DIR/logs/failures/<name>.json`."""

    name: str
    pid: int
    exit_code: int
    cause: str
    """One line."""
    time_s: float
    """Unix time of the failure."""
    secondary: bool = False
    """True when the process only lost something else (`DependencyLost`): the cause is likely elsewhere."""


def run_process(name: str, run_dir: Path, main: Callable[[], None]) -> NoReturn:
    """Run `main` as the process `name` of the run in `run_dir`, and end this process with the right exit code.

    Args:
        name: "orchestrator", "inference", or a rank such as "value-0"; names the log and the failure record.
        run_dir: The run directory.
        main: The whole work of the process; returning means success.
    """
    try:
        die_with_parent()
        faulthandler.enable()
        setup_logging(name, run_dir, level=_log_level(run_dir))
        check_root()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it can end in order, a request just ends it
        main()
    except SystemExit as error:
        logger.info("{} ends with exit code {}", name, error.code)
        leave(error.code if isinstance(error.code, int) else EXIT_BUG if error.code else EXIT_DONE)
    except BaseException as error:  # the process boundary
        _fail(name, run_dir, error)
    if _STOP_REQUESTED.is_set():
        _note_the_request(name, run_dir)
    logger.info("{} ends normally", name)
    leave(EXIT_DONE)


def run_rank(group: str, run: Callable[[Path], None], *, description: str | None) -> NoReturn:
    """Entry point of one rank of a torchrun group: `run` on the `--run-dir` of the command line, by `run_process`.

    Args:
        group: Its name; with the rank that torchrun gives it, this process's.
        run: The whole work of the rank, in the run directory.
        description: For `--help`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    run_dir: Path = parser.parse_args().run_dir
    run_process(f"{group}-{os.environ.get('RANK', '0')}", run_dir, lambda: run(run_dir))


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; leave at once if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    guard_pid = os.environ.get(GUARD_PID_VARIABLE)
    if guard_pid is not None and guard_pid != "1" and os.getppid() == 1:
        os._exit(DependencyLost.exit_code)


def install_stop_handlers(on_stop: Callable[[], object] | None = None) -> threading.Event:
    """Make SIGTERM and SIGINT set an event instead of ending the process.

    Of a process alone a second signal ends it at once. In a run it changes nothing: a request to all processes at once
    comes to each from several sides (its sender, its guard, its torchrun agent, the launcher), and the immediate end is
    the launcher's, which counts what it gets itself.

    Args:
        on_stop: Called (in the main thread, between two bytecodes) at the first signal; may wake an event loop.

    Returns:
        The event; poll it between two pieces of work.
    """
    stop_requested, is_in_a_run = threading.Event(), GUARD_PID_VARIABLE in os.environ

    def handle(signum: int, _frame: Any) -> None:
        if stop_requested.is_set():
            if not is_in_a_run:
                os._exit(128 + signum)
            return
        stop_requested.set()
        _STOP_REQUESTED.set()
        if on_stop is not None:
            on_stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop_requested


def exit_code_of(error: BaseException) -> int:
    """The exit code a process ends with after `error`."""
    if isinstance(error, CounterpointError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE_ERRNOS:
        return EXIT_CANNOT_WRITE
    return EXIT_BUG


def cause_of(error: BaseException) -> str:
    """One line saying what `error` is."""
    error = _innermost(error)
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text}"[:_MAX_CAUSE_CHARS] if text else type(error).__name__


def failure_path(run_dir: Path, name: str) -> Path:
    """Where the failure record of process `name` lies."""
    return run_dir / "logs" / "failures" / f"{name}.json"


def request_path(run_dir: Path, name: str) -> Path:
    """Where process `name` notes that it ended because a signal asked it to."""
    return run_dir / "logs" / "asked-to-end" / name


def _note_the_request(name: str, run_dir: Path) -> None:
    path = request_path(run_dir, name)
    with contextlib.suppress(OSError):  # a full disk must not make a failure of it
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def read_failures(run_dir: Path) -> list[FailureRecord]:
    """All failure records of a run, oldest first; a half-written or foreign file is ignored."""
    records = []
    for path in (run_dir / "logs" / "failures").glob("*.json"):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=FailureRecord))
        except (msgspec.DecodeError, OSError):
            continue
    return sorted(records, key=lambda record: record.time_s)


def _fail(name: str, run_dir: Path, error: BaseException) -> NoReturn:
    root = _innermost(error)
    code = exit_code_of(root)
    record = FailureRecord(
        name=name,
        pid=os.getpid(),
        exit_code=code,
        cause=cause_of(root),
        time_s=time.time(),
        secondary=isinstance(root, DependencyLost),
    )
    try:
        if isinstance(root, CounterpointError | KeyboardInterrupt):
            logger.opt(exception=error).debug("traceback")
            logger.error("{} ends with exit code {}: {}", name, code, record.cause)
        else:
            logger.opt(exception=error).error("{} ends with exit code {}: {}", name, code, record.cause)
        path = failure_path(run_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(msgspec.to_builtins(record)).encode())
    except Exception as second:  # a full disk must not hide the exit code
        sys.stderr.write(f"{name}: {record.cause} (and no failure record: {second})\n")
    leave(code)


def leave(code: int = EXIT_DONE) -> NoReturn:
    """End this process now, its work done or failed, waiting for no thread or exit hook of a library.

    With a process group of torch the interpreter's own clean-up is a hazard: threads that are destroyed while they run
    abort the process now and then, after all its work is done ("terminate called without an active exception").
    """
    with contextlib.suppress(Exception):  # a closed pipe or a full disk must not change the exit code
        logger.remove()  # flushes and closes the sinks
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _innermost(error: BaseException) -> BaseException:
    """Look into exception groups (asyncio.TaskGroup makes them); what is not a mere loss of another comes first."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        primary = [inner for inner in error.exceptions if not isinstance(inner, DependencyLost)]
        error = (primary or list(error.exceptions))[0]
    return error


def _log_level(run_dir: Path) -> str:
    path = run_dir / "config.resolved.toml"
    if not path.is_file():
        raise ConfigError([f"{path}: missing; fix: start processes by `counterpoint run`, which writes it"])
    return tomllib.loads(path.read_text()).get("monitor", {}).get("log_level", "INFO")
