"""The run's rollouts on disk: `rollouts/step_000012.bin`, the batch of step 12 as it was scored and in its order.

Notable:
- One file a step, whole or not there at all: the batch before anything was credited. What an algorithm or a trainer
  made of it is in metrics and traces.
- A record never stops a run. Where a file cannot be written, the record ends: a warning, and `incomplete.json` says
  why, if there is room for that. `counterpoint replay` goes as far as the steps before.
- A resumed run goes on where its commit was; what an earlier start recorded beyond it is removed.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from loguru import logger

from services.runtime.durable import write_atomic
from services.runtime.records import MARK, path_of, recorded_steps
from services.wire.errors import CannotWrite
from services.wire.rollout_files import encode_file
from services.wire.rollouts import Group


class Recorder:
    """Writes a run's record.

    Args:
        folder: `RUN_DIR/rollouts`.
        run_id: Identity of the run.
        epoch: Number of this start.
    """

    def __init__(self, folder: Path, *, run_id: str, epoch: int) -> None:
        self._folder = folder
        self._identity = {"run_id": run_id, "epoch": epoch}
        self._ended = False
        self.num_bytes = 0
        """of all files"""

    def go_on_from(self, step: int) -> None:
        """Before the first step of this start: keep the steps before it, and no others.

        Args:
            step: The first that will be recorded.
        """
        files = recorded_steps(self._folder)
        for later in [later for later in files if later >= step]:
            files.pop(later).unlink()
        for leftover in self._folder.glob(".*.tmp"):
            leftover.unlink()
        self.num_bytes = sum(path.stat().st_size for path in files.values())
        missing = next((earlier for earlier in range(step) if earlier not in files), None)
        if missing is None:
            (self._folder / MARK).unlink(missing_ok=True)
        else:
            logger.warning("the record of rollouts lacks step {}: nothing more is recorded", missing)
            self._ended = True

    async def record(self, step: int, groups: list[Group], *, policy_version: int) -> None:
        """Write one batch; returns when it is on disk, or was given up.

        Args:
            step: Of the run.
            groups: Scored and not yet credited, in the batch's order.
            policy_version: The version that the step trains.
        """
        if not self._ended:
            await asyncio.to_thread(self._write, step, groups, policy_version)

    def _write(self, step: int, groups: list[Group], policy_version: int) -> None:
        data = encode_file(groups, step=step, policy_version=policy_version, **self._identity)
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomic(path_of(self._folder, step), data)
        except (CannotWrite, OSError) as error:
            self._ended = True
            logger.warning("the record of rollouts ends before step {}, replay can go so far: {}", step, error)
            try:
                write_atomic(self._folder / MARK, json.dumps({"step": step, "cause": str(error)}) + "\n")
            except (CannotWrite, OSError):
                logger.warning("and there is no room for {} either", MARK)
            return
        self.num_bytes += len(data)
