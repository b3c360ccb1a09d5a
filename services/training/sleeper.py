"""`POST /sleep` and `POST /wake_up` as commands of the group: its device memory goes, and comes back as it was.

Notable:
- Parameters, buffers and the optimizer's moments sleep in host memory; gradients are let go. What libraries hold
  besides (the CUDA context, NCCL's buffers) stays on the device.
- Every rank sums all that sleeps before and after. One wrong bit on one rank ends every rank, by the tensor's name:
  a head that came back as zeros would train on in silence.
- A command that finds the group where it is to be changes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Literal

import msgspec
import torch
from loguru import logger
from torch import nn

from services.model.checksum import tensors_of
from services.model.sleep import HostBackup, own_memory
from services.training.board import StatusBoard
from services.training.parts import Part, reshard
from services.wire.errors import ContractError
from services.wire.messages import SleepReply

Change = Literal["sleep", "wake_up"]
NAMES_TOLD = 3


class Sleeper:
    """Sleeps and wakes on request."""

    kind = "sleep"

    def __init__(self, part: Part, board: StatusBoard, *, others: tuple[nn.Module, ...] = ()) -> None:
        """Serve one role.

        Args:
            part: The role as this rank holds it.
            board: Told of every change.
            others: Further models of the role on the same device.
        """
        self._part = part
        self._board = board
        self._models = (part.model, *others)
        self._backup = HostBackup(self._tensors)
        self._queue: deque[tuple[Change, Future[SleepReply]]] = deque()
        self._answer: Future[SleepReply] | None = None

    @property
    def is_asleep(self) -> bool:
        """The same on every rank."""
        return self._backup.is_asleep

    def submit(self, change: Change) -> Future[SleepReply]:
        """Ask for a change (any thread of rank 0); answered when every rank has made it."""
        answer: Future[SleepReply] = Future()
        self._queue.append((change, answer))
        return answer

    def pending(self) -> bool:
        """Is a change asked for."""
        return bool(self._queue)

    def next_command(self) -> dict[str, Any]:
        """Take the next one (rank 0 only)."""
        change, self._answer = self._queue.popleft()
        self._answer.set_running_or_notify_cancel()
        return {"kind": self.kind, "change": change}

    def execute(self, command: dict[str, Any]) -> None:
        """Make it (every rank).

        Raises:
            ContractError: What woke is not what went to sleep.
        """
        answer, self._answer = self._answer, None  # None on all ranks but the first
        started = time.monotonic()
        num_bytes = self.fall_asleep() if command["change"] == "sleep" else self.wake_up()
        if answer is not None and answer.running():
            state, seconds = "asleep" if self.is_asleep else "idle", round(time.monotonic() - started, 4)
            answer.set_result(SleepReply(self._part.role, state, num_bytes, seconds, self._on_device()))

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait on: a change may be a few milliseconds late."""

    def fall_asleep(self) -> int:
        """Give the memory back (every rank); bytes of this rank that moved."""
        if self.is_asleep:
            return 0
        self._board.enter("falling asleep")
        self._part.optimizer.release_gradients()
        for model in self._models:
            reshard(model)
            own_memory(model)
        num_bytes = self._backup.put_to_sleep()
        self._agree([])
        self._board.enter("asleep", "its turn")
        logger.debug("{} sleeps: {:.1f} MB of rank {}", self._part.role, num_bytes / 1e6, self._part.ranks.rank)
        return num_bytes

    def wake_up(self) -> int:
        """Take the memory again (every rank); bytes of this rank that moved.

        Raises:
            ContractError: What woke is not what went to sleep.
        """
        if not self.is_asleep:
            return 0
        self._board.enter("waking up")
        self._agree(self._backup.wake())
        self._board.enter("idle")
        return self._backup.num_bytes

    def _agree(self, damaged: list[str]) -> None:
        """Nobody goes on before everybody is there, and all fail where one does."""
        more = f" and {len(damaged) - NAMES_TOLD} more" if len(damaged) > NAMES_TOLD else ""
        mine = ", ".join(damaged[:NAMES_TOLD]) + more
        rows = self._part.ranks.gather_bytes(msgspec.msgpack.encode(mine))
        told = [(rank, msgspec.msgpack.decode(row, type=str)) for rank, row in enumerate(rows)]
        told = [f"rank {rank}: {names}" for rank, names in told if names]
        if told:
            raise ContractError(
                f"{self._part.role} woke with other numbers than it went to sleep with: {'; '.join(told)}"
            )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, model in enumerate(self._models):
            prefix = "" if number == 0 else f"model {number}: "
            yield from ((f"{prefix}{name}", tensor) for name, tensor in tensors_of(model))
        yield from self._part.optimizer.tensors(self._part.mesh.device)

    def _on_device(self) -> int:
        """Bytes that torch holds on this rank's GPU now; 0 on CPU."""
        device = self._part.mesh.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
