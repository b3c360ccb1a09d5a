"""Who the router hands requests to: engines come in when they are ready and right, and leave when they are not.

    what a look at an engine finds                        it is       and
    answers, serves the current weights, gets on          good        routed to
    no answer in time, 5xx; holds requests without a      suspect     out while a good one is left; its requests
    new token for as long                                             are given back where it still can
    serves other weights than the current ones            stale       out; the current ones are brought to it
    connection refused                                    dead        out
    4xx                                                   good        an answer is an answer

Notable:
- Nothing is routed before every engine has answered `/v1/models` with the run's model. The router starts empty.
- `inference.probe_deadline_s` is long, for a busy engine answers late; it stays.
- Whoever is out is looked at again for ever, and comes back as soon as it is good, current weights included.
- Where none is good, the least bad one stays or is taken back: the suspect that last answered. Where there is none
  either, the guard answers 503 and callers hold their requests until their own deadlines.
- The router's list of engines is the only one there is: a router that was started anew is empty, and is filled again.
- Updates go to each engine directly. One that fails its update is out, and the others go on; all failing is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from loguru import logger

from orchestrator.metrics import JsonLines
from services.inference.client import Asleep, EngineClient
from services.inference.generation import MODEL_NAME, GenerationClient, Unavailable
from services.inference.progress import read_progress
from services.inference.router_client import RouterClient
from services.runtime.auth import Token
from services.wire.errors import ConfigError, ContractError, CounterpointError, DeadlineExceeded, DependencyLost

T = TypeVar("T")

LOOK_INTERVAL_S = 1.0
GIVE_BACK_DEADLINE_S = 2.0


class Standing(StrEnum):
    """What the last look at an engine found."""

    WAITING = "waiting"
    GOOD = "good"
    SUSPECT = "suspect"
    STALE = "stale"
    DEAD = "dead"


class _Model(msgspec.Struct):
    id: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


@dataclass(eq=False)
class Worker:
    """One engine, as it was last seen."""

    name: str
    engine: EngineClient
    standing: Standing = Standing.WAITING
    cause: str = "not looked at yet"
    since: float = field(default_factory=time.monotonic)
    """of its standing"""
    is_routed: bool = False
    """what the router's list should say"""
    answered_at: float = 0.0
    """when it last told of itself, by the current weights"""
    num_tokens: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    """when a token last came, or it held no request"""
    num_brought: int = 0
    """updates begun or done: what was seen across one says nothing"""
    bringing: asyncio.Lock = field(default_factory=asyncio.Lock)
    telling: asyncio.Lock = field(default_factory=asyncio.Lock)
    may_be_paused: bool = False
    """it was asked to give back its requests, and has not said that it went on"""


class Routing:
    """Keeper of the router's list of engines, and the one way of updates to all of them."""

    def __init__(
        self,
        engines: list[EngineClient],
        client: GenerationClient,
        router_url: str,
        *,
        probe_deadline_s: float,
        update_deadline_s: float,
        run_dir: Path,
        token: Token | None = None,
    ) -> None:
        """Build it.

        Args:
            engines: one client an engine, each of its own address.
            client: generates through the router's guard.
            router_url: the router itself, behind its guard.
            probe_deadline_s: an engine that takes longer to answer, or to sample a token, is suspect.
            update_deadline_s: for bringing weights to an engine that comes back.
            run_dir: events go to its `events.jsonl`.
            token: shown to the router.
        """
        self.workers = [Worker(f"inference-{index}", engine) for index, engine in enumerate(engines)]
        self.client = client
        self._num_left = 0
        self._counted = (0, 0)
        self._router = RouterClient(router_url, token)
        self._probe_deadline_s = probe_deadline_s
        self._update_deadline_s = update_deadline_s
        self._events = JsonLines(run_dir / "events.jsonl")
        self._router_is_up = False
        self._current: tuple[Path | None, int] = (None, 0)
        """what engines must serve; the first version needs no snapshot, for engines start with it"""

    async def close(self) -> None:
        """Close the connections to the router and its guard; the engines' clients are their owner's."""
        await self._router.close()
        await self.client.close()

    # ---- beginning -----------------------------------------------------------------------------------------------

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until every engine has answered `/v1/models` with the run's model.

        Raises:
            DeadlineExceeded: one has not; names it and what it said last.
            ConfigError: one cannot tell versions.
        """
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(self._wait_for(worker))
        except TimeoutError:
            late = [f"{w.name} ({w.cause})" for w in self.workers if w.standing is Standing.WAITING]
            raise DeadlineExceeded(f"{', '.join(late)} to answer /v1/models", deadline_s) from None
        mute = [worker.name for worker in self.workers if not worker.engine.tells_versions]
        if mute:
            what = f"{', '.join(mute)} cannot tell which weights sampled a token, and behind a router nobody else can"
            fix = "use an engine that answers /weight_info, or a single one (deployment.num_inference_gpus)"
            raise ConfigError([f"inference.engine: {what}; fix: {fix}"])

    async def _wait_for(self, worker: Worker) -> None:
        while True:
            try:
                await self._check_model(worker)
                await worker.engine.read_version()
            except (ContractError, DependencyLost) as error:
                worker.cause = str(error)
                await asyncio.sleep(LOOK_INTERVAL_S)
            else:
                worker.standing, worker.cause, worker.since = Standing.GOOD, "", time.monotonic()
                return

    async def open(self, deadline_s: float) -> None:
        """Hand every engine to the router, now that all of them serve the current weights.

        Raises:
            DeadlineExceeded: the router did not take one in time.
        """
        missing = self.workers
        try:
            async with asyncio.timeout(deadline_s):
                while missing:
                    await asyncio.gather(*(self._look_after(worker) for worker in missing))
                    listed = await self._router.engines() or []
                    missing = [worker for worker in self.workers if worker.engine.url not in listed]
                    await asyncio.sleep(LOOK_INTERVAL_S if missing else 0)
        except TimeoutError:
            names = ", ".join(f"{worker.name} ({worker.cause or worker.standing})" for worker in missing)
            raise DeadlineExceeded(f"the router at {self._router.url} to take {names}", deadline_s) from None

    async def run(self) -> None:
        """Look after every engine for ever; ends by cancellation."""
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(self._keep(worker))

    async def _keep(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self._look_after(worker)

    # ---- weights -------------------------------------------------------------------------------------------------

    async def update_weights(self, path: Path, version: int, *, deadline_s: float) -> None:
        """Bring a snapshot to every engine in use; from now on this is what an engine must serve.

        Raises:
            DeadlineExceeded, DependencyLost: no engine took it; the first one's error.
        """
        self._current = (path, version)
        in_use = [worker for worker in self.workers if worker.is_routed or worker.standing is Standing.GOOD]
        for worker in in_use:
            worker.num_brought += 1
        errors = await asyncio.gather(*(self._bring(worker, deadline_s) for worker in in_use))
        if all(errors):  # also where there is none
            raise next(iter(errors), None) or DependencyLost(f"no engine is left to take version {version}")

    async def _bring(self, worker: Worker, deadline_s: float) -> CounterpointError | None:
        """Bring the current weights to an engine; one that fails is out, and its error is returned."""
        async with worker.bringing:
            path, version = self._current
            if path is None or worker.engine.version == version:
                return None
            try:
                await worker.engine.update_weights(path, version, deadline_s=deadline_s)
            except Asleep:  # a look after it has woken brings them
                return None
            except (DeadlineExceeded, DependencyLost) as error:
                await self._judge(worker, Standing.STALE, f"did not take version {version}: {error}")
                return error
            finally:
                worker.num_brought += 1
            worker.moved_at, worker.may_be_paused = time.monotonic(), False
            return None

    # ---- one look ------------------------------------------------------------------------------------------------

    async def _look_after(self, worker: Worker) -> None:
        """Probe an engine, judge it, help it back, and put the router right about it."""
        if worker.engine.is_asleep:  # it can neither take weights nor give requests back
            return
        if worker.bringing.locked():  # the update is tried again until its deadline; requests must not wait as long
            if await self._is_gone(worker):
                await self._judge(worker, Standing.DEAD, "gone while weights were on their way to it")
        else:
            num_brought = worker.num_brought
            standing, cause = await self._probe(worker)
            if worker.num_brought == num_brought:
                await self._judge(worker, standing, cause)
                if standing is Standing.STALE:  # the next look finds it good
                    await self._bring(worker, self._update_deadline_s)
        await self._tell_router(worker)

    async def _is_gone(self, worker: Worker) -> bool:
        """Whether nobody listens at an engine's address."""
        try:
            await self._in_time(worker.engine.request("GET", "/health"))
        except Unavailable as error:
            return isinstance(error.__cause__, aiohttp.ClientConnectorError)
        except (CounterpointError, TimeoutError):
            return False
        return False

    async def _probe(self, worker: Worker) -> tuple[Standing, str]:
        """What an engine says of itself now."""
        engine, page = worker.engine, b""
        try:
            if worker.may_be_paused:
                await self._in_time(engine.request("POST", "/resume"))
                worker.may_be_paused = False
            with contextlib.suppress(ContractError):
                await self._in_time(self._check_model(worker))
            version = await self._in_time(engine.read_version())
            with contextlib.suppress(ContractError):
                page = await self._in_time(engine.request("GET", "/metrics"))
        except TimeoutError:
            return Standing.SUSPECT, f"no answer within {self._probe_deadline_s:g} s"
        except Unavailable as error:
            is_refused = isinstance(error.__cause__, aiohttp.ClientConnectorError)
            return (Standing.DEAD if is_refused else Standing.SUSPECT), str(error)
        except DependencyLost as error:
            return Standing.SUSPECT, str(error)
        except ContractError:
            return Standing.GOOD, ""
        if version != self._current[1]:
            return Standing.STALE, f"serves version {version} instead of {self._current[1]}"
        worker.answered_at = now = time.monotonic()
        progress = read_progress(page)
        if progress.num_tokens != worker.num_tokens or not progress.num_held:
            worker.num_tokens, worker.moved_at = progress.num_tokens, now
        if now - worker.moved_at > self._probe_deadline_s:
            return Standing.SUSPECT, f"holds {progress.num_held} requests, no token for {self._probe_deadline_s:g} s"
        return Standing.GOOD, ""

    async def _in_time(self, answer: Awaitable[T]) -> T:
        async with asyncio.timeout(self._probe_deadline_s):
            return await answer

    async def _check_model(self, worker: Worker) -> None:
        raw = await worker.engine.request("GET", "/v1/models")
        try:
            names = [model.id for model in msgspec.json.decode(raw, type=_Models).data]
        except msgspec.DecodeError as error:
            raise DependencyLost(f"{worker.engine.url}/v1/models does not decode: {error}") from error
        if MODEL_NAME not in names:
            raise DependencyLost(f"{worker.engine.url} serves {', '.join(names) or 'nothing'}, not {MODEL_NAME}")

    # ---- judging -------------------------------------------------------------------------------------------------

    async def _judge(self, worker: Worker, standing: Standing, cause: str) -> None:
        """Give an engine its standing; who is routed to follows from everybody's."""
        is_new = standing is not worker.standing
        worker.standing, worker.cause = standing, cause
        if is_new:
            worker.since = time.monotonic()
            self._note(f"engine_{standing}", engine=worker.name, cause=cause)
        chosen = self._chosen()
        changed = [other for other in self.workers if other.is_routed != (other in chosen)]
        for other in changed:
            other.is_routed = not other.is_routed
            self._num_left += not other.is_routed
            self._note("engine_joined" if other.is_routed else "engine_left", engine=other.name, cause=other.cause)
        await asyncio.gather(*(self._tell_router(other) for other in changed))
        if standing is Standing.SUSPECT and worker in changed and not worker.bringing.locked():
            await self._give_back(worker)

    def _chosen(self) -> list[Worker]:
        """The good ones; else the least bad."""
        good = [worker for worker in self.workers if worker.standing is Standing.GOOD]
        suspects = [worker for worker in self.workers if worker.standing is Standing.SUSPECT and worker.answered_at]
        return good or sorted(suspects, key=lambda worker: worker.answered_at)[-1:]

    async def _give_back(self, worker: Worker) -> None:
        """Ask an engine to end what it holds, so that its requests go on elsewhere from their tokens."""
        worker.may_be_paused = True
        async with worker.bringing:
            with contextlib.suppress(CounterpointError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_DEADLINE_S):
                    await worker.engine.request("POST", "/pause?mode=abort&clear_cache=true")

    def _note(self, event: str, **facts: Any) -> None:
        logger.info("{}: {}", event.replace("_", " "), ", ".join(str(fact) for fact in facts.values() if fact))
        self._events.write({"time_s": round(time.time(), 3), "event": event, **facts})

    async def _tell_router(self, worker: Worker) -> None:
        """Make the router's list say about an engine what it should; what fails is tried at the next look."""
        async with worker.telling:
            listed = await self._router.engines()
            if (listed is not None) != self._router_is_up:
                self._router_is_up = listed is not None
                self._note("router_up" if self._router_is_up else "router_lost", url=self._router.url)
            url = worker.engine.url
            if listed is None or (url in listed) == worker.is_routed:
                return
            if worker.is_routed:
                # the router asks the engine's health first: also a suspect must be able to come in
                await self._router.add(url, deadline_s=2 * self._probe_deadline_s)
            else:
                await self._router.remove(url)

    # ---- looking in ----------------------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, float]:
        """For a metrics row: engines routed to now, and what has happened since the last row."""
        counted, self._counted = self._counted, (self._num_left, self.client.num_resent)
        return {
            "rollout/engines_routed": float(sum(worker.is_routed for worker in self.workers)),
            "rollout/engines_left": float(self._num_left - counted[0]),
            "rollout/requests_resent": float(self.client.num_resent - counted[1]),
        }

    @property
    def waiting_for(self) -> str:
        """Engines that are out, and why; empty where there are none."""
        return ", ".join(f"{worker.name} ({worker.standing})" for worker in self.workers if not worker.is_routed)

    def snapshot(self) -> dict[str, Any]:
        """For the status page."""
        now = time.monotonic()
        return {
            "router_up": self._router_is_up,
            "engines": [
                {
                    "name": worker.name,
                    "url": worker.engine.url,
                    "routed": worker.is_routed,
                    "standing": str(worker.standing),
                    "cause": worker.cause,
                    "since_s": round(now - worker.since, 1),
                    "version": worker.engine.version,
                }
                for worker in self.workers
            ],
        }
