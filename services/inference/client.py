"""The client of one engine, of either kind: generation, weight updates, sleep, and what it is asked about itself.

Notable:
- An engine that reports `weight_versions` is paused with "keep": requests live through an update. One that cannot is
  paused with "abort": each request continues from its tokens, and since nothing is sent during an update, every reply
  belongs to the version current when it was sent. That takes a client that sends all of an engine's requests, so it
  does not work behind a router.
- An engine that is put to sleep aborts its requests: they go on from their tokens once it is awake, and that time is
  not the requests' own. Its weights are summed before the sleep and after it, for memory is not trusted to come back.
- Connection errors and 503 are retried until the deadline; any other error is raised at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from services.inference.generation import Answer, Generation, GenerationClient, Refused, deadline, version_of
from services.runtime.auth import Token
from services.wire.errors import ContractError, CounterpointError, DependencyLost

__all__ = ["Asleep", "EngineClient", "Generation"]

RESUME_DEADLINE_S = 5.0
"""An engine is resumed after a failed update or sleep, within this."""
DRAIN_DEADLINE_S = 2.0
"""Requests still open this long after an aborting pause reached the engine after it: they are taken back."""


class Asleep(ContractError):
    """The engine sleeps and cannot take weights; nothing was sent to it."""


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _IsSleeping(msgspec.Struct):
    is_sleeping: bool


class _Results(msgspec.Struct):
    results: list[str]
    """one per worker"""


class EngineClient(GenerationClient):
    """One engine; safe to use from many tasks of one event loop."""

    def __init__(self, url: str, *, eos_token_id: int, clear_cache: bool, token: Token | None = None) -> None:
        """Connect lazily.

        Args:
            url: http://host:port of the engine itself, never of a router: updates must reach every engine.
            eos_token_id: ends a generation, besides what the model's own files say.
            clear_cache: recompute the cache of live requests at each update.
            token: shown with every request.
        """
        super().__init__(url, eos_token_id=eos_token_id, token=token)
        self.version = 0
        self._clear_cache = clear_cache
        self._tells_versions: bool | None = None
        self._updating = asyncio.Lock()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._open: set[asyncio.Task[bytes]] = set()
        self._is_asleep = False
        self._weights_asleep: list[str] = []

    @property
    def tells_versions(self) -> bool:
        """Whether it says which version sampled each token; known once it was ready."""
        return bool(self._tells_versions)

    @property
    def is_updating(self) -> bool:
        """Whether new weights are on their way into it: what it says of itself is about to change."""
        return self._updating.locked()

    @property
    def is_asleep(self) -> bool:
        """From the beginning of a sleep until it is awake, its weights are checked and requests are sent again."""
        return self._is_asleep

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until the engine is healthy, and learn whether it tells versions.

        Raises:
            DeadlineExceeded: when it is not within `deadline_s`.
        """
        async with deadline(f"the engine at {self.url} to be ready", deadline_s):
            await self.retried("GET", "/health")
            await self._learn_version(self.retried)

    async def read_version(self) -> int:
        """Ask, once, which version the engine serves; one without that route cannot tell versions.

        Returns:
            Where it cannot tell, the version that was last brought.

        Raises:
            DependencyLost: no connection, or 5xx.
        """
        return await self._learn_version(self.request)

    async def _learn_version(self, ask: Callable[[str, str], Coroutine[Any, Any, bytes]]) -> int:
        try:
            raw = await ask("GET", "/weight_info")
        except Refused:
            raise
        except ContractError:
            self._tells_versions = False
            return self.version
        self._tells_versions = True
        self.version = version_of(msgspec.json.decode(raw, type=_WeightInfo).weight_version)
        return self.version

    async def update_weights(self, path: Path, version: int, *, deadline_s: float) -> None:
        """Bring a snapshot to the engine: pause, load, label, resume.

        Raises:
            DeadlineExceeded: not done in time; the engine has been told to resume.
            DependencyLost: the engine could not load it. The local engine then still serves its old weights; vLLM's
                may be half-written.
            Asleep: it sleeps.
            ContractError: it refused a request (4xx).
        """
        async with self._updating, deadline(f"the weight update of {self.url} to version {version}", deadline_s):
            if self._is_asleep:
                raise Asleep(f"{self.url} sleeps: version {version} cannot be brought before it is awake")
            if self._tells_versions is None:
                await self._learn_version(self.retried)
            clear_cache = "true" if self._clear_cache else "false"
            mode = "keep" if self._tells_versions else "abort"
            if mode == "abort":
                self._may_send.clear()
            try:
                await self.retried("POST", f"/pause?mode={mode}&clear_cache={clear_cache}")
                if mode == "abort":
                    await self._take_back_open_requests()
                kwargs = {"path": str(path), "version": str(version)}
                await self.retried("POST", "/collective_rpc", {"method": "load_snapshot", "kwargs": kwargs})
                if self._tells_versions:
                    await self.retried("POST", "/update_weight_version", {"new_version": f"v{version}"})
                self.version = version
            except BaseException:
                # The first error is the one to tell; an engine left paused would hang every rollout. vLLM drops the
                # connection after an error of its own, so even this takes more than one attempt.
                with contextlib.suppress(CounterpointError, TimeoutError):
                    async with asyncio.timeout(RESUME_DEADLINE_S):
                        await self.retried("POST", "/resume")
                raise
            else:
                await self.retried("POST", "/resume")
            finally:
                self._may_send.set()

    async def sleep(self, *, deadline_s: float) -> None:
        """Make the engine give its memory back; nothing is sent to it until `wake_up`. Nothing to do where it sleeps.

        Open requests end as aborted and go on from their tokens afterwards.

        Raises:
            DeadlineExceeded: not done in time; the engine has been told to wake up.
            DependencyLost: no connection, or it failed (5xx).
            ContractError: it does not say that it sleeps, or cannot sum its weights.
        """
        async with self._updating, deadline(f"{self.url} to fall asleep", deadline_s):
            if self._is_asleep:
                return
            self._weights_asleep = await self._sum_weights()
            self._is_asleep = True
            self._may_send.clear()
            try:
                await self.retried("POST", "/sleep?level=1&mode=abort")
                await self._take_back_open_requests()
                if not await self._is_sleeping():
                    raise ContractError(f"{self.url} was put to sleep and says that it does not sleep")
            except BaseException:
                with contextlib.suppress(CounterpointError, TimeoutError):
                    async with asyncio.timeout(RESUME_DEADLINE_S):
                        await self.retried("POST", "/wake_up")
                self._is_asleep = False
                self._may_send.set()
                raise

    async def wake_up(self, *, deadline_s: float) -> None:
        """Make the engine take its memory again, and send requests again. Nothing to do where it is awake.

        After an error it counts as asleep: no token of weights that did not come back is ever taken.

        Raises:
            DeadlineExceeded: not done in time.
            DependencyLost: no connection, or it failed (5xx).
            ContractError: it says that it still sleeps, or its weights are not those that went to sleep.
        """
        async with self._updating, deadline(f"{self.url} to wake up", deadline_s):
            if not self._is_asleep:
                return
            await self.retried("POST", "/wake_up")
            if await self._is_sleeping():
                raise ContractError(f"{self.url} was woken up and says that it sleeps")
            weights = await self._sum_weights()
            if weights != self._weights_asleep:
                raise ContractError(
                    f"{self.url} woke up with other weights than it fell asleep with: their checksums are {weights}, "
                    f"and were {self._weights_asleep}"
                )
            self._is_asleep = False
            self._may_send.set()

    async def _is_sleeping(self) -> bool:
        return msgspec.json.decode(await self.retried("GET", "/is_sleeping"), type=_IsSleeping).is_sleeping

    async def _sum_weights(self) -> list[str]:
        """The checksum of each worker's weights.

        Raises:
            DependencyLost: the engine failed (5xx); vLLM also says so of a method that it does not have.
            ContractError: it cannot tell.
        """
        try:
            raw = await self.retried("POST", "/collective_rpc", {"method": "weights_checksum"})
            weights = msgspec.json.decode(raw, type=_Results).results
        except (DependencyLost, ContractError, msgspec.DecodeError) as error:
            kind = DependencyLost if isinstance(error, DependencyLost) else ContractError
            raise kind(
                f"{self.url} cannot tell the checksum of its weights, and may not sleep without: {error}"
            ) from error
        if not weights:
            raise ContractError(f"{self.url} told the checksums of no worker's weights")
        return weights

    async def _ask(self, body: dict[str, Any], limit: asyncio.Timeout) -> Answer:
        """One exchange; taken back where a sleep or an aborting update wants it."""
        if self._tells_versions is None:
            await self._learn_version(self.retried)
        await self._turn_to_send(limit)
        # From here to the request no other task runs: it is among the open ones, under the version of now.
        version = None if self._tells_versions else self.version
        send: Coroutine[Any, Any, bytes] = self.request("POST", "/inference/v1/generate", body)
        task = asyncio.create_task(send)
        self._open.add(task)
        try:
            return Answer(await task, version)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return Answer(None)
        finally:
            self._open.discard(task)

    async def _turn_to_send(self, limit: asyncio.Timeout) -> None:
        """Wait until requests may be sent; while the engine sleeps `limit` stands still."""
        while not self._may_send.is_set():
            ends = limit.when()
            if not self._is_asleep or ends is None:
                await self._may_send.wait()
                continue
            clock = asyncio.get_running_loop().time
            left_s = ends - clock()
            limit.reschedule(None)
            await self._may_send.wait()
            limit.reschedule(clock() + left_s)

    async def _take_back_open_requests(self) -> None:
        """End what the aborting pause did not: requests that reached the engine after it wait there unsampled."""
        if self._open:
            await asyncio.wait(self._open, timeout=DRAIN_DEADLINE_S)
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
