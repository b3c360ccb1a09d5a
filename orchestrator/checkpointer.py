"""Commits of the run: when they are due, and policy, critic and orchestrator writing one together.

Notable:
- The loop calls `commit` between two steps, when both trainers have done all they were sent. The orchestrator's part is
  what it was at that moment, whatever rollouts do while the files are written.
- A part that cannot be written is no commit: a warning, and the next one is tried at its time. The second in a row ends
  the run (exit 73). A group that does not answer any more is a lost dependency, not a failed commit.
- `request` is for whoever is about to end the run: the loop commits as soon as it stands between two steps, also while
  a batch is still being collected, and returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from orchestrator import state
from orchestrator.metrics import JsonLines, Metrics
from orchestrator.state import ROLE, Snapshot
from orchestrator.trainers import TrainClient
from orchestrator.turns import Turns
from services.config.checkpoint import CheckpointConfig
from services.runtime.commits import Attempts, Commits
from services.wire.errors import CannotWrite, CommitError, DependencyLost

_T = TypeVar("_T")


class Checkpointer:
    """Drives the commits of one run.

    Args:
        run_dir: Of the run.
        groups: The train groups.
        config: `[checkpoint]`.
        metrics: Takes a row for each commit.
        run_id: Of the run.
        epoch: Of this start.
        identity: What a resumed run must agree with.
        deadline_s: Of one role's writing.
        take: The orchestrator's state after so many finished steps.
        turns: A group that shares devices has to have its turn to write.
    """

    def __init__(
        self,
        run_dir: Path,
        groups: list[TrainClient],
        config: CheckpointConfig,
        metrics: Metrics,
        *,
        run_id: str,
        epoch: int,
        identity: dict[str, Any],
        deadline_s: float,
        take: Callable[[int], Snapshot],
        turns: Turns,
    ) -> None:
        self._commits = Commits(run_dir / "checkpoints")
        self._events = JsonLines(run_dir / "events.jsonl")
        self._groups = groups
        self._config = config
        self._metrics = metrics
        self._run: dict[str, Any] = {"run_id": run_id, "epoch": epoch}
        self._identity = identity
        self._deadline_s = deadline_s
        self._take = take
        self._turns = turns
        self._attempts = Attempts()
        self._requested = asyncio.Event()
        self.committed: int | None = None
        """finished steps of the newest commit of this start, or of the one it began from"""

    def sweep(self) -> None:
        """Before the first commit: remove what a crash left half written."""
        self._commits.sweep()

    def request(self) -> None:
        """Commit between two steps, soon, and end the loop; call it in the event loop's thread."""
        self._requested.set()

    @property
    def is_requested(self) -> bool:
        """Has somebody asked for a commit and the loop's end."""
        return self._requested.is_set()

    def is_due(self, step: int) -> bool:
        """Is a commit to be made after `step` finished steps."""
        return step != self.committed and (self._config.is_due(step) or self.is_requested)

    async def unless_requested(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
        """What `work()` returns; or None, and it is cancelled, as soon as a commit is requested."""
        if self.is_requested:
            return None
        task, request = asyncio.create_task(work()), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({task, request}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for each in (task, request):
                each.cancel()
            await asyncio.gather(task, request, return_exceptions=True)

    async def commit(self, step: int) -> None:
        """Commit the run after `step` finished steps, while nobody trains.

        Raises:
            CannotWrite: This commit and the one before it could not be written.
            DependencyLost: A train group is gone.
            ContractError: A train group is at another step.
        """
        started, snapshot = time.monotonic(), self._take(step)
        try:
            num_bytes = await self._write(step, snapshot)
        except (CannotWrite, CommitError, DependencyLost) as error:
            await asyncio.to_thread(self._commits.abandon, step)
            for group in self._groups:
                await group.status()  # raises where it is gone
            self._event("commit_failed", step=step, cause=str(error))
            self._attempts.failed(step, CannotWrite(str(error)))
            return
        self._attempts.succeeded()
        self.committed = step
        row = {"time/checkpoint_s": time.monotonic() - started, "checkpoint/bytes": num_bytes}
        self._metrics.add("commit", step, row)
        self._event("committed", step=step, num_bytes=num_bytes)
        keep_last, keep_every = self._config.keep_last, self._config.keep_every_steps
        await asyncio.to_thread(self._commits.prune, keep_last=keep_last, keep_every=keep_every)

    async def _write(self, step: int, snapshot: Snapshot) -> int:
        """All parts at the same time, or turn by turn; then the marker; the commit's size in bytes."""
        part = await asyncio.to_thread(self._commits.begin, step)
        sharing = [group for group in self._groups if self._turns.includes(group.name)]
        written = await asyncio.gather(
            asyncio.to_thread(state.write, part, snapshot, **self._run),
            *(group.checkpoint(step, deadline_s=self._deadline_s) for group in self._groups if group not in sharing),
            self._in_turns(sharing, step),
            return_exceptions=True,  # nobody may still be writing when the folder is removed
        )
        for outcome in written:
            if isinstance(outcome, BaseException):
                raise outcome
        roles = [ROLE, *(group.name for group in self._groups)]
        await asyncio.to_thread(self._commits.commit, step, roles, identity=self._identity, **self._run)
        return sum(size for size in written if isinstance(size, int))

    async def _in_turns(self, groups: list[TrainClient], step: int) -> int:
        """The parts of groups that share devices, one after the other; their size in bytes."""
        num_bytes = 0
        for group in groups:
            await self._turns.take(group.name)
            num_bytes += await group.checkpoint(step, deadline_s=self._deadline_s)
        return num_bytes

    def _event(self, event: str, **facts: Any) -> None:
        logger.debug("{}: {}", event, facts)
        self._events.write({"time_s": round(time.time(), 3), "event": event, **facts})
