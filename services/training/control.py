"""The HTTP side of rank 0: control routes of every train group, served from a thread beside the command loop.

Notable:
- `/livez`: the event loop turns. `/readyz`: would accept work now. `/status`: state, step, who waits for what.
- The server never touches the model: it reads the board and fills queues of commands.
- With a token every route but the two health routes asks for it, before a body is read; beyond loopback there is no
  listening without one.
- `/sleep` and `/wake_up` are answered when every rank is asleep or awake.
- `/checkpoint` is answered when the role's part of the commit is whole: 200; 409 where the group is at another step,
  507 where the disk does not take it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.types import ASGIApp

from services.runtime.auth import Token, check_listener
from services.training.board import StatusBoard
from services.training.saver import Saver
from services.training.sleeper import Sleeper
from services.transport.bounded_http import bounded
from services.transport.token_guard import TokenGuard
from services.wire.errors import DependencyLost
from services.wire.messages import CheckpointRequest, SleepReply, TrainStatus

MAX_COMMAND_BYTES = 4096
BODY_GRACE_S = 5.0
"""An application that has a deadline of its own for bodies may say so first."""
GAUGES = ("steps_done", "updates_done", "num_forwards", "num_scored_tokens", "num_trained_tokens", "busy_s")


_Responses = dict[int | str, dict[str, Any]]
NOT_SERVING = ("loading", "stopping", "falling asleep", "asleep", "waking up")
"""States in which a group accepts no work."""
_STATE: dict[str, Any] = {"type": "object", "properties": {"state": {"type": "string"}}, "required": ["state"]}
_READY: _Responses = {
    code: {"description": text, "content": {"application/json": {"schema": _STATE}}}
    for code, text in ((200, "It would."), (503, "It is loading, asleep, or stopping."))
}
_STATUS_SCHEMA = msgspec.json.schema_components((TrainStatus,))[1]["TrainStatus"]
_STATUS: _Responses = {200: {"description": "The status.", "content": {"application/json": {"schema": _STATUS_SCHEMA}}}}
_SLEEP_SCHEMA = msgspec.json.schema_components((SleepReply,))[1]["SleepReply"]
_CHANGED: _Responses = {
    200: {"description": "Every rank sleeps, or is awake.", "content": {"application/json": {"schema": _SLEEP_SCHEMA}}}
}
_METRICS: _Responses = {200: {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}


def control_app(
    board: StatusBoard, *, title: str, saver: Saver | None = None, sleeper: Sleeper | None = None
) -> FastAPI:
    """The routes that policy trainer and value service share; without a saver there is nothing to save."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    registry = CollectorRegistry()
    gauges = {name: Gauge(f"counterpoint_{name}", name.replace("_", " "), registry=registry) for name in GAUGES}

    @app.get("/livez", summary="The event loop turns")
    async def livez() -> dict[str, bool]:
        return {"live": True}

    @app.get("/readyz", summary="Would accept work now", responses=_READY)
    async def readyz(response: Response) -> dict[str, str]:
        state = board.snapshot().state
        response.status_code = 503 if state in NOT_SERVING else 200
        return {"state": state}

    @app.get("/status", summary="State, step, and who waits for what", response_class=Response, responses=_STATUS)
    async def status() -> Response:
        return Response(msgspec.json.encode(board.snapshot()), media_type="application/json")

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        snapshot = board.snapshot()
        for name, gauge in gauges.items():
            gauge.set(getattr(snapshot, name))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    if saver is not None:
        _add_checkpoint(app, saver, board)
    if sleeper is not None:
        _add_sleep(app, sleeper)
    return app


def _add_sleep(app: FastAPI, sleeper: Sleeper) -> None:
    @app.post("/sleep", summary="Give the device's memory back", response_class=Response, responses=_CHANGED)
    async def sleep() -> Response:
        return _json(200, await asyncio.wrap_future(sleeper.submit("sleep")))

    @app.post("/wake_up", summary="Take it again, and check it", response_class=Response, responses=_CHANGED)
    async def wake_up() -> Response:
        return _json(200, await asyncio.wrap_future(sleeper.submit("wake_up")))


def _add_checkpoint(app: FastAPI, saver: Saver, board: StatusBoard) -> None:
    @app.post("/checkpoint", summary="Write this role's part of a commit")
    async def checkpoint(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_COMMAND_BYTES:
                return _json(413, {"error": f"body: larger than {MAX_COMMAND_BYTES} bytes"})
        try:
            wanted = msgspec.json.decode(body, type=CheckpointRequest)
        except msgspec.ValidationError as error:
            return _json(422, {"error": str(error)})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: nested too deeply
            return _json(400, {"error": "body: not valid JSON"})
        if board.state == "asleep":
            return _json(409, {"error": "asleep: nothing is in memory to write; POST /wake_up first"})
        answer = await asyncio.wrap_future(saver.submit(wanted.step))
        return _json(answer.status, answer.body)


def _json(status: int, body: object) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


class ServerThread:
    """uvicorn in a thread of its own, on one address.

    Args:
        app: What answers.
        url: Where it listens.
        token: Asked of every request but those for the health routes.
        body_deadline_s: From the end of a request's headers to the end of its body.

    Raises:
        ConfigError: The address is beyond loopback, and there is no token.
    """

    def __init__(self, app: ASGIApp, url: str, *, token: Token | None = None, body_deadline_s: float = 30.0) -> None:
        address = urlsplit(url)
        assert address.hostname and address.port, f"not a listening address: {url}"
        check_listener(address.hostname, f"HTTP at {url}", is_guarded=token is not None)
        config = uvicorn.Config(
            app if token is None else TokenGuard(app, token),
            host=address.hostname,
            port=address.port,
            log_level="warning",
            access_log=False,
            http=bounded(body_deadline_s=body_deadline_s + BODY_GRACE_S),
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._url = url

    def start(self, *, deadline_s: float = 10.0) -> None:
        """Listen.

        Raises:
            DependencyLost: when the port cannot be had.
        """
        self._thread.start()
        waited = threading.Event()
        for _ in range(int(deadline_s / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            waited.wait(0.01)
        if not self._server.started:
            raise DependencyLost(f"cannot listen on {self._url}: {self._failure or 'the server did not start'}")

    def stop(self) -> None:
        """Stop listening and end the thread."""
        self._server.should_exit = True
        self._thread.join(timeout=3.0)

    def _run(self) -> None:
        try:
            uvloop.run(self._server.serve())
        except BaseException as error:  # the thread boundary: start() reports it
            self._failure = error
