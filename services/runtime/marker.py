"""COMMIT.json: the file that makes a folder a commit, and what a reader learns from it.

Notable:
- It holds the sum of each role's manifest, and those hold the sums of all files; its own sum covers the rest of it, so
  not even a flipped digit of the step goes unseen.
- Free JSON of the caller goes through the decoder once before it is summed: what is summed is what a reader sees.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.runtime.durable import write_atomic
from services.runtime.manifests import Manifest, read_bytes, survey
from services.wire.errors import CommitError, DamagedCommit

MARKER = "COMMIT.json"
FORMAT = 1
"""Of COMMIT.json and the folders beside it; another one is refused."""


class Commit(msgspec.Struct, frozen=True):
    """A commit that was found whole."""

    folder: Path
    step: int
    """Finished steps."""
    run_id: str
    epoch: int
    """Epoch of the orchestrator that made it."""
    time_s: float
    """Unix time at which it was made."""
    roles: dict[str, Manifest]
    identity: dict[str, Any]
    """What the caller said that a resumed run must agree with: algorithm, model, layout and the like."""

    def role(self, name: str) -> Path:
        """The folder of a role.

        Raises:
            CommitError: The commit was made without that role.
        """
        self._manifest(name)
        return self.folder / name

    def meta(self, name: str) -> dict[str, Any]:
        """What a role said about itself in its manifest.

        Raises:
            CommitError: The commit was made without that role.
        """
        return self._manifest(name).meta

    def _manifest(self, name: str) -> Manifest:
        if name not in self.roles:
            raise CommitError(f"{self.folder} was made without {name}: it holds {', '.join(self.roles)}")
        return self.roles[name]


def write_marker(
    folder: Path, *, step: int, run_id: str, epoch: int, roles: Mapping[str, str], identity: Mapping[str, Any]
) -> None:
    """Write COMMIT.json.

    Args:
        folder: Holds a sub-folder for each role.
        step: Finished steps.
        run_id: Of the run.
        epoch: Of the orchestrator.
        roles: sha256 of each role's manifest.
        identity: Free JSON.

    Raises:
        CannotWrite: The disk is full or read-only.
        ValueError: `identity` holds a number that is not finite.
    """
    body = {"format": FORMAT, "step": step, "run_id": run_id, "epoch": epoch, "time_s": time.time()}
    body = json.loads(json.dumps(body | {"roles": dict(roles), "identity": dict(identity)}, allow_nan=False))
    write_atomic(folder / MARKER, json.dumps(body | {"sha256": _sum(body)}, indent=1))


def read_marker(folder: Path, step: int) -> dict[str, Any]:
    """COMMIT.json as it was written, without its own sum.

    Raises:
        CommitError: There is no commit, or it has another format.
        DamagedCommit: The file cannot be read, or is not what was written.
    """
    path = folder / MARKER
    if not path.exists():
        raise CommitError(f"{folder} is no commit: {MARKER if folder.exists() else 'the folder'} is missing")
    try:
        body = json.loads(read_bytes(path))
        sha256 = body.pop("sha256")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCommit(f"{path} cannot be read") from error
    if sha256 != _sum(body):
        raise DamagedCommit(f"{path} differs from what was written")
    if body["format"] != FORMAT:
        raise CommitError(f"{folder} has format {body['format']}; this version reads {FORMAT}")
    if body["step"] != step:
        raise DamagedCommit(f"{path} is of step {body['step']}")
    return body


def survey_commit(folder: Path, step: int) -> Commit:
    """A commit as far as names, sizes and manifests tell; contents are not read.

    Raises:
        CommitError: There is no commit, or it has another format.
        DamagedCommit: naming the file that is missing, has another size, or is not what was written.
    """
    body = read_marker(folder, step)
    return Commit(
        folder=folder,
        step=step,
        run_id=body["run_id"],
        epoch=body["epoch"],
        time_s=body["time_s"],
        roles={name: survey(folder / name, sha256)[0] for name, sha256 in body["roles"].items()},
        identity=body["identity"],
    )


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
