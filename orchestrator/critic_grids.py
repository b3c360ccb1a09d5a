"""The critic's grids under way: shipped in order beside the loop, and each step's metrics row written once.

Notable:
- `send` returns at once. A data rank holds one grid besides the one it trains; those further behind wait here, so the
  loop never waits for an acknowledgement.
- The lag is the number of grids sent and not yet reported done by the critic's `/status`. `critic_first` waits for the
  step just sent, so its lag at a send is 0; `overlap` waits for step s - 1 - max_critic_lag before it sends step s, so
  its lag at a send is at most `max_critic_lag`.
- A step's deadline begins when it is sent or when the step before it is done, whichever is later: a critic that keeps
  pace never meets it, however many grids are in line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.trainers import TrainClient
from services.transport.grid_sender import GridSender
from services.wire.grids import GridItem


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that was sent and is not yet reported done."""

    step: int
    lag: int
    """when it was sent"""
    sent_s: float


class CriticGrids:
    """What the critic was sent, and how far it is behind.

    Args:
        critic: its control client.
        sender: ships its grids.
        step_deadline_s: of one step, and of one delivery.
        on_done: called once a step, in order, with the step and its metrics row.
    """

    def __init__(
        self,
        critic: TrainClient,
        sender: GridSender,
        *,
        step_deadline_s: float,
        on_done: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self._critic = critic
        self._sender = sender
        self._step_deadline_s = step_deadline_s
        self._on_done = on_done
        self._to_ship: asyncio.Queue[list[GridItem]] = asyncio.Queue()
        self._to_finish: asyncio.Queue[_UnderWay] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._newest_sent = self._newest_done = -1

    def go_on_from(self, step: int) -> None:
        """The critic has done `step` steps, all reported, before this start."""
        self._newest_sent = self._newest_done = step - 1

    def num_sent(self) -> int:
        """Grids handed over so far, over the whole run."""
        return self._newest_sent + 1

    @property
    def lag(self) -> int:
        """Grids sent and not yet reported done."""
        return self._newest_sent - self._newest_done

    def send(self, items: list[GridItem]) -> None:
        """Hand over the grid of the next step, one item per data rank."""
        step = items[0].header.step
        assert step == self._newest_sent + 1, f"critic step {step} after {self._newest_sent}"
        self._to_ship.put_nowait(items)
        self._to_finish.put_nowait(_UnderWay(step, self.lag, time.monotonic()))
        self._newest_sent = step

    def is_done(self, step: int) -> bool:
        """Has `step` been reported done, and its row been written; a negative step always has."""
        return step <= self._newest_done

    async def wait_done(self, step: int) -> None:
        """Wait until `is_done(step)`."""
        while not self.is_done(step):
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Ship and watch for ever; ends by cancellation or by the first failure."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ship())
            group.create_task(self._watch())

    async def _ship(self) -> None:
        while True:
            await self._sender.send(await self._to_ship.get(), deadline_s=self._step_deadline_s)

    async def _watch(self) -> None:
        while True:
            under_way = await self._to_finish.get()
            row = await self._critic.wait_step(under_way.step, deadline_s=self._step_deadline_s)
            own = {"value/critic_lag": under_way.lag, "time/critic_s": time.monotonic() - under_way.sent_s}
            self._on_done(under_way.step, row | own)
            self._newest_done = under_way.step
            self._changed.set()
