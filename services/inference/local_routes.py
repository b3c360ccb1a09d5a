"""The local engine's HTTP routes: vLLM's, so that one client serves both.

Notable:
- aiohttp's server, not FastAPI: a run sends hundreds of tiny requests a second on the cores that also train, and what a
  request costs here is taken from training.
- A sampling parameter it does not know is refused, never ignored: it would change the distribution in silence.
- A non-finite log-probability leaves as JSON null, so the caller sees a hole and drops the trace.
- With a token every route but `/health` asks for it.
- With `tell_versions` off it answers like an engine that cannot tell which version sampled a token.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from services.inference.local_engine import LocalEngine
from services.inference.local_request import EngineRequest
from services.inference.weights import read_snapshot
from services.runtime.auth import Token
from services.transport.token_guard import ask_token
from services.wire.errors import ContractError

T = TypeVar("T")
MODEL_NAME = "policy"
MAX_BODY_BYTES = 64 * 2**20


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """The sampling parameters that are honoured; the last four only at values that change nothing."""

    max_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1


class GenerateBody(msgspec.Struct):
    """`POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: str | None = None
    stream: bool = False


class CompletionBody(SamplingParams):
    """`POST /v1/completions` with token ids as prompts."""

    prompt: list[int | list[int]] = []
    model: str = MODEL_NAME
    echo: bool = False
    stream: bool = False
    return_token_ids: bool = False


class CollectiveRpcBody(msgspec.Struct):
    """`POST /collective_rpc`; `load_snapshot` and `weights_checksum` exist."""

    method: str
    kwargs: dict[str, str | int] = {}
    args: list[Any] = []
    timeout: float | None = None


class VersionBody(msgspec.Struct):
    """`POST /update_weight_version`."""

    new_version: str


class BadRequest(ContractError):
    """Answered 400 with its text."""


class Conflict(ContractError):
    """Answered 409 with its text: the engine sleeps."""


def encode(content: Any, status: int = 200) -> web.Response:
    """A JSON response; non-finite numbers become null."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


class LocalServer:
    """Routes around one engine."""

    def __init__(
        self,
        engine: LocalEngine,
        *,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        tell_versions: bool,
        token: Token | None = None,
    ) -> None:
        self.engine = engine
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._tell_versions = tell_versions
        self._token = token
        self._update = asyncio.Lock()

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*ask_token(self._token), _errors_as_json])
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/status", self.status)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_get("/is_paused", self.is_paused)
        app.router.add_post("/sleep", self.sleep)
        app.router.add_post("/wake_up", self.wake_up)
        app.router.add_get("/is_sleeping", self.is_sleeping)
        app.router.add_post("/collective_rpc", self.collective_rpc)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        if self._tell_versions:
            app.router.add_post("/update_weight_version", self.update_weight_version)
            app.router.add_get("/weight_info", self.weight_info)
        return app

    # ---- sampling ------------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.Response:
        """Token ids in; token ids, log-probabilities and version spans out."""
        body = _decode(await http.read(), GenerateBody)
        if body.stream:
            raise BadRequest("stream: not supported")
        request = self._request(body.token_ids, body.sampling_params, body.request_id)
        await self._run([request])
        content = [
            {"token_id": token, "logprob": logprob}
            for token, logprob in zip(request.sampled, request.logprobs, strict=True)
        ]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": request.sampled,
            "logprobs": {"content": content},
            "finish_reason": request.finish_reason,
        }
        if self._tell_versions:
            choice["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in request.spans]
        return encode({"request_id": request.request_id, "choices": [choice]})

    async def completions(self, http: web.Request) -> web.Response:
        """OpenAI-style completions of token-id prompts; `text` stays empty, for there is no tokenizer here."""
        body = _decode(await http.read(), CompletionBody)
        if body.stream or body.echo or not body.prompt:
            raise BadRequest("prompt: token ids are needed, stream and echo are not supported")
        kinds = {isinstance(entry, list) for entry in body.prompt}
        if len(kinds) > 1:
            raise BadRequest("prompt: one list of token ids, or a list of such lists")
        prompts: list[Any] = body.prompt if kinds == {True} else [body.prompt]
        requests = [self._request(prompt, body, None) for prompt in prompts]
        await self._run(requests)
        choices = []
        for i, request in enumerate(requests):
            choice: dict[str, Any] = {"index": i, "text": "", "finish_reason": request.finish_reason}
            if body.logprobs is not None:
                choice["logprobs"] = {"token_logprobs": request.logprobs, "tokens": [""] * len(request.logprobs)}
            if body.return_token_ids:
                choice |= {"token_ids": request.sampled, "prompt_token_ids": request.tokens[: request.num_prompt]}
            choices.append(choice)
        return encode({"object": "text_completion", "model": MODEL_NAME, "choices": choices})

    def _request(self, token_ids: list[int], params: SamplingParams, request_id: str | None) -> EngineRequest:
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise BadRequest(f"token_ids: at least one, each in [0, {self._vocab_size})")
        limit = self.engine.max_model_len
        if len(token_ids) >= limit:
            raise BadRequest(f"token_ids: a prompt of {len(token_ids)} tokens leaves no room in max_model_len {limit}")
        if not params.temperature >= 0 or (params.max_tokens is not None and params.max_tokens < 1):
            raise BadRequest("sampling_params: temperature must be at least 0, max_tokens at least 1")
        if params.top_p != 1 or params.top_k not in (0, -1) or params.min_p != 0 or params.n != 1:
            raise BadRequest("sampling_params: top_p, top_k, min_p and n change the distribution and are not supported")
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return EngineRequest(
            request_id=request_id or secrets.token_hex(8),
            tokens=token_ids,
            max_tokens=params.max_tokens if params.max_tokens is not None else limit,
            temperature=params.temperature,
            seed=seed % 2**64,
            stop_token_ids=stops,
        )

    async def _run(self, requests: list[EngineRequest]) -> None:
        """Sample all, or abort them when the caller has gone away."""
        loop = asyncio.get_running_loop()
        for request in requests:
            request.waiter = loop.create_future()
            self.engine.submit(request)
        try:
            for request in requests:
                await request.waiter
        except asyncio.CancelledError:
            self.engine.abort(requests)
            raise

    # ---- weights -------------------------------------------------------------------------------------------------

    async def pause(self, http: web.Request) -> web.Response:
        """Stop sampling at a token boundary; answers when nothing samples any more."""
        mode = http.query.get("mode", "abort")
        clear_cache = http.query.get("clear_cache", "true").lower()
        if mode not in ("abort", "wait", "keep") or clear_cache not in ("true", "false"):
            raise BadRequest("mode: abort, wait or keep; clear_cache: true or false")
        await asyncio.wrap_future(self.engine.pause(mode, clear_cache=clear_cache == "true"))
        return encode({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        """Go on sampling."""
        await self._awake(self.engine.resume())
        return encode({"status": "resumed"})

    async def is_paused(self, http: web.Request) -> web.Response:
        """Whether sampling is paused."""
        return encode({"is_paused": self.engine.is_paused})

    async def sleep(self, http: web.Request) -> web.Response:
        """Give back the memory of weights and cache; level 2, which may forget the weights, keeps them like level 1."""
        level, mode = http.query.get("level", "1"), http.query.get("mode", "abort")
        if level not in ("1", "2"):
            raise BadRequest(f"level: 1 or 2, not {level!r}; to stop sampling and keep the memory there is /pause")
        if mode != "abort":
            raise BadRequest(f"mode: abort, not {mode!r}; requests go on from their tokens after the sleep")
        async with self._update:
            await asyncio.wrap_future(self.engine.sleep())
        return encode({"status": "sleeping", "level": int(level)})

    async def wake_up(self, http: web.Request) -> web.Response:
        """Take the memory again and go on sampling; answers when the weights are checked."""
        async with self._update:
            await asyncio.wrap_future(self.engine.wake_up())
        return encode({"status": "awake"})

    async def is_sleeping(self, http: web.Request) -> web.Response:
        """Whether it sleeps."""
        return encode({"is_sleeping": self.engine.is_asleep})

    async def collective_rpc(self, http: web.Request) -> web.Response:
        """`load_snapshot(path, version)` or `weights_checksum()`."""
        body = _decode(await http.read(), CollectiveRpcBody)
        if body.method == "weights_checksum" and not body.kwargs and not body.args:
            return encode({"results": [await self._awake(self.engine.weights_checksum())]})
        if body.method == "load_snapshot" and set(body.kwargs) == {"path", "version"} and not body.args:
            return await self._load_snapshot(Path(str(body.kwargs["path"])), f"v{int(body.kwargs['version'])}")
        raise BadRequest(
            "method: load_snapshot with the keyword arguments path and version, or weights_checksum without any"
        )

    async def _load_snapshot(self, path: Path, label: str) -> web.Response:
        """Check off the engine's thread, then swap between two steps."""
        async with self._update:
            if self.engine.is_asleep:  # what it would be checked against has no memory now
                raise Conflict(f"the engine is asleep: {label} needs wake_up first")
            try:
                staged = await asyncio.to_thread(read_snapshot, self.engine.model, path)
            except ContractError as error:  # the peer's process boundary: it learns why, the old weights stay
                return _error(500, str(error))
            await asyncio.wrap_future(self.engine.swap_weights(staged, label))
        return encode({"results": [None]})

    async def _awake(self, asked: Future[T]) -> T:
        """What an engine that is awake answers."""
        try:
            return await asyncio.wrap_future(asked)
        except ContractError as error:
            raise Conflict(str(error)) from error

    async def update_weight_version(self, http: web.Request) -> web.Response:
        """Set the label of what is sampled from now on."""
        label = _decode(await http.read(), VersionBody).new_version
        await asyncio.wrap_future(self.engine.set_version_label(label))
        return encode({"success": True, "new_version": label})

    async def weight_info(self, http: web.Request) -> web.Response:
        """The current label."""
        return encode({"weight_version": self.engine.version_label})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """Nothing to do: no request ever reads another's cache."""
        return encode({"success": True})

    # ---- looking in ----------------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        """200 while the engine lives."""
        return web.Response(status=200 if self.engine.failure is None else 503)

    async def models(self, http: web.Request) -> web.Response:
        """The one model."""
        model = {"id": MODEL_NAME, "object": "model", "max_model_len": self.engine.max_model_len}
        return encode({"object": "list", "data": [model]})

    async def status(self, http: web.Request) -> web.Response:
        """What the engine is doing."""
        counters = self.engine.counters
        return encode(
            {
                "role": "inference",
                "pid": os.getpid(),
                "state": self._state(),
                "weight_version": self.engine.version_label,
                "running": self.engine.num_running,
                "waiting": self.engine.num_waiting,
                "requests": counters.requests,
                "sampled_tokens": counters.sampled_tokens,
                "prefilled_tokens": counters.prefilled_tokens,
                "prefills": counters.prefills,
                "decodes": counters.decodes,
                "updates": counters.updates,
                "busy_s": counters.busy_s,
                "last_progress_s": time.monotonic() - counters.last_progress,
            }
        )

    def _state(self) -> str:
        if self.engine.is_asleep:
            return "asleep"
        return "paused" if self.engine.is_paused else "sampling" if self.engine.num_running else "idle"

    async def metrics(self, http: web.Request) -> web.Response:
        """The same as Prometheus text."""
        counters = self.engine.counters
        lines = [
            f"counterpoint_inference_{name} {value}"
            for name, value in (
                ("sampled_tokens_total", counters.sampled_tokens),
                ("prefilled_tokens_total", counters.prefilled_tokens),
                ("requests_total", counters.requests),
                ("weight_updates_total", counters.updates),
                ("busy_seconds_total", counters.busy_s),
                ("running", self.engine.num_running),
                ("waiting", self.engine.num_waiting),
            )
        ]
        return web.Response(text="\n".join(lines) + "\n")


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: nested too deeply
        raise BadRequest(str(error)) from error


def _error(status: int, message: str) -> web.Response:
    return encode({"error": {"message": message, "code": status}}, status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except Conflict as error:
        return _error(409, str(error))
