"""Who is reading a commit: an empty file in it for as long as the reader lives, so that nobody deletes it meanwhile.

Notable:
- The name says everything, so a lease is there in one step: `.reader-<pid>-<start>-<number>-<host>`. The start time
  tells a process from a later one with the same pid.
- A lease of a dead process does not count. Of another host's processes nothing is known: their leases count for
  six hours, longer than any load and than any jump of a clock.
- Reader and remover cannot miss each other: the reader writes its lease and then looks for the mark, the remover
  writes its mark and then looks for leases. Where both see the other, both step back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from services.wire.errors import CommitError

DELETING = ".deleting"
"""Mark of a commit that is about to be removed."""

_FOREIGN_LEASE_S = 6 * 3600.0
_LEASE = re.compile(r"\.reader-(?P<pid>\d+)-(?P<start>\d+)-\d+-(?P<host>.+)")
_numbers = itertools.count()


@contextlib.contextmanager
def reader_lease(folder: Path) -> Iterator[None]:
    """Keep a commit's folder from being removed; where it cannot be written to, warn and go on.

    Raises:
        CommitError: There is no such folder, or it is about to be removed.
    """
    pid = os.getpid()
    lease = folder / f".reader-{pid}-{_start_of(pid)}-{next(_numbers)}-{socket.gethostname()}"
    is_held = True
    try:
        lease.touch(exist_ok=False)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CommitError(f"{folder} does not exist") from error
    except OSError as error:
        is_held = False
        logger.warning("{} is read without a lease ({}): do not remove it meanwhile", folder, error.strerror)
    try:
        if (folder / DELETING).exists() or (is_held and not lease.exists()):
            raise CommitError(f"{folder} is being removed")
        yield
    finally:
        with contextlib.suppress(OSError):  # gone with its folder, or never written
            lease.unlink()


def readers_of(folder: Path) -> list[str]:
    """The living readers of a commit, as "process PID on HOST"; leases of dead ones are removed."""
    readers = []
    for lease in sorted(folder.glob(".reader-*")):
        found = _LEASE.fullmatch(lease.name)
        if found is None:
            continue
        if _is_alive(lease, int(found["pid"]), int(found["start"]), found["host"]):
            readers.append(f"process {found['pid']} on {found['host']}")
        else:
            lease.unlink(missing_ok=True)
    return readers


def _is_alive(lease: Path, pid: int, start: int, host: str) -> bool:
    if host == socket.gethostname():
        return _start_of(pid) == start
    try:
        return time.time() - lease.stat().st_mtime < _FOREIGN_LEASE_S
    except FileNotFoundError:
        return False


def _start_of(pid: int) -> int | None:
    """When a process of this host was started, in the kernel's ticks; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
