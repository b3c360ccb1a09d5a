"""Results of a soak: kept line by line in a book, found again by the next soak, and made several at once.

Notable:
- Every result tells its machine and software: a book may hold results of several, brought together by `--merge`.
- A cell is a process of its own. Its runs have ports, directories and ids of their own, so that cells do not meet.
- The end of the soak, a signal's too, ends the cells under way, and each ends its run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

_PACKAGES = ("torch", "transformers", "numpy", "pyzmq")


def machine_here() -> str:
    """Processor and number of cores that this process may use."""
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def software_here() -> str:
    """The interpreter and the packages that matter, with their versions."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in _PACKAGES)])


@dataclasses.dataclass(kw_only=True)
class Row:
    """What became of a cell; what a line of a book lacks is that of the machine of the first books."""

    problems: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    date: str = ""
    machine: str = "Intel(R) Xeon(R) Processor, 2 cores"
    software: str = "Python 3.11.7, torch 2.13.0+cpu, transformers 5.24.0, numpy 2.4.6, pyzmq 27.3.0"
    at_once: int = 1
    """cells that ran beside each other, this one counted"""

    @property
    def key(self) -> str:
        """Which cell; no other of its part has the same."""
        raise NotImplementedError

    @property
    def failure(self) -> str:
        """The problems in one line."""
        return " / ".join(problem.splitlines()[0] for problem in self.problems)

    @property
    def place(self) -> tuple[str, str, int]:
        """Where it was made."""
        return self.machine, self.software, self.at_once


R = TypeVar("R", bound=Row)


class Book:
    """Results of one part, in a file that is only ever appended to."""

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self._path, self._kind = path, kind

    def newest(self) -> dict[str, Any]:
        """The newest result of every cell, by its date; of one minute the last line counts."""
        rows = sorted((self._kind(**line) for line in read_lines(self._path)), key=lambda row: row.date)
        return {row.key: row for row in rows}

    def add(self, row: Row) -> None:
        """Keep a result."""
        self._append([dataclasses.asdict(row)])

    def merge(self, path: Path) -> int:
        """Add what another book has and this one does not; returns how much that was."""
        own = [dataclasses.asdict(self._kind(**line)) for line in read_lines(self._path)]
        foreign = [dataclasses.asdict(self._kind(**line)) for line in read_lines(path)]
        new = [line for line in foreign if line not in own]
        self._append(new)
        return len(new)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON lines file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# ---------------------------------------------------------------------------------------------------------------------
# Cells at once


def carry_out(
    run: Callable[[str, int, Path], R], keys: Sequence[str], seed: int, folder: Path, *, jobs: int, until: float
) -> Iterator[tuple[str, R | None]]:
    """Results as they come, and None for a cell that died itself.

    Args:
        run: Makes one cell: its key, the seed, and a folder for its runs.
        keys: Which cells, in order.
        seed: Of the moments and the runs.
        folder: Every cell gets a folder in it.
        jobs: So many cells at once.
        until: On the monotonic clock: no cell begins after it.
    """
    spawn, waiting = multiprocessing.get_context("spawn"), list(reversed(keys))
    running: dict[Any, tuple[str, Any]] = {}
    try:
        while True:
            while waiting and len(running) < jobs and time.monotonic() < until:
                key = waiting.pop()
                receiver, sender = spawn.Pipe(duplex=False)
                arguments = (sender, run, key, seed, folder / key.replace("/", "-"), jobs)
                process = spawn.Process(target=_cell, args=arguments, name=key)
                process.start()
                sender.close()
                running[receiver] = (key, process)
            if not running:
                return
            for ready in wait(list(running)):
                key, process = running.pop(ready)
                yield key, _received(ready)
                process.join()
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def end_on_sigterm() -> None:
    """Let SIGTERM end this process in order, so that what it started is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _cell(
    sender: Connection, run: Callable[[str, int, Path], Row], key: str, seed: int, folder: Path, jobs: int
) -> None:
    end_on_sigterm()
    started, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    row = run(key, seed, folder)
    row.seconds, row.date = time.monotonic() - started, date
    row.machine, row.software, row.at_once = machine_here(), software_here(), jobs
    sender.send(row)


def _received(receiver: Any) -> Any:
    with contextlib.suppress(EOFError):  # it died without a word, but for its traceback
        return receiver.recv()
    return None
