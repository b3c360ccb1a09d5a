"""How far a process is, in a small file that whoever shows it reads: `RUN_DIR/progress.json`.

Notable:
- Written a few times a second at most, by one rename and without waiting for the disk: it is for people only, and a
  disk that does not take it stops nobody.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

PROGRESS_FILE = "progress.json"
INTERVAL_S = 0.5


class Progress(msgspec.Struct, frozen=True):
    """One look at a process."""

    done: int
    total: int
    unit: str
    """such as "updates" """
    note: str = ""
    """what else is worth seeing"""
    is_finished: bool = False
    """everything is done, and what it was for is there"""


class ProgressFile:
    """Writes it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PROGRESS_FILE
        self._next = 0.0

    def show(self, progress: Progress, *, now: bool = False) -> None:
        """Write it, unless that was done just now.

        Args:
            progress: How far the process is.
            now: Write it in any case.
        """
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        temporary = self._path.with_name(f".{PROGRESS_FILE}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            temporary.write_bytes(msgspec.json.encode(progress))
            temporary.replace(self._path)


def read_progress(run_dir: Path) -> Progress | None:
    """The last look; None where there is none yet."""
    try:
        return msgspec.json.decode((run_dir / PROGRESS_FILE).read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return None
