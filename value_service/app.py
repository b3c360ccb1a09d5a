"""The scoring API: `POST /v1/score` and `POST /load` beside the control routes.

Notable:
- A request that finds too many in flight is told to come back (429 + Retry-After) before its body is read; bodies are
  read with a limit and a deadline. Large ones are parsed, and large replies written, by two threads of their own.
- Who shows no token hears 401 before anything else happens, on every path but the health routes.
- Errors are one line naming the field and never echo the input. A non-finite value is never sent: 500 with the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from services.config.train import ValueConfig
from services.training.board import StatusBoard
from services.training.control import NOT_SERVING, control_app
from services.training.saver import Saver
from services.training.sleeper import Sleeper
from services.wire.errors import NonFiniteError
from services.wire.messages import LoadRequest
from services.wire.scoring import MEDIA_TYPE, ScoredBatch, encode_reply
from value_service import openapi
from value_service.loader import Loader, LoadRefused
from value_service.requests import JSON, Limits, RequestRefused, parse
from value_service.scorer import ScoreJob, Scorer

INLINE_BYTES = 32 * 1024
"""Smaller bodies, and replies, are not worth another thread."""
MAX_LOAD_BYTES = 64 * 1024
RETRY_AFTER_S = "1"


class Gate:
    """Counts requests in flight and the bytes of their bodies; only the event loop touches it."""

    def __init__(self, config: ValueConfig) -> None:
        self._config = config
        self.num_requests = 0
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether one more is too many."""
        return self.num_requests >= self._config.max_requests_in_flight

    def take(self, num_bytes: int) -> None:
        """Count bytes.

        Raises:
            RequestRefused: they are too many.
        """
        if self.num_bytes + num_bytes > max(self._config.max_bytes_in_flight, self._config.max_request_bytes):
            raise RequestRefused(429, "body: too many bytes in flight")
        self.num_bytes += num_bytes


def score_app(
    scorer: Scorer,
    board: StatusBoard,
    config: ValueConfig,
    *,
    vocab_size: int,
    model_name: str,
    saver: Saver | None = None,
    sleeper: Sleeper | None = None,
    loader: Loader | None = None,
) -> FastAPI:
    """The value service's HTTP application."""
    app = control_app(board, title="Counterpoint value service", saver=saver, sleeper=sleeper)
    limits, gate = Limits.of(config, vocab_size), Gate(config)
    threads = ThreadPoolExecutor(2, thread_name_prefix="codec")

    @app.exception_handler(RequestRefused)
    async def refuse(_: Request, error: RequestRefused) -> Response:
        return _error(error.status, error.reason)

    @app.get("/v1/models", summary="The one model served, and what a request may be", responses=openapi.MODELS)
    async def models() -> dict[str, object]:
        own = {"id": model_name, "object": "model", "max_model_len": config.model.seq_len, "vocab_size": vocab_size}
        most = {"bytes": limits.bytes, "branches": limits.branches, "tokens": limits.tokens}
        return {"object": "list", "data": [own], "limits": most}

    @app.post(
        "/v1/score",
        summary="Value of the state before each token, and after the last",
        openapi_extra=openapi.score_request(limits),
        responses=openapi.SCORE,
    )
    async def score(request: Request) -> Response:
        if gate.is_full:
            raise RequestRefused(429, "too many requests in flight")
        if board.state in NOT_SERVING:
            raise RequestRefused(503, f"not ready: {board.state}")
        sent, wanted = _media_type(request), _accepted(request)
        gate.num_requests += 1
        request.state.num_bytes = 0
        try:
            body = await _read_body(request, config, gate)
            return await answer(body, sent, wanted or sent)
        finally:
            gate.num_requests -= 1
            gate.num_bytes -= request.state.num_bytes

    async def answer(body: bytearray, sent: str, wanted: str) -> Response:
        loop = asyncio.get_running_loop()
        parsed = await _off_loop(threads, len(body), parse, body, sent, limits)
        del body
        job = ScoreJob(parsed.batch, loop, loop.create_future())
        scorer.submit(job)
        try:
            scored: ScoredBatch = await job.reply
        except NonFiniteError as error:
            return _error(500, str(error))
        reply = await _off_loop(threads, 4 * len(scored.values), _encode, scored, wanted, parsed.is_single)
        return Response(reply, media_type=wanted)

    if loader is not None:
        _add_load(app, loader, board)
    return app


def _add_load(app: FastAPI, loader: Loader, board: StatusBoard) -> None:
    @app.post(
        "/load",
        summary="Replace the weights by those of an exported critic",
        openapi_extra=openapi.LOAD_REQUEST,
        responses=openapi.LOAD,
    )
    async def load(request: Request) -> Response:
        if _media_type(request) != JSON:
            raise RequestRefused(415, f"content-type: {JSON} is needed")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_LOAD_BYTES:
                raise RequestRefused(413, f"body: larger than {MAX_LOAD_BYTES} bytes")
        try:
            wanted = msgspec.json.decode(body, type=LoadRequest)
        except msgspec.ValidationError as error:
            unknown = "unknown field" in str(error)
            raise RequestRefused(422, "body: an unknown field" if unknown else str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise RequestRefused(400, "body: not valid JSON") from None
        if board.state in NOT_SERVING:
            raise RequestRefused(503, f"not ready: {board.state}")
        try:
            return _json(await loader.load(wanted.path))
        except LoadRefused as error:
            return _error(error.status, str(error))


async def _read_body(request: Request, config: ValueConfig, gate: Gate) -> bytearray:
    """The body, within its limits; what is held of it is counted in the request's state."""
    limit = config.max_request_bytes
    too_large = RequestRefused(413, f"body: larger than {limit} bytes")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or len(declared) > 18 or int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_deadline_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise too_large
                gate.take(len(chunk))
                request.state.num_bytes += len(chunk)
                body += chunk
    except TimeoutError:
        raise RequestRefused(408, f"body: not here within {config.body_deadline_s:g} s") from None
    return body


def _media_type(request: Request) -> str:
    """How the body is encoded."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in (JSON, MEDIA_TYPE):
        raise RequestRefused(415, f"content-type: {JSON} or {MEDIA_TYPE} is needed")
    return media_type


def _accepted(request: Request) -> str | None:
    """How the reply is to be encoded; None where the client has no wish."""
    header = request.headers.get("accept", "*/*").lower()
    ranges = [part.partition(";") for part in header.split(",")]
    names = [name.strip() for name, _, options in ranges if options.replace(" ", "") not in ("q=0", "q=0.0")]
    for name in names:
        if name in (JSON, MEDIA_TYPE):
            return name
    if not any(name in ("*/*", "application/*") for name in names):
        raise RequestRefused(406, f"accept: {JSON} or {MEDIA_TYPE} is needed")
    return None


async def _off_loop(threads: ThreadPoolExecutor, num_bytes: int, call: Callable[..., Any], *args: Any) -> Any:
    """Call it here if it is quick, else in a thread."""
    if num_bytes <= INLINE_BYTES:
        return call(*args)
    awaited: Awaitable[Any] = asyncio.get_running_loop().run_in_executor(threads, call, *args)
    return await awaited


def _encode(scored: ScoredBatch, media_type: str, is_single: bool) -> bytes:
    """A reply; JSON branch by branch, so that no call holds the interpreter for long."""
    if media_type == MEDIA_TYPE:
        return encode_reply(scored)
    values = [msgspec.json.encode(branch.tolist()) for branch in scored.branches()]
    bootstrap_values = msgspec.json.encode(scored.bootstrap_values.tolist())
    step = b',"critic_step":%d}' % scored.critic_step
    if is_single:
        return b'{"values":%b,"bootstrap_value":%b%b' % (values[0], bootstrap_values[1:-1], step)
    return b'{"values":[%b],"bootstrap_values":%b%b' % (b",".join(values), bootstrap_values, step)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _error(status: int, reason: str) -> Response:
    headers = {"Retry-After": RETRY_AFTER_S} if status in (429, 503) else None
    return Response(msgspec.json.encode({"error": reason}), status_code=status, media_type=JSON, headers=headers)
