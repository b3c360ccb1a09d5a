"""What a role's folder in a commit holds: every file with size and sha256, and what the role says about itself.

Notable:
- `write_manifest` is the last thing a role does. It flushes each file before it reads it, so what is hashed is on disk.
- `survey` costs no reading of contents: names, sizes, and the manifest's own sum. `check_contents` reads everything.
- Files are hashed in a few threads (hashlib lets others run meanwhile); what takes longer than some seconds says so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from loguru import logger

from services.runtime.durable import fsync_dir, write_atomic
from services.runtime.faults import point
from services.wire.errors import CannotWrite, ContractError, DamagedCommit

MANIFEST = "manifest.json"

_NUM_THREADS = 4
_CHUNK_BYTES = 1 << 20
_PROGRESS_S = 5.0


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a role."""

    size: int
    """Bytes."""
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role's `manifest.json`."""

    files: dict[str, FileEntry]
    """By path relative to the role's folder, with forward slashes; the manifest itself is not among them."""
    meta: dict[str, Any]
    """Free JSON of the role."""


def write_manifest(folder: Path, meta: Mapping[str, Any]) -> str:
    """Flush a role's files to disk and describe them in `manifest.json`.

    Args:
        folder: The role's folder; all its files are written and closed.
        meta: JSON with finite numbers and text keys, given back by `Commit.meta`.

    Returns:
        The manifest's sha256.

    Raises:
        CannotWrite: A file cannot be flushed, read or written.
        ContractError: The folder holds something that is neither a file nor a folder, such as a link.
        ValueError: `meta` holds a number that is not finite.
    """
    names = _names_in(folder)
    try:
        entries = _describe([folder / name for name in names], f"{folder.name} of a commit", flush=True)
        for inner, _, _ in os.walk(folder):
            fsync_dir(Path(inner))
    except OSError as error:
        raise CannotWrite(f"cannot flush {error.filename or folder}: {error.strerror}") from error
    files = dict(zip(names, map(msgspec.to_builtins, entries), strict=True))
    text = json.dumps({"files": files, "meta": dict(meta)}, indent=1, allow_nan=False)
    point(f"{folder.name}:before-manifest")
    write_atomic(folder / MANIFEST, text)
    return hashlib.sha256(text.encode()).hexdigest()


def survey(folder: Path, sha256: str | None, *, exact: bool = False) -> tuple[Manifest, str]:
    """Read a manifest and compare names and sizes, not contents.

    Args:
        folder: A role's folder.
        sha256: What the manifest's own sum must be; None takes any.
        exact: Refuse a file that the manifest does not name: its writer is not done.

    Returns:
        The manifest and its sha256.

    Raises:
        DamagedCommit: naming the first file that is missing, has another size, or is not described.
    """
    path = folder / MANIFEST
    data = read_bytes(path)
    found = hashlib.sha256(data).hexdigest()
    if sha256 not in (None, found):
        raise DamagedCommit(f"{path} differs from what was committed")
    manifest = _decode(path, data)
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedCommit(f"{folder / name} is missing ({error.strerror})") from error
        if size != entry.size:
            raise DamagedCommit(f"{folder / name} has {size} bytes, not the {entry.size} of its manifest")
    if exact:
        for name in sorted({*_names_in(folder)} - {*manifest.files}):
            raise DamagedCommit(f"{folder / name} is not in its manifest")
    return manifest, found


def check_contents(folder: Path, manifest: Manifest, what: str) -> None:
    """Hash every file of a role and compare.

    Args:
        folder: The role's folder.
        manifest: From `survey`.
        what: Named in the log where hashing takes long.

    Raises:
        DamagedCommit: naming the first file that differs or cannot be read.
    """
    paths = [folder / name for name in manifest.files]
    try:
        entries = _describe(paths, what)
    except OSError as error:
        raise DamagedCommit(f"{error.filename or folder} cannot be read ({error.strerror})") from error
    for path, found, entry in zip(paths, entries, manifest.files.values(), strict=True):
        if found != entry:
            raise DamagedCommit(f"{path} differs from its manifest")


def read_bytes(path: Path) -> bytes:
    """The content of a file that a commit must have.

    Raises:
        DamagedCommit: It is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedCommit(f"{path} is missing") from error
    except OSError as error:
        raise DamagedCommit(f"{path} cannot be read ({error.strerror})") from error


def _decode(path: Path, data: bytes) -> Manifest:
    try:
        # json, then convert: msgspec's own decoder knows no integers beyond 64 bits, as states of generators have
        manifest = msgspec.convert(json.loads(data), Manifest)
    except (ValueError, msgspec.ValidationError) as error:
        raise DamagedCommit(f"{path} is no manifest: {error}") from error
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DamagedCommit(f"{path} names {name!r}, which is outside its folder")
    return manifest


def _names_in(folder: Path) -> list[str]:
    """Files below a folder but for its manifest, as the manifest names them."""
    names = []
    for inner, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(inner) / name
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ContractError(f"{path} is no file of its own: a commit must be whole without its surroundings")
        names += [(Path(inner) / name).relative_to(folder).as_posix() for name in files]
    # .nfs*: what a network file system keeps of a file that somebody still has open
    return sorted(name for name in names if name != MANIFEST and not name.rpartition("/")[2].startswith(".nfs"))


def _describe(paths: Sequence[Path], what: str, *, flush: bool = False) -> list[FileEntry]:
    """Size and sha256 of every file, in order."""
    done_bytes = [0] * len(paths)

    def describe(index: int) -> FileEntry:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with open(paths[index], "rb", buffering=0) as file:
            if flush:
                os.fsync(file.fileno())
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done_bytes[index] += count
        return FileEntry(done_bytes[index], digest.hexdigest())

    with ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="hash") as pool:
        futures: list[Future[FileEntry]] = [pool.submit(describe, index) for index in range(len(paths))]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_PROGRESS_S, return_when=FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                pool.shutdown(wait=False, cancel_futures=True)
                break
            if pending:
                logger.info("hashing {}: {:.1f} GB, {} files to go", what, sum(done_bytes) / 1e9, len(pending))
        failed = [future for future in futures if future.done() and not future.cancelled() and future.exception()]
    return [future.result() for future in failed or futures]
