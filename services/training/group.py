"""The command loop of a train group: rank 0 decides, every rank follows, in lock step.

Notable:
- Rank 0 broadcasts one small command at a time: `train` a grid, a role's own command (the critic's `score`), `noop` as
  a heartbeat while idle, or `stop`. No rank ever waits in a collective without a deadline.
- Scores and grids take turns when both wait, so neither starves; a score never falls between the K updates of a grid.
- Before a step the ranks agree on (epoch, step, micro-batches, grid digest); a rank without its item, or with another,
  fails all ranks together, by name.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec
from loguru import logger

from services.config.system import RuntimeConfig
from services.training.board import StatusBoard
from services.training.optimizer import Optimizer
from services.training.preflight import DIGEST_HEX_DIGITS, Held, agree
from services.training.ranks import Ranks
from services.transport.grid_receiver import GridReceiver
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
        receiver: GridReceiver,
        board: StatusBoard,
        *,
        runtime: RuntimeConfig,
        stop: threading.Event,
        ledger: Path,
        source: CommandSource | None = None,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._receiver = receiver
        self._board = board
        self._runtime = runtime
        self._stop = stop
        self._source = source
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
                assert self._source is not None
                self._source.execute(command)
            self._board.enter("idle", "a grid or a request")

    def _decide(self) -> dict[str, Any]:
        heartbeat_at = time.monotonic() + self._runtime.heartbeat_s
        while time.monotonic() < heartbeat_at:
            if self._stop.is_set():
                return {"kind": "stop"}
            if self._receiver.failure is not None:
                raise self._receiver.failure
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
        item, num_tokens = self._take(step)
        started = time.monotonic()
        row = self._trainer.train(item)
        row["time/train_s"] = time.monotonic() - started
        self._board.add(num_trained_tokens=num_tokens)
        self._board.enter("publishing")
        self._trainer.after_step(step)
        self._board.add_row(step, row)
        self._board.progress(steps_done=step + 1, updates_done=self._trainer.optimizer.num_updates)

    def _take(self, step: int) -> tuple[GridItem, int]:
        """This rank's item, and the tokens of the whole grid, once all ranks hold the same one."""
        item = None
        try:
            item = self._receiver.take(step, deadline_s=self._runtime.collective_deadline_s / 2)
        except DeadlineExceeded:  # the agreement tells every rank
            logger.error("rank {} has no item for step {}", self._ranks.rank, step)
        held = agree(step, item, self._ranks)
        assert item is not None
        if self._ranks.rank == 0:
            self._write_ledger(held)
        return item, sum(other.num_tokens for other in held)

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
