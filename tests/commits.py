"""Commits made by hand: the content of every file follows from role, step and epoch, so a mix shows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from services.runtime.commits import Commits
from services.runtime.manifests import write_manifest
from services.runtime.marker import Commit

ROLES = ("policy", "critic", "orchestrator")
FILES = {
    "policy": ("rank0.bin", "rank1.bin", "optim/deep/rank0.bin"),
    "critic": ("rank0.bin", "optim/rank0.bin"),
    "orchestrator": ("state.json",),
}


def content(role: str, name: str, step: int, epoch: int) -> bytes:
    """1000 bytes that no other file has."""
    seed = hashlib.sha256(f"{role}/{name} of step {step}, epoch {epoch}".encode()).hexdigest()
    return (seed * 16)[:1000].encode()


def write_role(folder: Path, step: int, epoch: int, *, on_half: Callable[[], None] = lambda: None) -> None:
    """What a role of one process does: files, then the manifest.

    Args:
        folder: Named for the role.
        step: Finished steps.
        epoch: Of the run.
        on_half: Called when half of each file has reached the kernel.
    """
    for name in FILES[folder.name]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content(folder.name, name, step, epoch)
        with open(path, "wb") as file:
            file.write(data[:500])
            file.flush()
            on_half()
            file.write(data[500:])
    write_manifest(folder, {"step": step, "epoch": epoch})


def make_commit(commits: Commits, step: int, *, epoch: int = 1, roles: Iterable[str] = ROLES) -> Commit:
    """A whole commit, as roles and orchestrator make it."""
    part = commits.begin(step)
    for role in roles:
        write_role(part / role, step, epoch)
    return commits.commit(step, roles, run_id="run", epoch=epoch, identity={"algorithm": "sao", "step": step})


def assert_whole(commit: Commit, *, roles: Iterable[str] = ROLES) -> None:
    """Every file is there with the content of this commit's step and epoch, read without the code under test."""
    for role in roles:
        for name in FILES[role]:
            expected = content(role, name, commit.step, commit.epoch)
            assert (commit.folder / role / name).read_bytes() == expected, f"{role}/{name}"
        assert commit.meta(role) == {"step": commit.step, "epoch": commit.epoch}
    assert commit.identity == {"algorithm": "sao", "step": commit.step} and commit.run_id == "run"


def hidden(folder: Path) -> list[str]:
    """Names in the checkpoints folder that are not commits."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step_"))
