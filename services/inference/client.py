"""The one client of both engines: token ids in; token ids, log-probabilities and policy versions out.

Notable:
- Speaks vLLM's routes; no torch. aiohttp, because a run sends thousands of requests.
- Every wait has a deadline that covers all of it, retries included. Connection errors and 503 are retried until then;
  any other error is raised at once.
- An engine that reports `weight_versions` is paused with "keep": requests live through an update. One that cannot is
  paused with "abort": each request continues from its tokens, and since nothing is sent during an update, every reply
  belongs to the version current when it was sent.
- A missing or non-finite log-probability comes back as NaN, for the caller to drop the trace; it never becomes 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from services.wire.errors import ContractError, CounterpointError, DeadlineExceeded, DependencyLost
from services.wire.samples import VersionSpan

T = TypeVar("T")

MODEL_NAME = "policy"
RESUME_DEADLINE_S = 5.0
"""An engine is resumed after a failed update, within this."""
DRAIN_DEADLINE_S = 2.0
"""Requests still open this long after an aborting pause reached the engine after it: they are taken back."""
_RETRY_FIRST_S, _RETRY_MAX_S = 0.05, 1.0
_MAX_ERROR_CHARS = 400


@dataclass(slots=True)
class Generation:
    """What the engine sampled after a prompt."""

    token_ids: list[int] = field(default_factory=list)
    """[n], the end token included where it was sampled"""
    logprobs: list[float] = field(default_factory=list)
    """[n] of the sampled distribution; NaN where the engine gave none"""
    spans: list[VersionSpan] = field(default_factory=list)
    """cover [0, n) in order"""
    finish_reason: Literal["stop", "length"] = "length"


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _WeightInfo(msgspec.Struct):
    weight_version: str


_decode_reply = msgspec.json.Decoder(_Reply).decode


class _Unavailable(DependencyLost):
    """A connection error or a 503: worth another attempt within the deadline."""


class EngineClient:
    """One engine; safe to use from many tasks of one event loop."""

    def __init__(self, url: str, *, eos_token_id: int, clear_cache: bool) -> None:
        """Connect lazily.

        Args:
            url: http://host:port of the engine itself, never of a router: updates must reach every engine.
            eos_token_id: ends a generation, besides what the model's own files say.
            clear_cache: recompute the cache of live requests at each update.
        """
        self.url = url.rstrip("/")
        self.version = 0
        self._eos_token_id = eos_token_id
        self._clear_cache = clear_cache
        self._tells_versions: bool | None = None
        self._session: aiohttp.ClientSession | None = None
        self._updating = asyncio.Lock()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._open: set[asyncio.Task[bytes]] = set()
        self._request_ids = itertools.count()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until the engine is healthy, and learn whether it tells versions.

        Raises:
            DeadlineExceeded: when it is not within `deadline_s`.
        """
        async with _deadline(f"the engine at {self.url} to be ready", deadline_s):
            await self._retried("GET", "/health")
            await self._detect()

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        deadline_s: float,
        ignore_eos: bool = False,
    ) -> Generation:
        """Continue `token_ids` by at most `max_tokens` tokens.

        Args:
            token_ids: [T] the prompt.
            max_tokens: new tokens at most; the engine's own length limit may end it earlier.
            temperature: 0 = greedy.
            seed: the same seed and prompt give the same tokens from the same weights.
            deadline_s: for all of it, weight updates in between included.
            ignore_eos: go on past the end token (tests and benchmarks).

        Raises:
            DeadlineExceeded: not done in time.
            DependencyLost: the engine failed (5xx).
            ContractError: it refused the request (4xx) or its reply does not fit it.
        """
        generation = Generation()
        async with _deadline(f"a generation from {self.url}", deadline_s):
            if self._tells_versions is None:
                await self._detect()
            while True:
                num_done = len(generation.token_ids)
                params = {
                    "max_tokens": max_tokens - num_done,
                    "temperature": temperature,
                    # A continuation must not draw the first draws again.
                    "seed": (seed + 0x9E3779B97F4A7C15 * num_done) % 2**63,
                    "logprobs": 0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "ignore_eos": ignore_eos,
                    "stop_token_ids": [] if ignore_eos else [self._eos_token_id],
                }
                reason = await self._extend(generation, token_ids + generation.token_ids, params)
                ended = bool(generation.token_ids) and generation.token_ids[-1] == self._eos_token_id and not ignore_eos
                if reason == "stop" or ended:
                    generation.finish_reason = "stop"
                    return generation
                if reason == "length" or len(generation.token_ids) >= max_tokens:
                    generation.finish_reason = "length"
                    return generation

    async def update_weights(self, path: Path, version: int, *, deadline_s: float) -> None:
        """Bring a snapshot to the engine: pause, load, label, resume.

        Raises:
            DeadlineExceeded: not done in time; the engine has been told to resume.
            DependencyLost: the engine could not load it. The local engine then still serves its old weights; vLLM's
                may be half-written.
        """
        async with self._updating, _deadline(f"the weight update of {self.url} to version {version}", deadline_s):
            if self._tells_versions is None:
                await self._detect()
            clear_cache = "true" if self._clear_cache else "false"
            mode = "keep" if self._tells_versions else "abort"
            if mode == "abort":
                self._may_send.clear()
            try:
                await self._retried("POST", f"/pause?mode={mode}&clear_cache={clear_cache}")
                if mode == "abort":
                    await self._take_back_open_requests()
                kwargs = {"path": str(path), "version": str(version)}
                await self._retried("POST", "/collective_rpc", {"method": "load_snapshot", "kwargs": kwargs})
                if self._tells_versions:
                    await self._retried("POST", "/update_weight_version", {"new_version": f"v{version}"})
                self.version = version
            except BaseException:
                # The first error is the one to tell; an engine left paused would hang every rollout. vLLM drops the
                # connection after an error of its own, so even this takes more than one attempt.
                with contextlib.suppress(CounterpointError, TimeoutError):
                    async with asyncio.timeout(RESUME_DEADLINE_S):
                        await self._retried("POST", "/resume")
                raise
            else:
                await self._retried("POST", "/resume")
            finally:
                self._may_send.set()

    # ---- one request ---------------------------------------------------------------------------------------------

    async def _extend(self, generation: Generation, tokens: list[int], params: dict[str, Any]) -> str:
        """Send one request and append what it sampled; "abort" where it must be continued."""
        body = {"model": MODEL_NAME, "token_ids": tokens, "sampling_params": params}
        delay_s = _RETRY_FIRST_S
        while True:
            await self._may_send.wait()
            version = self.version
            body["request_id"] = f"counterpoint-{id(self):x}-{next(self._request_ids)}"
            try:
                raw = await self._send(body)
            except _Unavailable:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
                continue
            return "abort" if raw is None else self._append(generation, raw, version, params["max_tokens"])

    async def _send(self, body: dict[str, Any]) -> bytes | None:
        """The reply's bytes, or None where an update took the request back."""
        if self._tells_versions:
            return await self._request("POST", "/inference/v1/generate", body)
        send: Coroutine[Any, Any, bytes] = self._request("POST", "/inference/v1/generate", body)
        task = asyncio.create_task(send)
        self._open.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None
        finally:
            self._open.discard(task)

    def _append(self, generation: Generation, raw: bytes, version: int, max_tokens: int) -> str:
        """Check a reply and append it."""
        try:
            (choice,) = _parse_reply(raw).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise ContractError(f"{self.url} sent a generation that does not decode: {error}") from error
        tokens, reason = choice.token_ids or [], choice.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise ContractError(f"{self.url} ended a generation by {reason!r}")
        if len(tokens) > max_tokens or (not tokens and reason != "abort"):
            raise ContractError(f"{self.url} sent {len(tokens)} tokens where at least 1 and at most {max_tokens} fit")
        start = len(generation.token_ids)
        generation.token_ids += tokens
        generation.logprobs += self._logprobs(choice, tokens)
        for span in self._spans(choice, len(tokens), version):
            _append_span(generation.spans, VersionSpan(start + span.start, start + span.end, span.version))
        return reason

    def _logprobs(self, choice: _Choice, tokens: list[int]) -> list[float]:
        content = choice.logprobs.content if choice.logprobs is not None else None
        if content is None:
            return [math.nan] * len(tokens)
        if [entry.token_id for entry in content] != tokens:
            raise ContractError(
                f"{self.url} sent {len(content)} log-probabilities that are not those of its {len(tokens)} tokens"
            )
        return [math.nan if entry.logprob is None else entry.logprob for entry in content]

    def _spans(self, choice: _Choice, num_tokens: int, version: int) -> list[VersionSpan]:
        if not self._tells_versions:
            return [VersionSpan(0, num_tokens, version)] if num_tokens else []
        spans = [
            VersionSpan(s.start, s.end, _version_of(s.version)) for s in choice.weight_versions or [] if s.start < s.end
        ]
        if [0, *(span.end for span in spans)] != [*(span.start for span in spans), num_tokens]:
            raise ContractError(f"{self.url} sent version spans that do not cover its {num_tokens} tokens")
        return spans

    async def _take_back_open_requests(self) -> None:
        """End what the aborting pause did not: requests that reached the engine after it wait there unsampled."""
        if self._open:
            await asyncio.wait(self._open, timeout=DRAIN_DEADLINE_S)
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _detect(self) -> None:
        """Ask for the engine's version label; an engine without that route cannot tell versions."""
        try:
            raw = await self._retried("GET", "/weight_info")
        except ContractError:
            self._tells_versions = False
            return
        self._tells_versions = True
        self.version = _version_of(msgspec.json.decode(raw, type=_WeightInfo).weight_version)

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    async def _retried(self, method: str, path: str, body: Any = None) -> bytes:
        """A request repeated until it gets an answer other than 503; the caller holds the deadline."""
        delay_s = _RETRY_FIRST_S
        while True:
            try:
                return await self._request(method, path, body)
            except _Unavailable:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        """One exchange; the reply's bytes.

        Raises:
            DependencyLost: no connection, or 5xx.
            ContractError: 4xx.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        data = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, self.url + path, data=data, headers=headers) as reply:
                raw = await reply.read()
                status = reply.status
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Unavailable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if status == 200:
            return raw
        message = f"{method} {self.url}{path} answered {status}: {raw[:_MAX_ERROR_CHARS].decode(errors='replace')}"
        if status == 503:
            raise _Unavailable(message)
        raise DependencyLost(message) if status >= 500 else ContractError(message)


def _parse_reply(raw: bytes) -> _Reply:
    """Decode a reply; where it is not JSON, try once more with NaN and Infinity allowed.

    JSON has neither, but servers in Python write them: such a log-probability must cost its trace, not the run.
    """
    try:
        return _decode_reply(raw)
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(raw), _Reply)


def _append_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append, joining spans of one version."""
    if spans and spans[-1].version == span.version:
        spans[-1] = VersionSpan(spans[-1].start, span.end, span.version)
    else:
        spans.append(span)


def _version_of(label: str) -> int:
    """The number in a label of ours ("v12", "12"); any other label is what the engine started with: version 0."""
    digits = label.removeprefix("v")
    return int(digits) if digits.isdecimal() else 0


@contextlib.asynccontextmanager
async def _deadline(what: str, deadline_s: float) -> AsyncIterator[None]:
    """Turn the end of time into an error that says what was waited for."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(what, deadline_s) from error
