"""Engines without a model, on real sockets of this process: what a router sees of an engine that misbehaves.

Notable:
- They stand for something outside the project: an engine is known by its HTTP routes alone.
- A generation echoes its seed as its token, so whoever got it back knows which request it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from services.runtime.ports import PortReservation


class FakeEngine:
    """One engine; every attribute may be changed while it serves."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.model = "policy"
        self.version = 0
        self.answer_s = 0.0
        """before any answer but generation's"""
        self.turn_s = 0.0
        """of a generation"""
        self.generate_status = 200
        self.models_status = self.weight_info_status = self.metrics_status = 200
        self.load_status = 200
        self.logprob = -0.5
        self.is_stuck = False
        """generations neither end nor sample"""
        self.cuts_replies = False
        """breaks off in the middle of a generation's body"""
        self.seeds: list[int] = []
        """of the requests that came, in order"""
        self.paths: list[str] = []
        self.loaded: list[tuple[str, str]] = []
        """what was brought: path and version"""
        self.headers: dict[str, str] = {}
        """of the last generation"""
        self.num_cancelled = 0
        self._num_tokens = 0
        self._held: set[asyncio.Event] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Gone like a process that was killed: no answer to anybody, the port refuses."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            for handler in list(server.connections):
                if handler.transport is not None:
                    handler.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def start_anew(self) -> None:
        """Like a process that comes up again: with the weights of its model's folder."""
        self.version, self._num_tokens = 0, 0
        self.seeds, self.paths, self.loaded = [], [], []
        self._held.clear()
        await self.start()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.headers = dict(request.headers)
        seed = body["sampling_params"]["seed"]
        self.seeds.append(seed)
        given_back = asyncio.Event()
        self._held.add(given_back)
        try:
            if self.is_stuck:
                await given_back.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.turn_s):
                        await given_back.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._held.discard(given_back)
        if self.generate_status != 200:
            return web.json_response({"error": "as told"}, status=self.generate_status)
        tokens = [] if given_back.is_set() else [seed % 1000]
        self._num_tokens += len(tokens)
        choice: dict[str, Any] = {
            "token_ids": tokens,
            "finish_reason": "length" if tokens else "abort",
            "logprobs": {"content": [{"token_id": token, "logprob": self.logprob} for token in tokens]},
            "weight_versions": [{"version": f"v{self.version}", "start": 0, "end": len(tokens)}],
        }
        if self.cuts_replies:
            response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.json_response({"choices": [choice]})

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.paths.append(path)
        await asyncio.sleep(self.answer_s)
        if path == "/health":
            return web.Response()
        statuses = {
            "/v1/models": self.models_status,
            "/weight_info": self.weight_info_status,
            "/metrics": self.metrics_status,
        }
        if statuses.get(path, 200) != 200:
            return web.Response(status=statuses[path])
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self.model}]})
        if path == "/weight_info":
            return web.json_response({"weight_version": f"v{self.version}"})
        if path == "/metrics":
            held = f'vllm:num_requests_running{{model_name="policy"}} {float(len(self._held))}'
            return web.Response(text=f"vllm:generation_tokens_total {float(self._num_tokens)}\n{held}\n")
        if path == "/pause" and request.query.get("mode") == "abort":
            for given_back in self._held:
                given_back.set()
        elif path == "/collective_rpc":
            kwargs = msgspec.json.decode(await request.read())["kwargs"]
            if self.load_status != 200:
                return web.Response(status=self.load_status, text="no such snapshot")
            self.loaded.append((kwargs["path"], kwargs["version"]))
        elif path == "/update_weight_version":
            self.version = int(msgspec.json.decode(await request.read())["new_version"].removeprefix("v"))
        return web.json_response({})


@asynccontextmanager
async def fake_engines(num: int, *, started: int | None = None) -> AsyncIterator[list[FakeEngine]]:
    """Engines on free ports, the first `started` of them up (all unless told)."""
    with PortReservation([f"engine_{index}" for index in range(num)]) as reserved:
        engines = [FakeEngine(port) for port in reserved.ports.values()]
        try:
            for engine in engines[:started]:
                await engine.start()
            yield engines
        finally:
            for engine in engines:
                await engine.stop()
