"""The scoring API: `POST /v1/score` beside the control routes.

Notable:
- Bodies are read with a byte limit and parsed by a strict msgspec schema (ints only, no unknown fields); large ones
  are parsed off the event loop. Errors are one line naming the field and never echo the input.
- A request that finds the queue full is told to come back (429 + Retry-After) before anything is spent on it.
- A non-finite value is never sent: 500 with the cause.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI, Request, Response

from services.config.train import ValueConfig
from services.training.board import StatusBoard
from services.training.control import control_app
from services.training.saver import Saver
from services.wire.errors import NonFiniteError
from services.wire.messages import ScoreReply
from value_service.scorer import ScoreJob, Scorer

PARSE_INLINE_BYTES = 256 * 1024
MAX_REQUESTS_IN_QUEUE = 4096


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two fields."""

    batched_token_ids: list[list[int]] | None = None
    token_ids: list[int] | None = None


class RequestRefused(Exception):
    """A request that is answered 4xx; `reason` is one line."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(reason)


def score_app(
    scorer: Scorer,
    board: StatusBoard,
    config: ValueConfig,
    *,
    vocab_size: int,
    model_name: str,
    saver: Saver | None = None,
) -> FastAPI:
    """The value service's HTTP application."""
    app = control_app(board, title="Counterpoint value service", saver=saver)

    @app.exception_handler(RequestRefused)
    async def refuse(_: Request, error: RequestRefused) -> Response:
        return _error(error.status, error.reason)

    @app.get("/v1/models", summary="The one model served")
    async def models() -> dict[str, object]:
        return {
            "object": "list",
            "data": [{"id": model_name, "object": "model", "max_model_len": config.model.seq_len}],
        }

    @app.post("/v1/score", summary="Value of the state before each token, and after the last")
    async def score(request: Request) -> Response:
        if scorer.num_waiting >= MAX_REQUESTS_IN_QUEUE:
            return Response(status_code=429, headers={"Retry-After": "1"})
        if board.snapshot().state == "loading":
            return Response(status_code=503, headers={"Retry-After": "1"})
        body = await _read_body(request, config.max_request_bytes)
        parse = (_parse, body, config, vocab_size)
        parsed = _parse(*parse[1:]) if len(body) <= PARSE_INLINE_BYTES else await asyncio.to_thread(*parse)
        branches = parsed.batched_token_ids if parsed.batched_token_ids is not None else [parsed.token_ids or []]
        loop = asyncio.get_running_loop()
        job = ScoreJob(branches, loop, loop.create_future())
        scorer.submit(job)
        try:
            reply: ScoreReply = await job.reply
        except NonFiniteError as error:
            return _error(500, str(error))
        if parsed.token_ids is not None:
            single = {
                "values": reply.values[0],
                "bootstrap_value": reply.bootstrap_values[0],
                "critic_step": reply.critic_step,
            }
            return _json(single)
        return _json(reply)

    return app


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise RequestRefused(413, f"body: larger than {limit_bytes} bytes")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise RequestRefused(413, f"body: larger than {limit_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(body: bytes, config: ValueConfig, vocab_size: int) -> ScoreRequest:
    try:
        parsed = msgspec.json.decode(body, type=ScoreRequest)
    except msgspec.ValidationError as error:
        raise RequestRefused(422, str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(400, "body: not valid JSON") from error
    if (parsed.batched_token_ids is None) == (parsed.token_ids is None):
        raise RequestRefused(422, "body: exactly one of batched_token_ids and token_ids is needed")
    branches = parsed.batched_token_ids if parsed.batched_token_ids is not None else [parsed.token_ids or []]
    field = "batched_token_ids" if parsed.batched_token_ids is not None else "token_ids"
    if not branches:
        raise RequestRefused(422, f"{field}: no branch")
    if len(branches) > config.max_request_branches:
        raise RequestRefused(422, f"{field}: {len(branches)} branches, the limit is {config.max_request_branches}")
    for i, branch in enumerate(branches):
        name = f"{field}[{i}]" if parsed.batched_token_ids is not None else field
        if not branch:
            raise RequestRefused(422, f"{name}: empty branch")
        if len(branch) > config.model.seq_len:
            raise RequestRefused(422, f"{name}: {len(branch)} tokens, value.model.seq_len is {config.model.seq_len}")
        if min(branch) < 0 or max(branch) >= vocab_size:
            raise RequestRefused(422, f"{name}: a token id outside the vocabulary of {vocab_size}")
    return parsed


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, reason: str) -> Response:
    return Response(msgspec.json.encode({"error": reason}), status_code=status, media_type="application/json")
