"""Commits of a run: policy, critic and orchestrator of one step together on disk, or no commit at all.

    checkpoints/step_000012/          after 12 finished steps
        policy/  critic/  orchestrator/   each with a manifest.json; no critic/ without a critic; a pretraining run
                                          has critic/ and data/
        COMMIT.json                   written last: the sum of every manifest, and of itself

Notable:
- It grows in `.step_000012.part`, which no reader looks at. Roles write there and end with `write_manifest`; `commit`
  checks all of them, writes COMMIT.json, and one rename shows the whole.
- Newest means the highest epoch, then the highest step: a new epoch begins at a commit, and whatever an earlier epoch
  left ahead of it is abandoned: no reader is given it, and retention removes it.
- A damaged commit is an error that names the file. `allow_fallback` takes the next older one, loudly; where there
  is none left the error stays, because starting anew would look like success.
- Removal never passes through a state that looks like a commit: marked, then renamed out of sight, then deleted.
- Deciding how often and what to keep is the caller's (`services.config.checkpoint`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from services.runtime.durable import fsync_dir, remove_dir, rename_dir
from services.runtime.faults import point
from services.runtime.leases import DELETING, reader_lease, readers_of
from services.runtime.manifests import check_contents, survey
from services.runtime.marker import MARKER, Commit, read_marker, survey_commit, write_marker
from services.wire.errors import CannotWrite, CommitError, CounterpointError, DamagedCommit

ROLES = ("policy", "critic", "orchestrator", "data")
REQUIRED_ROLES = ("policy", "orchestrator")
PRETRAINING_ROLES = ("critic", "data")
"""Of a run that trains a critic alone, on files; only such a run has the role "data"."""

_STEP = re.compile(r"step_(\d{6,})")
_POLL_S = 0.2
_T = TypeVar("_T")


class Commits:
    """All commits of one run; only the orchestrator makes, sweeps and removes them."""

    def __init__(self, folder: Path) -> None:
        """Say where they lie.

        Args:
            folder: `RUN_DIR/checkpoints`; may be absent.
        """
        self._folder = folder
        self._warned: set[Path] = set()

    # -----------------------------------------------------------------------------------------------------------------
    # Making

    def begin(self, step: int) -> Path:
        """Make the folder in which roles write a commit, removing what an earlier attempt left.

        Args:
            step: Finished steps.

        Returns:
            The folder; each role makes a sub-folder of its own name in it.

        Raises:
            CannotWrite: The disk is full or read-only.
        """
        part = self._part(step)
        remove_dir(part)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            fsync_dir(self._folder.parent)
            part.mkdir()
        except OSError as error:
            raise CannotWrite(f"cannot make {part}: {error.strerror}") from error
        return part

    def commit(
        self,
        step: int,
        roles: Iterable[str],
        *,
        run_id: str,
        epoch: int,
        identity: Mapping[str, Any],
        wait_s: float = 0.0,
    ) -> Commit:
        """Turn what the roles wrote since `begin` into a commit; on failure nothing of it is left.

        Names and sizes are compared with the manifests. Contents are not read again: each role has just done so.

        Args:
            step: As given to `begin`.
            roles: All that must be in it.
            run_id: Of the run.
            epoch: Of this orchestrator.
            identity: JSON that whoever resumes compares with its own.
            wait_s: How long files of other hosts may take to become visible here.

        Raises:
            CannotWrite: The disk is full or read-only, or an older commit of this step is being read.
            DamagedCommit: A role's file is missing, has another size, or is not in its manifest.
            ValueError: A role is missing or unknown, or `identity` is no JSON with finite numbers.
        """
        given = {*roles}
        if given != {*PRETRAINING_ROLES} and not {*REQUIRED_ROLES} <= given <= {*REQUIRED_ROLES, "critic"}:
            raise ValueError(f"a commit has policy, orchestrator and maybe critic, not {sorted(given)}")
        names = [name for name in ROLES if name in given]
        part, target = self._part(step), self.path(step)
        try:
            sums = _once_visible(lambda: _sums(part, names), time.monotonic() + wait_s)
            point("commit:before-marker")
            write_marker(part, step=step, run_id=run_id, epoch=epoch, roles=sums, identity=identity)
            replaced = self._hide(target) if target.exists() else None
            point("commit:before-rename")
            rename_dir(part, target)
        finally:
            self.abandon(step)  # after the rename there is nothing left to remove
        if replaced is not None:
            _remove_quietly(replaced)
        logger.info("committed step {} with {}", step, ", ".join(names))
        return survey_commit(target, step)

    def abandon(self, step: int) -> None:
        """Remove what was written since `begin`; a failure to do so is only a warning."""
        _remove_quietly(self._part(step))

    def sweep(self) -> None:
        """At the start of an orchestrator: remove what a crash left of unfinished commits and removals."""
        for path in sorted([*self._folder.glob(".step_*.part"), *self._folder.glob(".step_*.trash")]):
            logger.warning("removing {}: a crash left it", path)
            _remove_quietly(path)
        for mark in sorted(self._folder.glob(f"step_*/{DELETING}")):
            mark.unlink(missing_ok=True)  # the removal had not begun: the commit is whole, retention decides anew

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    def path(self, step: int) -> Path:
        """Where the commit of a step lies: `step_000012` for step 12."""
        return self._folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps of all commits, newest first; damaged ones are among them, abandoned and unfinished ones are not."""
        return self._line()[0]

    def newest(self, *, allow_fallback: bool, wait_s: float = 0.0) -> Commit | None:
        """The newest commit, wholly verified.

        Args:
            allow_fallback: Where it is damaged, take the next older one that is not.
            wait_s: How long its files may take to become visible.

        Returns:
            The commit, or None where there has never been one.

        Raises:
            DamagedCommit: It is damaged, and no fallback is allowed or none is left.
        """
        first: DamagedCommit | None = None
        for step in self.steps():
            try:
                commit = self.load(step, wait_s=wait_s)
            except DamagedCommit as error:
                if not allow_fallback:
                    raise DamagedCommit(f"{error}; --allow-fallback takes the next older commit") from error
                logger.warning("DAMAGED COMMIT, the next older one is tried: {}", error)
                first = first or error
            else:
                if first is not None:
                    logger.warning("FALLING BACK to the commit of step {}: {}", step, first)
                return commit
        if first is not None:
            raise DamagedCommit(f"{first}; no older commit is whole")
        return None

    def load(self, step: int, *, wait_s: float = 0.0) -> Commit:
        """The commit of a step, wholly verified.

        Raises:
            CommitError: There is none, or it is in a format of another version.
            DamagedCommit: naming the file that is missing or differs.
        """
        with self.reading(step, wait_s=wait_s) as commit:
            return commit

    @contextlib.contextmanager
    def reading(self, step: int, *, wait_s: float = 0.0, verify: Sequence[str] | None = None) -> Iterator[Commit]:
        """Verify a commit, and keep it from being removed until the block ends.

        Args:
            step: Finished steps.
            wait_s: How long the folder and its files may take to become visible on a slow network file system.
            verify: Roles whose contents are hashed; None = all. Names, sizes and manifests are compared for all.

        Raises:
            CommitError: There is none, or it is in a format of another version.
            DamagedCommit: naming the file that is missing or differs.
        """
        folder, until = self.path(step), time.monotonic() + wait_s
        with contextlib.ExitStack() as held:
            _once_visible(lambda: held.enter_context(reader_lease(folder)), until)
            commit = _once_visible(lambda: survey_commit(folder, step), until)
            for name, manifest in commit.roles.items():
                if verify is None or name in verify:
                    check_contents(folder / name, manifest, f"{name} of step {step}")
            yield commit

    # -----------------------------------------------------------------------------------------------------------------
    # Removing

    def prune(self, *, keep_last: int, keep_every: int = 0, protect: Iterable[int] = ()) -> list[int]:
        """Remove old commits, oldest first; one that cannot be removed is left with a warning.

        Args:
            keep_last: Newest ones that stay, at least 1.
            keep_every: Multiples of so many steps stay; 0 = none.
            protect: Steps that somebody still needs. So do those with a reader's lease.

        Returns:
            The steps that were removed.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: the newest commit must stay")
        line, abandoned, unreadable = self._line()
        known = [step for step in line if step not in unreadable]  # nobody knows how new those are
        kept = {*known[:keep_last], *(step for step in known if keep_every and step % keep_every == 0)}
        removed = []
        for step in sorted({*known, *abandoned} - {*kept, *protect}):
            try:
                trash = self._hide(self.path(step))
            except CannotWrite as error:
                logger.warning("an old commit stays: {}", error)
                continue
            for child in sorted(child for child in trash.iterdir() if child.is_dir()):
                _remove_quietly(child)
                point("remove:halfway")
            _remove_quietly(trash)
            removed.append(step)
        if removed:
            logger.info("removed the commits of steps {}", ", ".join(map(str, removed)))
        return removed

    def _hide(self, folder: Path) -> Path:
        """Rename a commit out of sight and return its new place, unless somebody reads it.

        Raises:
            CannotWrite: Somebody reads it, or the disk does not take the rename.
        """
        mark, trash = folder / DELETING, folder.with_name(f".{folder.name}.trash")
        remove_dir(trash)
        try:
            mark.touch()
            if readers := readers_of(folder):
                mark.unlink()
                raise CannotWrite(f"cannot remove {folder}: {', '.join(readers)} reads it")
            point("remove:marked")
            os.rename(folder, trash)
            point("remove:hidden")
            fsync_dir(self._folder)  # before its files go: else a power cut could show the folder without them
        except OSError as error:
            raise CannotWrite(f"cannot remove {folder}: {error.strerror}") from error
        return trash

    def _line(self) -> tuple[list[int], list[int], list[int]]:
        """Steps from the newest commit back; those abandoned; those whose COMMIT.json cannot be read."""
        found = []
        for folder in sorted(self._folder.glob("step_*")):
            match = _STEP.fullmatch(folder.name)
            if match is None or (folder / DELETING).exists():
                continue
            if (folder / MARKER).exists():
                found.append((_epoch_of(folder, int(match[1])), int(match[1])))
            elif folder not in self._warned:
                self._warned.add(folder)
                logger.warning("{} has no {}: it is not a commit", folder, MARKER)
        line, abandoned, lowest = [], [], math.inf
        for epoch, step in sorted(found, reverse=True):
            (line if step < lowest else abandoned).append(step)
            lowest = lowest if epoch == math.inf else min(lowest, step)
        return line, abandoned, [step for epoch, step in found if epoch == math.inf]

    def _part(self, step: int) -> Path:
        return self._folder / f".step_{step:06d}.part"


class Attempts:
    """Failed commits in a row: the first is a warning and tried again at the next interval, the second ends the run."""

    def __init__(self) -> None:
        self._failed: CannotWrite | None = None

    def succeeded(self) -> None:
        """A commit was made."""
        self._failed = None

    def failed(self, step: int, error: CannotWrite) -> None:
        """A commit was not made.

        Raises:
            CannotWrite: The one before it was not made either.
        """
        if self._failed is not None:
            raise CannotWrite(f"two commits in a row failed: {self._failed}; then at step {step}: {error}") from error
        logger.warning("step {} is not committed, the next one is tried at its time: {}", step, error)
        self._failed = error


def _epoch_of(folder: Path, step: int) -> float:
    """Infinite where COMMIT.json cannot be read: it may be the newest, so it must not be passed over in silence."""
    try:
        return read_marker(folder, step)["epoch"]
    except CommitError:
        return math.inf


def _sums(part: Path, names: Sequence[str]) -> dict[str, str]:
    """sha256 of each role's manifest, every role being there and no other."""
    sums = {name: survey(part / name, None, exact=True)[1] for name in names}
    for name in sorted({child.name for child in part.iterdir()} - {*names}):
        raise DamagedCommit(f"{part / name} belongs to none of {', '.join(names)}")
    return sums


def _once_visible(look: Callable[[], _T], until: float) -> _T:
    """Look again while something is missing: a network file system may show a marker before the files it speaks of."""
    told = False
    while True:
        try:
            return look()
        except CommitError as error:
            if time.monotonic() >= until:
                raise
            if not told:
                logger.info("waiting up to {:.1f} s: {}", until - time.monotonic(), error)
                told = True
        time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))


def _remove_quietly(path: Path) -> None:
    try:
        remove_dir(path)
    except CounterpointError as error:
        logger.warning("{}", error)
