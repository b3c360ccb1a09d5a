"""New weights on their way from the policy trainer to every engine.

Notable:
- The trainer only writes a snapshot; this task notices it on `/status` and brings it to each engine directly, while
  rollouts go on and the policy may already train the next step.
- A snapshot is deleted once every engine has moved on and it is not among the newest few.
- Engines that share their devices get nothing while they sleep.
- A version's deadline begins when its grid was delivered or when the version before it was brought, whichever is later.
- When the run was asked to end, so were the engines, perhaps: a version then counts as soon as the policy has it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from loguru import logger

from orchestrator.trainers import TrainClient
from services.wire.errors import ContractError, DeadlineExceeded

POLL_S = 0.05


class Updatable(Protocol):
    """An engine, or the keeper of several behind a router."""

    async def update_weights(self, path: Path, version: int, *, deadline_s: float) -> None:
        """Bring a snapshot."""
        ...


class Publisher:
    """Keeps the engines at the newest published version."""

    def __init__(
        self,
        policy: TrainClient,
        engines: Sequence[Updatable],
        *,
        keep_snapshots: int,
        update_deadline_s: float,
        step_deadline_s: float,
        on_version: Callable[[int, dict[str, Any]], None],
        on_engines: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._keep = keep_snapshots
        self._update_deadline_s = update_deadline_s
        self._step_deadline_s = step_deadline_s
        self._on_version = on_version
        self._on_engines = on_engines
        self._expected_since: dict[int, float] = {}
        self._brought_at = 0.0
        self._changed = asyncio.Event()
        self._expecting = asyncio.Event()
        self._left = asyncio.Event()
        self._may_bring = asyncio.Event()
        self._may_bring.set()
        self._abandoned: asyncio.Task[None] | None = None
        self.version = 0
        """what the engines serve; once they were left, what the policy has published"""

    def expect(self, version: int) -> None:
        """A grid that makes `version` has been delivered."""
        self._expected_since[version] = time.monotonic()
        self._expecting.set()

    def leave_engines(self) -> None:
        """Bring nothing more to them, and wait for nothing that is on its way."""
        self._left.set()
        self._may_bring.set()

    def hold(self) -> None:
        """Engines are about to sleep: bring them nothing until `go_on`."""
        if not self._left.is_set():
            self._may_bring.clear()

    def go_on(self) -> None:
        """Engines are awake."""
        self._may_bring.set()

    @property
    def newest_expected(self) -> int:
        """The version that the newest delivered grid makes, brought or not."""
        return max(self._expected_since, default=self.version)

    async def wait_for_newest(self) -> None:
        """Wait until the engines serve all that is expected by now."""
        await self.wait_for(self.newest_expected)

    async def wait_for(self, version: int) -> None:
        """Wait until every engine serves at least `version`; once they were left, until there is that version."""
        while self.version < version:
            self._changed.clear()
            await self._changed.wait()

    async def catch_up(self, version: int) -> None:
        """Bring the version that a commit holds to every engine, before there is a newer one.

        Raises:
            ContractError: the policy trainer does not offer it.
        """
        if version > 0:
            published = (await self._policy.status()).published
            if published.get("version") != version:
                raise ContractError(f"the policy offers version {published.get('version')}, not {version}")
            await self._unless_left(Path(published["path"]), version)
        self.version = version

    async def run(self) -> None:
        """Watch for ever; ends by cancellation or by the first failure."""
        while True:
            await self._expecting.wait()
            await self._may_bring.wait()
            status = await self._policy.status()
            published = status.published.get("version", 0)
            # a snapshot is announced just before its step counts as done and has a metrics row
            if self.version < published <= status.steps_done:
                await self._bring(published, Path(status.published["path"]))
                continue
            since = max(min(self._expected_since.values(), default=time.monotonic()), self._brought_at)
            if time.monotonic() - since > self._step_deadline_s:
                raise DeadlineExceeded(f"policy to publish version {self.version + 1}", self._step_deadline_s)
            await asyncio.sleep(POLL_S)

    async def _bring(self, version: int, path: Path) -> None:
        started = time.monotonic()
        brought = await self._unless_left(path, version)
        update_s = time.monotonic() - started
        if brought:
            logger.info("engines serve version {} ({:.2f} s)", version, update_s)
        else:
            logger.info("version {} is published; the engines are left as they are", version)
        for passed in range(self.version + 1, version + 1):
            self._on_version(passed, self._policy.take_row(passed - 1) | {"time/update_s": update_s})
            self._expected_since.pop(passed, None)
        self.version, self._brought_at = version, time.monotonic()
        if not self._expected_since:
            self._expecting.clear()
        if not brought:
            self._changed.set()
            return
        served = [folder for folder in sorted(path.parent.glob("v*")) if folder.name <= path.name]
        for old in served[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        self._changed.set()
        self._on_engines()

    async def _unless_left(self, path: Path, version: int) -> bool:
        """Update all engines; False, and not waiting for what that takes to end, once they are left."""
        if self._left.is_set():
            return False
        update, left = asyncio.create_task(self._update(path, version)), asyncio.create_task(self._left.wait())
        try:
            await asyncio.wait({update, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            if not update.done():
                self._abandoned = update  # its end tells the engine to go on, which takes a while where that is gone
                update.cancel()
        if update.done():
            await update
            return True
        return False

    async def _update(self, path: Path, version: int) -> None:
        await asyncio.gather(
            *(e.update_weights(path, version, deadline_s=self._update_deadline_s) for e in self._engines)
        )
