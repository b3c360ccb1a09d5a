"""One role of a run, read from a commit (or a snapshot) and written as a Hugging Face folder; a process of its own.

Notable:
- One process without a process group: whatever layout wrote the commit, each whole tensor is put together here, in
  host memory.
- Every file of the role is verified, and the commit held against removal, before and while it is read: a running run
  removes old ones. `.metadata` is pickle, so it must be this user's own.
- Whole tensors of one role must fit into host memory, in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException

from services.config.context import RunContext, load_run
from services.config.exported import support_of_loss
from services.config.schema import Config
from services.model.backbone import what_trains
from services.model.export import State, copy_snapshot, export_critic, export_policy
from services.model.snapshot import snapshot_dir
from services.runtime.commits import Commits
from services.training.checkpoint import FORMAT, METADATA, STATE, SavedState, read_alone
from services.wire.errors import CommitError, ConfigError, CounterpointError, DamagedCommit


def read_role_state(folder: Path) -> dict[str, torch.Tensor]:
    """All parameters and saved buffers of a role's folder in a commit, whole and in host memory.

    Args:
        folder: Its files have been verified.

    Raises:
        CommitError: it has another format.
        DamagedCommit: torch cannot read it, or its `.metadata` is another user's.
    """
    state = msgspec.json.decode((folder / STATE).read_bytes(), type=SavedState)
    if state.format != FORMAT:
        raise CommitError(f"{folder} has format {state.format}; this version reads {FORMAT}")
    owner = (folder / METADATA).stat().st_uid
    if owner != os.geteuid():
        raise DamagedCommit(f"{folder / METADATA} belongs to user {owner}: export as that user")
    specs = {f"parameters/{name}": spec for name, spec in state.parameters.items()}
    specs |= {f"buffers/{name}": spec for name, spec in state.buffers.items()}
    tensors = {key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for key, spec in specs.items()}
    try:
        read_alone(folder, tensors)
    except CheckpointException as error:
        raise DamagedCommit(f"{folder}: {next(iter(error.failures.values()))[0]}") from error
    return {key.partition("/")[2]: tensor for key, tensor in tensors.items()}


def export_commit(run_dir: Path, role: str, step: int, out: Path) -> Path:
    """Write one role of a commit as a Hugging Face folder.

    Args:
        run_dir: A run directory.
        role: "policy" or "critic".
        step: Finished steps of the commit.
        out: Folder to make.

    Returns:
        `out`, absolute.

    Raises:
        CommitError: there is no such commit, it is damaged, or it has another format.
        ConfigError: the model that the run started from is gone.
        ContractError: what was committed is not what the run's configuration says.
        CannotWrite: the disk does not take it.
    """
    config, context = load_run(run_dir)
    commits = Commits(run_dir / "checkpoints")
    with commits.reading(step, verify=[role]) as commit:
        state = read_role_state(commit.role(role))
    return _write(state, config, context, role, out, source=f"checkpoints/{commits.path(step).name}/{role}")


def export_snapshot(run_dir: Path, version: int, out: Path) -> Path:
    """Write a published snapshot of the policy as a Hugging Face folder.

    Args:
        run_dir: A run directory.
        version: Of the policy.
        out: Folder to make.

    Raises:
        ContractError: the snapshot is damaged.
        ConfigError: it holds an adapter alone.
        CannotWrite: the disk does not take it.
    """
    config, context = load_run(run_dir)
    folder = snapshot_dir(run_dir / "weights", version)
    source = f"weights/{folder.name}"
    return copy_snapshot(folder, Path(context.model_dir), out, run=config.run.name, source=source)


def _write(state: State, config: Config, context: RunContext, role: str, out: Path, *, source: str) -> Path:
    model_dir, key = Path(context.model_dir), "model.path"
    if role == "critic" and config.value is not None and config.value.init_from is not None:
        model_dir, key = Path(config.value.init_from).resolve(), "value.init_from"
    if not (model_dir / "config.json").is_file():
        what = f"{model_dir} is gone, and the {role}'s architecture and tokenizer with it"
        raise ConfigError([f"{key}: {what}; fix: restore its config.json and tokenizer files"])
    if role == "policy":
        prepare = what_trains(config.policy, role="policy", seed=config.seed)
        return export_policy(state, model_dir, out, run=config.run.name, source=source, prepare=prepare)
    assert config.value is not None
    return export_critic(
        state,
        model_dir,
        out,
        support=support_of_loss(config.value.loss),
        gamma=getattr(config.algorithm, "gamma", 1.0),
        run=config.run.name,
        source=source,
        prepare=what_trains(config.value, role="value", seed=config.seed),
    )


def main() -> int:
    """Command line of the child process of `counterpoint export`, which has checked what it is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument("--role", required=True, choices=["policy", "critic"])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--commit", type=int, metavar="STEP", help="finished steps")
    which.add_argument("--snapshot", type=int, metavar="VERSION", help="of the policy")
    parser.add_argument("out", type=Path, help="folder to make")
    args = parser.parse_args()
    try:
        if args.snapshot is not None:
            out = export_snapshot(args.run_dir, args.snapshot, args.out)
            what = f"policy version {args.snapshot}, from its snapshot: the run has no commit"
        else:
            out = export_commit(args.run_dir, args.role, args.commit, args.out)
            what = f"{args.role} after {args.commit} steps"
    except CounterpointError as error:
        sys.stderr.write(f"counterpoint: {error}\n")
        return error.exit_code
    files = sorted(out.iterdir())
    num_bytes = sum(file.stat().st_size for file in files)
    sys.stdout.write(f"wrote {out} ({what})\n  {', '.join(file.name for file in files)}: {num_bytes / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
