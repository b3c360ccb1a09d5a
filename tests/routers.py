"""The real router as a child process, its real guard in this one, and the keeper of its list, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.routing import Routing
from services.config.schema import Config
from services.inference.client import EngineClient
from services.inference.generation import GenerationClient
from services.inference.router_client import RouterClient
from services.inference.router_command import router_command
from services.inference.router_guard import RouterGuard, serve
from services.runtime.auth import Token
from services.runtime.ports import PortReservation
from tests.runs import read_lines

EOS = 4
MAX_MODEL_LEN = 64
CONFIG = Config.model_validate(
    {
        "model": {"path": "m"},
        "algorithm": {"type": "grpo"},
        "env": [{"type": "add"}],
        "inference": {"max_model_len": MAX_MODEL_LEN},
    }
)


class RouterProcess:
    """`vllm-router`, as the planner starts it; it can be killed and started again at the same address."""

    def __init__(self, port: int, metrics_port: int, log: Path, *, guard_url: str | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._argv = router_command(
            CONFIG,
            host="127.0.0.1",
            port=port,
            metrics_port=metrics_port,
            python=sys.executable,
            guard_url=guard_url,
        )
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, start_new_session=True)

    def wait_up(self, deadline_s: float = 60) -> None:
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self.url}/liveness", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except urllib.error.HTTPError as error:  # it asks for a token: it is up
                error.close()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise AssertionError(f"the router did not come up: {self._log.read_text()}")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def router_process(folder: Path) -> Iterator[RouterProcess]:
    with PortReservation(["router", "metrics"]) as reserved:
        router = RouterProcess(reserved.ports["router"], reserved.ports["metrics"], folder / "router.log")
        router.start()
        try:
            router.wait_up()
            yield router
        finally:
            router.kill()


@dataclass
class Routed:
    """What a run has in front of its engines."""

    routing: Routing
    client: GenerationClient
    guard_url: str
    run_dir: Path
    num_told: dict[int, int] = field(default_factory=dict)
    """by seed, how often its request was answered"""

    def events(self, *names: str) -> list[tuple[str, str]]:
        """(event, engine) of those with one of these names, in order."""
        rows = read_lines(self.run_dir / "events.jsonl")
        return [(row["event"], row.get("engine", "")) for row in rows if row["event"] in names]

    async def ask(self, seed: int, *, deadline_s: float = 60) -> tuple[int, int]:
        """One request; its token, which is its seed's, and its version."""
        generation = await self.client.generate(
            [1, 2], max_tokens=1, temperature=1.0, seed=seed, deadline_s=deadline_s, ignore_eos=True
        )
        self.num_told[seed] = self.num_told.get(seed, 0) + 1
        (token,), (span,) = generation.token_ids, generation.spans
        return token, span.version

    def standing(self, index: int) -> str:
        return str(self.routing.workers[index].standing)

    async def until(self, condition: Any, deadline_s: float = 60) -> None:
        """Wait for what the keeper will do."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def routed(
    run_dir: Path,
    router: RouterProcess,
    engine_urls: list[str],
    *,
    probe_deadline_s: float = 30.0,
    patience_s: float = 30.0,
    max_model_len: int = MAX_MODEL_LEN,
    eos: int = EOS,
    token: Token | None = None,
    guard_port: int = 0,
) -> AsyncIterator[Routed]:
    """A guard before the router, and a keeper that has not looked yet; at the end the router lists nobody."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "events.jsonl").touch()
    front = RouterGuard(router.url, max_model_len=max_model_len, token=token)
    guard = await serve(front, "127.0.0.1", guard_port, is_guarded=token is not None)
    guard_url = f"http://127.0.0.1:{guard.addresses[0][1]}"
    engines = [EngineClient(url, eos_token_id=eos, clear_cache=True, token=token) for url in engine_urls]
    client = GenerationClient(guard_url, eos_token_id=eos, token=token, patience_s=patience_s)
    routing = Routing(
        engines,
        client,
        router.url,
        probe_deadline_s=probe_deadline_s,
        update_deadline_s=30,
        run_dir=run_dir,
        token=token,
    )
    try:
        yield Routed(routing, client, guard_url, run_dir)
    finally:
        await routing.close()
        for engine in engines:
            await engine.close()
        control = RouterClient(router.url, token)
        for url in await control.engines() or []:
            await control.remove(url)
        await control.close()
        await guard.cleanup()


@asynccontextmanager
async def kept(routing: Routing, *, first: Path | None = None) -> AsyncIterator[None]:
    """From ready to open, and looked after meanwhile; engines that served an earlier test are brought `first` again."""
    await routing.wait_ready(180)
    if first is not None:
        await routing.update_weights(first, 0, deadline_s=60)
    await routing.open(60)
    keeping = asyncio.create_task(routing.run())
    try:
        yield
        assert not keeping.done(), keeping.exception()
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
