"""Files that are either wholly there or not there at all.

Notable:
- Write to a temporary name beside the target, fsync, rename, fsync the folder: after a crash at any point a reader
  finds the old bytes or the new ones, never a mix.
- A full or read-only disk becomes `CannotWrite` (exit 73) naming the file; no temporary file is left behind.
- Each stage is a fault point named after its target: "COMMIT.json:written", ":flushed", ":renamed"; a folder that gets
  its name has ":renamed" too.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from services.runtime.faults import point
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
            point(f"{path.name}:written")
            os.fsync(file.fileno())
        point(f"{path.name}:flushed")
        os.replace(temporary, path)
        point(f"{path.name}:renamed")
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
    fsync_tree(source)
    try:
        os.rename(source, target)
        point(f"{target.name}:renamed")
        fsync_dir(target.parent)
    except OSError as error:
        raise CannotWrite(f"cannot publish {target}: {error.strerror}") from error


def remove_dir(path: Path) -> None:
    """Remove a folder with everything in it; one that is absent is fine.

    Raises:
        CannotWrite: Something of it cannot be removed.
    """
    if not path.exists():
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise CannotWrite(f"cannot remove {path}: {error.strerror}") from error


def fsync_tree(path: Path) -> None:
    """Flush every file under a folder, and every folder's entries.

    Raises:
        CannotWrite: One cannot be flushed, for want of space or because it is gone.
    """
    try:
        for folder, _, names in os.walk(path):
            for name in names:
                fsync_file(Path(folder) / name)
            fsync_dir(Path(folder))
    except OSError as error:
        raise CannotWrite(f"cannot flush {error.filename or path}: {error.strerror}") from error


def fsync_dir(path: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    fsync_file(path)


def fsync_file(path: Path) -> None:
    """Flush a file's content to disk, whoever of this machine wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
