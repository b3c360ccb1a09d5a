"""Files that are either wholly there or not there at all.

Notable:
- Write to a temporary name beside the target, fsync, rename, fsync the folder: after a crash at any point a reader
  finds the old bytes or the new ones, never a mix.
- A full or read-only disk becomes `CannotWrite` (exit 73) naming the file; no temporary file is left behind.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.wire.errors import CannotWrite


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step.

    Args:
        path: Target; its folder must exist.
        data: Bytes, or text to be written as UTF-8.

    Raises:
        CannotWrite: The disk is full, read-only, or the folder is missing.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from error


def rename_dir(source: Path, target: Path) -> None:
    """Give a complete folder its final name in one step; its files are flushed to disk first.

    Args:
        source: Finished folder, on the same file system as `target`.
        target: Must not exist, or be an empty folder.

    Raises:
        CannotWrite: The rename or a flush failed.
    """
    try:
        for folder, _, names in os.walk(source):
            for name in names:
                _fsync_path(Path(folder) / name)
            fsync_dir(Path(folder))
        os.rename(source, target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CannotWrite(f"cannot publish {target}: {error.strerror}") from error


def fsync_dir(path: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    _fsync_path(path)


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
