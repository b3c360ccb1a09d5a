"""A train group as the orchestrator sees it: its `/status`, and waiting for a step with a deadline.

Notable:
- A group that does not answer is asked again for a few seconds before it counts as lost; a step that takes too long is
  a named deadline. Nothing is resent here: the grid sender owns delivery.
- A `/status` carries the metrics rows of the last few steps only. Every answer's rows are kept here until they are
  taken, so that whoever asks often enough for one purpose loses none for another.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import aiohttp
import msgspec
from loguru import logger

from services.transport.http import get_json, post_json
from services.wire.errors import ContractError, DeadlineExceeded, DependencyLost
from services.wire.messages import SleepReply, TrainStatus

POLL_S = 0.02
LOST_AFTER_S = 10.0


class TrainClient:
    """Control client of one train group."""

    def __init__(self, session: aiohttp.ClientSession, name: Literal["policy", "critic"], url: str) -> None:
        self._session = session
        self._url = url
        self.name: Literal["policy", "critic"] = name
        self.last: TrainStatus | None = None
        self._rows: dict[int, dict[str, Any]] = {}
        """rows that were seen and not taken, by step"""
        self._num_taken = 0

    async def status(self) -> TrainStatus:
        """Ask now.

        Raises:
            DependencyLost: when the group does not answer.
        """
        reply = await get_json(self._session, f"{self._url}/status", deadline_s=5.0)
        self.last = msgspec.convert(reply, TrainStatus)
        self._rows |= {int(step): row for step, row in self.last.rows.items() if int(step) >= self._num_taken}
        return self.last

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Wait until the group is past loading."""
        await self._poll(
            lambda status: status.state != "loading", f"{self.name} to be ready", deadline_s, lost_after_s=deadline_s
        )

    async def wait_step(self, step: int, *, deadline_s: float) -> dict[str, Any]:
        """Wait until grid `step` is fully applied; return its metrics row."""
        await self.wait_done(step, deadline_s=deadline_s)
        return self.take_row(step)

    async def wait_done(self, step: int, *, deadline_s: float) -> None:
        """Wait until grid `step` is fully applied; a negative one always is."""
        if step >= 0:
            await self._poll(lambda status: status.steps_done > step, f"{self.name} to finish step {step}", deadline_s)

    async def change(self, change: Literal["sleep", "wake_up"], *, deadline_s: float) -> SleepReply:
        """Have the group sleep or wake.

        Raises:
            ContractError: It says that it did something else.
            DeadlineExceeded, DependencyLost: It did not answer in time, or ended.
        """
        raw = await post_json(self._session, f"{self._url}/{change}", deadline_s=deadline_s, pure=True)
        reply = msgspec.convert(raw, SleepReply)
        if (reply.state == "asleep") != (change == "sleep"):
            raise ContractError(
                f"{self.name} was asked to {change.replace('_', ' ')} and says that it is {reply.state}"
            )
        return reply

    async def checkpoint(self, step: int, *, deadline_s: float) -> int:
        """Have the group write its part of the commit after `step` finished steps; its size in bytes.

        Raises:
            ContractError: the group is at another step.
            DependencyLost: it could not write, or did not answer in time.
        """
        reply = await post_json(self._session, f"{self._url}/checkpoint", {"step": step}, deadline_s=deadline_s)
        return int(reply["num_bytes"])

    def take_row(self, step: int) -> dict[str, Any]:
        """The metrics row of a finished step; earlier ones are let go."""
        row = self._rows.get(step)
        self._num_taken = step + 1
        self._rows = {later: kept for later, kept in self._rows.items() if later > step}
        if row is None:  # metrics never stop a run
            logger.warning("no metrics of {} step {}: its status keeps the last few steps only", self.name, step)
            return {}
        return row

    async def _poll(self, done, what: str, deadline_s: float, *, lost_after_s: float = LOST_AFTER_S) -> TrainStatus:
        started = answered = time.monotonic()
        while True:
            try:
                status = await self.status()
                answered = time.monotonic()
                if done(status):
                    return status
            except DependencyLost:
                if time.monotonic() - answered > lost_after_s:
                    raise
            if time.monotonic() - started > deadline_s:
                raise DeadlineExceeded(what, deadline_s)
            await asyncio.sleep(POLL_S)
