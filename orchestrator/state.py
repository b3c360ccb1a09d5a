"""What the orchestrator puts into a commit, and how a later start takes it up.

    checkpoints/step_000012/orchestrator/
        state.json      step, version, position in the stream of tasks, algorithm, counters, lengths of the row files
        pending.bin     groups that are finished and not trained, in order

Notable:
- Nothing here draws random numbers of its own: the order of tasks follows from seed and position, the seed of a
  sampling request from seed, group, sample and turn. So there is no random state to keep.
- `metrics.jsonl` and `traces.jsonl` are cut where the commit was: rows that ran ahead of it are written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from services.runtime.commits import Commits
from services.runtime.durable import write_atomic
from services.runtime.manifests import write_manifest
from services.wire.errors import CodecError, CommitError, DamagedCommit
from services.wire.rollout_files import decode_file, encode_file
from services.wire.rollouts import Group

FORMAT = 1
ROLE = "orchestrator"
STATE, PENDING = "state.json", "pending.bin"


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`state.json`."""

    format: int = FORMAT
    step: int
    """finished steps"""
    version: int
    """of the policy"""
    evaluated_at: int
    """finished steps when the evaluations ran last; -1 never"""
    source: dict[str, Any]
    """of what makes groups"""
    algorithm: dict[str, Any]
    outcomes: dict[str, Any]
    metrics_bytes: int
    traces_bytes: int


class Snapshot(msgspec.Struct, frozen=True):
    """The orchestrator at one moment."""

    state: State
    pending: list[Group]


def write(part: Path, snapshot: Snapshot, *, run_id: str, epoch: int) -> int:
    """Write the orchestrator's part of a commit, its manifest included.

    Args:
        part: The commit's folder.
        snapshot: Taken when nobody was training.
        run_id: Of the run.
        epoch: Of this start.

    Returns:
        Its size in bytes.

    Raises:
        CannotWrite: The disk does not take it.
    """
    folder, state = part / ROLE, snapshot.state
    folder.mkdir()
    pending = encode_file(snapshot.pending, run_id=run_id, epoch=epoch, step=state.step, policy_version=state.version)
    write_atomic(folder / PENDING, pending)
    write_atomic(folder / STATE, msgspec.json.encode(state))
    write_manifest(folder, {"step": state.step, "version": state.version, "num_pending": len(snapshot.pending)})
    return sum(file.stat().st_size for file in folder.iterdir())


def read(commit_dir: Path) -> Snapshot:
    """Read the orchestrator's part of a commit, its digests compared.

    Args:
        commit_dir: `checkpoints/step_000012`.

    Raises:
        CommitError: there is no such commit, or it is in a format of another version.
        DamagedCommit: a file is missing or differs.
    """
    step = int(commit_dir.name.removeprefix("step_"))
    with Commits(commit_dir.parent).reading(step, verify=(ROLE,)) as commit:
        folder = commit.role(ROLE)
        state_json, pending_bin = (folder / STATE).read_bytes(), (folder / PENDING).read_bytes()
    found = msgspec.json.decode(state_json, type=dict[str, Any]).get("format")
    if found != FORMAT:
        raise CommitError(f"{folder / STATE} is of format {found}; this version reads {FORMAT}")
    try:
        state = msgspec.json.decode(state_json, type=State)
        _, pending = decode_file(pending_bin)
    except (msgspec.MsgspecError, CodecError) as error:
        raise DamagedCommit(f"{folder} does not hold what it should: {error}") from error
    return Snapshot(state, pending)
