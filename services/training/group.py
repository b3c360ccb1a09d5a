"""The command loop of a train group: rank 0 decides, every rank follows, in lock step.

Notable:
- Rank 0 broadcasts one small command at a time: `train` a grid, `checkpoint`, a role's own command (the critic's
  `score`), `noop` as a heartbeat while idle, or `stop`. No rank ever waits in a collective without a deadline.
- A checkpoint goes before everything that waits: it is of the step that is done. Scores and grids take turns when both
  wait, so neither starves; a score never falls between the K updates of a grid.
- While the group sleeps, grids and requests wait; it does nothing but wake.
- CP rank 0 of each data rank receives its item and shares the bytes with the others of its row.
- Before a step the ranks agree on (epoch, step, micro-batches, grid digest); a rank without its item, or with another,
  fails all ranks together, by name.
- A peer that dies or freezes while a role computes is missed by collectives that torch makes on its own; they end in
  the same named error as ours.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec
from loguru import logger

from services.config.system import RuntimeConfig
from services.model.mesh import Mesh
from services.training.board import StatusBoard
from services.training.farewell import Farewell
from services.training.optimizer import Optimizer
from services.training.preflight import DIGEST_HEX_DIGITS, Held, agree
from services.training.ranks import Ranks
from services.training.sleeper import Sleeper
from services.transport.grid_receiver import GridReceiver
from services.wire.codec import decode_item, encode_item
from services.wire.errors import DeadlineExceeded
from services.wire.grids import GridItem

POLL_S = 0.002


class Trainer(Protocol):
    """What a role does with a grid item. Called on every rank."""

    @property
    def optimizer(self) -> Optimizer:
        """Its optimizer, which counts updates."""
        ...

    def train(self, item: GridItem) -> dict[str, Any]:
        """Apply one grid; return the metrics row (equal on all ranks)."""
        ...

    def after_step(self, step: int) -> None:
        """Run once the step counts as done (the policy publishes)."""
        ...


class CommandSource(Protocol):
    """Commands besides training: made on rank 0, executed on every rank."""

    @property
    def kind(self) -> str:
        """What its commands say they are."""
        ...

    def pending(self) -> bool:
        """Does rank 0 have something to do."""
        ...

    def next_command(self) -> dict[str, Any]:
        """Take the next command off the queue (rank 0 only)."""
        ...

    def execute(self, command: dict[str, Any]) -> None:
        """Run it (every rank)."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until something may be pending (rank 0 only)."""
        ...


class TrainGroup:
    """One rank's command loop."""

    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        mesh: Mesh,
        receiver: GridReceiver | None,
        board: StatusBoard,
        *,
        runtime: RuntimeConfig,
        farewell: Farewell,
        ledger: Path,
        saver: CommandSource,
        sleeper: Sleeper | None = None,
        source: CommandSource | None = None,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._mesh = mesh
        self._receiver = receiver
        self._board = board
        self._runtime = runtime
        self._farewell = farewell
        self._saver = saver
        self._sleeper = sleeper
        self._source = source
        self._sources = {source.kind: source for source in (saver, sleeper, source) if source is not None}
        self._ledger = ledger
        self._trained_last = False

    def run(self) -> None:
        """Follow commands until `stop`."""
        while True:
            payload = msgspec.msgpack.encode(self._decide()) if self._ranks.rank == 0 else None
            command = msgspec.msgpack.decode(self._ranks.broadcast_bytes(payload))
            if command["kind"] == "stop":
                self._board.enter("stopping")
                return
            if command["kind"] == "train":
                self._train(command["step"])
            elif command["kind"] != "noop":
                with self._ranks.during(f"a {command['kind']} command", collective="a collective"):
                    self._sources[command["kind"]].execute(command)
            if any(row[0] for row in self._ranks.gather_ints([int(self._farewell.is_requested)])):
                self._farewell.request()
            if self._is_asleep:
                self._board.enter("asleep", "its turn")
            else:
                self._board.enter("idle", "a grid or a request")

    @property
    def _is_asleep(self) -> bool:
        return self._sleeper is not None and self._sleeper.is_asleep

    def _decide(self) -> dict[str, Any]:
        heartbeat_at = time.monotonic() + self._runtime.heartbeat_s
        while time.monotonic() < heartbeat_at:
            if self._farewell.is_due():
                return {"kind": "stop"}
            assert self._receiver is not None
            if self._receiver.failure is not None:
                raise self._receiver.failure
            if self._saver.pending() and not self._is_asleep:
                return self._saver.next_command()
            if self._sleeper is not None and self._sleeper.pending():
                return self._sleeper.next_command()
            if self._is_asleep:
                time.sleep(POLL_S)
                continue
            step = self._receiver.waiting_step()
            wants_other = self._source is not None and self._source.pending()
            if step is not None and not (wants_other and self._trained_last):
                self._trained_last = True
                return {"kind": "train", "step": step}
            if wants_other:
                assert self._source is not None
                self._trained_last = False
                return self._source.next_command()
            if self._source is not None:
                self._source.wait(POLL_S)
            else:
                time.sleep(POLL_S)
        return {"kind": "noop"}

    def _train(self, step: int) -> None:
        self._board.enter("training")
        with self._ranks.during(f"step {step}", collective="a forward or backward pass"):
            item, num_tokens = self._take(step)
            started = time.monotonic()
            row = self._trainer.train(item)
        row = _finite_only(row) | {"time/train_s": time.monotonic() - started}
        self._board.add(num_trained_tokens=num_tokens)
        self._board.enter("publishing")
        with self._ranks.during(f"step {step}", collective="the gathering of weights"):
            self._trainer.after_step(step)
        self._board.add_row(step, row)
        self._board.progress(steps_done=step + 1, updates_done=self._trainer.optimizer.num_updates)

    def _take(self, step: int) -> tuple[GridItem, int]:
        """This rank's item, and the tokens of the whole grid, once all ranks hold the same one."""
        item = self._share(self._receive(step))
        held = agree(step, item, self._ranks, cp=self._mesh.cp)
        assert item is not None
        if self._ranks.rank == 0:
            self._write_ledger(held)
        return item, sum(other.num_tokens for other in held[:: self._mesh.cp])

    def _receive(self, step: int) -> GridItem | None:
        """The item of this data rank on its CP rank 0; None elsewhere, and where none came in time."""
        if self._receiver is None:
            return None
        try:
            return self._receiver.take(step, deadline_s=self._runtime.collective_deadline_s / 2)
        except DeadlineExceeded:  # the agreement tells every rank
            logger.error("rank {} has no item for step {}", self._ranks.rank, step)
            return None

    def _share(self, item: GridItem | None) -> GridItem | None:
        """CP rank 0's item on every rank of its data rank; no bytes at all where it has none."""
        if self._mesh.cp == 1:
            return item
        first = self._mesh.data_rank * self._mesh.cp
        payload = None
        if self._mesh.cp_rank == 0:
            payload = b"" if item is None else msgspec.msgpack.encode([bytes(frame) for frame in encode_item(item)])
        shared = self._ranks.share_bytes(payload, first=first, last=first + self._mesh.cp - 1)
        if self._mesh.cp_rank == 0 or not shared:
            return item
        frames = msgspec.msgpack.decode(shared, type=list[bytes])
        return decode_item(frames, max_bytes=len(shared))

    def _write_ledger(self, held: list[Held]) -> None:
        pids = self._board.snapshot().pids
        with self._ledger.open("ab") as file:
            for rank, (pid, other) in enumerate(zip(pids, held, strict=True)):
                entry = {
                    "step": other.step,
                    "rank": rank,
                    "pid": pid,
                    "epoch": other.epoch,
                    "data_rank": other.data_rank,
                    "item": f"{other.item_digest:0{DIGEST_HEX_DIGITS}x}",
                }
                file.write(msgspec.json.encode(entry) + b"\n")


def _finite_only(row: dict[str, Any]) -> dict[str, Any]:
    """A refused update has means that are not finite; JSON would make them null, which says something else."""
    return {name: value for name, value in row.items() if not (isinstance(value, float) and not math.isfinite(value))}
