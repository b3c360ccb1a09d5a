"""`POST /checkpoint` as a command of the group: asked for on rank 0, written by every rank, answered when it is whole.

Notable:
- Goes before a waiting grid: whoever asks has seen step n done, and wants that step.
- The group stands still while the tensors are written. Hashing them for the manifest takes a thread of rank 0 alone,
  so the group works on and its heartbeat with it; the answer waits for the manifest.
- A disk that does not take it is the asker's problem (507 with the cause), not the group's.
- No path travels: the folder follows from the run's and from the step.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from services.runtime.manifests import write_manifest
from services.training.board import StatusBoard
from services.training.checkpoint import save
from services.training.parts import Part
from services.wire.errors import CannotWrite

WRITTEN, OTHER_STEP, NOT_WRITTEN = 200, 409, 507


@dataclass(frozen=True)
class Answer:
    """What the asker is told."""

    status: int
    """of HTTP"""
    body: dict[str, Any]


@dataclass
class _Job:
    step: int
    answer: Future[Answer] = field(default_factory=Future)

    def tell(self, status: int, **body: Any) -> None:
        """Answer, if anybody still waits."""
        if self.answer.running():
            self.answer.set_result(Answer(status, body))


class Saver:
    """Checkpoints on request."""

    kind = "checkpoint"

    def __init__(self, part: Part, board: StatusBoard, run_dir: Path, *, steps_before: int = 0) -> None:
        """Serve one role.

        Args:
            part: The role as this rank holds it.
            board: Counts its steps.
            run_dir: Of the run.
            steps_before: Steps of the run in which this role gets no grid; they come first.
        """
        self._part = part
        self._board = board
        self._run_dir = run_dir
        self._steps_before = steps_before
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._finishing: threading.Thread | None = None

    def submit(self, step: int) -> Future[Answer]:
        """Ask for the state after `step` steps of the run (any thread of rank 0)."""
        job = _Job(step)
        self._queue.append(job)
        return job.answer

    def pending(self) -> bool:
        """Is a checkpoint asked for, and the one before it whole."""
        return bool(self._queue) and (self._finishing is None or not self._finishing.is_alive())

    def next_command(self) -> dict[str, Any]:
        """Take the next one (rank 0 only)."""
        self._running = self._queue.popleft()
        self._running.answer.set_running_or_notify_cancel()  # from here on nobody takes it back
        return {"kind": self.kind, "step": self._running.step}

    def execute(self, command: dict[str, Any]) -> None:
        """Write it (every rank)."""
        step, done = command["step"], self._board.steps_done
        job, self._running = self._running, None  # None on all ranks but the first
        if max(0, step - self._steps_before) != done:
            if job is not None:
                job.tell(OTHER_STEP, error=f"{self._part.role} has finished {done} steps: this is not step {step}")
            return
        folder = self._run_dir / "checkpoints" / f".step_{step:06d}.part" / self._part.role
        self._board.enter("saving")
        try:
            save(folder, self._part, steps_done=done)
        except CannotWrite as error:  # the same on every rank, and nothing has changed
            logger.error("{}", error)
            if job is not None:
                job.tell(NOT_WRITTEN, error=str(error))
            return
        if job is not None:
            arguments = (job, folder, {"role": self._part.role, "step": step, "steps_done": done})
            self._finishing = threading.Thread(target=_finish, args=arguments, name="manifest", daemon=True)
            self._finishing.start()

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait on: a checkpoint may be a few milliseconds late."""


def _finish(job: _Job, folder: Path, meta: dict[str, Any]) -> None:
    """Describe what was written; a thread boundary: what goes wrong is what the asker is told."""
    try:
        write_manifest(folder, meta)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        job.tell(WRITTEN, step=meta["step"], role=meta["role"], num_bytes=num_bytes)
    except CannotWrite as error:
        job.tell(NOT_WRITTEN, error=str(error))
    except BaseException as error:
        job.answer.set_exception(error)
