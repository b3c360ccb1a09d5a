"""Whose turn it is on devices that roles share: nobody wakes before everybody else sleeps.

    "time"         engines, critic and policy; rollouts end (or, where the run is to end, are cut) before engines sleep
    "time_train"   critic and policy; engines have devices of their own

Notable:
- One holder at a time, by agreement and not by luck: the next one is woken after the last one has said that it sleeps.
- A turn ends when its holder is done: the policy with the step it was sent, the engines with their rollouts.
- Engines that wake get the newest weights before rollouts go on.
- Every hand-over is an event, and what it cost is in the step's `turns` row.
- Where nothing is shared there are no turns: `take` returns at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from loguru import logger

from orchestrator.metrics import JsonLines
from orchestrator.producer import Producer
from orchestrator.publisher import Publisher
from orchestrator.trainers import TrainClient
from services.inference.client import EngineClient
from services.wire.errors import DependencyLost

Role = Literal["inference", "critic", "policy"]


class Sleeper(Protocol):
    """A role that gives its devices back and takes them again."""

    async def sleep(self) -> dict[str, int]:
        """Wait until it is done, and let it sleep; bytes that it tells of."""
        ...

    async def wake_up(self) -> dict[str, int]:
        """Let it wake; bytes that it tells of."""
        ...


class Turns:
    """Keeper of the devices that roles share.

    Args:
        sleepers: Those who share; empty where nobody does.
        holder: Who is awake at the start; everybody else sleeps.
        run_dir: Events go to its `events.jsonl`.
        on_wait: Told what a hand-over waits for.
    """

    def __init__(
        self,
        sleepers: Mapping[Role, Sleeper],
        *,
        holder: Role | None,
        run_dir: Path,
        on_wait: Callable[[str], None],
    ) -> None:
        assert holder is None or holder in sleepers
        self._sleepers: dict[Role, Sleeper] = dict(sleepers)
        self._events = JsonLines(run_dir / "events.jsonl")
        self._on_wait = on_wait
        self._row: dict[str, float] = {}
        self._since = time.monotonic()
        self.holder: Role | None = holder
        """None: all of them sleep, or nobody shares"""

    def includes(self, role: Role) -> bool:
        """Does it share devices."""
        return role in self._sleepers

    async def take(self, role: Role) -> None:
        """Give `role` its turn; at once where it has it, or shares nothing.

        Raises:
            ContractError: Something woke that is not what went to sleep.
            DeadlineExceeded, DependencyLost: A role does not answer, or is not done in time.
        """
        if not self.includes(role) or self.holder == role:
            return
        facts: dict[str, Any] = {"holder": role, "before": self.holder, "held_s": round(self._held_s, 3)}
        if self.holder is not None:
            facts |= await self._change(self.holder, "sleep", self._sleepers[self.holder].sleep)
            self.holder = None
        facts |= await self._change(role, "wake", self._sleepers[role].wake_up)
        self.holder, self._since = role, time.monotonic()
        logger.debug("turn of {}: {}", role, facts)
        self._events.write({"time_s": round(time.time(), 3), "event": "turn", **facts})

    def take_row(self) -> dict[str, float]:
        """What hand-overs cost since the last call, by role."""
        row, self._row = self._row, {}
        return row

    def snapshot(self) -> dict[str, Any] | None:
        """For the status page: who has the devices, and since when; None where nobody shares."""
        if not self._sleepers:
            return None
        asleep = [role for role in self._sleepers if role != self.holder]
        return {"holder": self.holder, "held_s": round(self._held_s, 1), "asleep": asleep}

    @property
    def _held_s(self) -> float:
        return time.monotonic() - self._since

    async def _change(self, role: Role, word: str, work: Callable[[], Awaitable[dict[str, int]]]) -> dict[str, Any]:
        self._on_wait(f"{role} to {word}")
        started = time.monotonic()
        num_bytes = await work()
        took = time.monotonic() - started
        self._count(f"turns/{role}_{word}_s", took)
        for what, number in num_bytes.items():
            self._count(f"turns/{role}_{what}_bytes", float(number))
        return {f"{word}_s": round(took, 3)} | {f"{what}_bytes": number for what, number in num_bytes.items()}

    def _count(self, name: str, amount: float) -> None:
        self._row[name] = self._row.get(name, 0.0) + amount


class SharedTrainer:
    """A train group that takes turns: it sleeps once it has done all it was sent.

    Args:
        client: Its control client.
        num_sent: Grids sent to it so far, over the whole run.
        deadline_s: Of the step under way, and of each change.
    """

    def __init__(self, client: TrainClient, num_sent: Callable[[], int], *, deadline_s: float) -> None:
        self._client = client
        self._num_sent = num_sent
        self._deadline_s = deadline_s

    async def sleep(self) -> dict[str, int]:
        """See `Sleeper`."""
        await self._client.wait_done(self._num_sent() - 1, deadline_s=self._deadline_s)
        reply = await self._client.change("sleep", deadline_s=self._deadline_s)
        return {"sleep": reply.num_bytes, "left": reply.device_bytes}

    async def wake_up(self) -> dict[str, int]:
        """See `Sleeper`."""
        return {"wake": (await self._client.change("wake_up", deadline_s=self._deadline_s)).num_bytes}


class SharedEngines:
    """The engines that take turns, all at once.

    Args:
        engines: Their clients.
        producer: Its rollouts end before engines sleep, and go on when they are awake.
        publisher: Brings the newest weights when they wake.
        unless_ending: Does a piece of work, or drops it as soon as the run is to commit and end.
        deadline_s: Of each change.
        ending_deadline_s: For them to sleep once the run is to end.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        producer: Producer,
        publisher: Publisher,
        *,
        unless_ending: Callable[[Callable[[], Coroutine[Any, Any, bool]]], Awaitable[bool | None]],
        deadline_s: float,
        ending_deadline_s: float,
    ) -> None:
        self._engines = engines
        self._producer = producer
        self._publisher = publisher
        self._unless_ending = unless_ending
        self._deadline_s = deadline_s
        self._ending_deadline_s = ending_deadline_s

    async def sleep(self) -> dict[str, int]:
        """See `Sleeper`. At the end of a run rollouts are cut, and an engine that is gone holds nothing."""
        self._producer.hold()
        has_time = await self._unless_ending(self._producer.at_rest)
        self._publisher.hold()
        deadline_s = self._deadline_s if has_time else self._ending_deadline_s
        changes = (engine.sleep(deadline_s=deadline_s) for engine in self._engines)
        for result in await asyncio.gather(*changes, return_exceptions=True):
            if isinstance(result, BaseException) and (has_time or not isinstance(result, DependencyLost)):
                raise result
        return {}

    async def wake_up(self) -> dict[str, int]:
        """See `Sleeper`. At the end of a run nobody needs them."""
        await self._unless_ending(self._all_awake)
        return {}

    async def _all_awake(self) -> bool:
        await asyncio.gather(*(engine.wake_up(deadline_s=self._deadline_s) for engine in self._engines))
        self._publisher.go_on()
        await self._publisher.wait_for_newest()
        self._producer.go_on()
        return True
