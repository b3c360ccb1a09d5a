"""Generation over HTTP: token ids in; token ids, log-probabilities and policy versions out.

Notable:
- Speaks vLLM's route; no torch. aiohttp, because a run sends thousands of requests.
- `GenerationClient` knows an address and nothing about who answers there: one engine, or a router before several. Where
  engines are updated one after the other, a token's version can only come with the reply: `weight_versions`.
- Every wait has a deadline that covers all of it, retries included. What could not be sent, or was answered 503, goes
  again until then. An engine that dies under a request makes it an error 500: behind a router it goes again for a
  while, and so to another one; then it is told. Any other error is raised at once.
- A request that is sent again draws the same tokens from the same weights; only the reply that came counts.
- A missing or non-finite log-probability comes back as NaN, for the caller to drop the trace; it never becomes 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from services.runtime.auth import Token
from services.wire.errors import ContractError, DeadlineExceeded, DependencyLost
from services.wire.samples import VersionSpan

MODEL_NAME = "policy"
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


_decode_reply = msgspec.json.Decoder(_Reply).decode


class Unavailable(DependencyLost):
    """A connection error or a 503: worth another attempt within the deadline."""


class Refused(ContractError):
    """Who answers there asks for another token than was shown."""


@dataclass(slots=True)
class Answer:
    """One exchange."""

    raw: bytes | None
    """The reply; None where the request was taken back and must be sent again."""
    version: int | None = None
    """What sampled all of it, where replies do not tell; None = they tell."""


class GenerationClient:
    """One address that generates; safe to use from many tasks of one event loop."""

    def __init__(self, url: str, *, eos_token_id: int, token: Token | None = None, patience_s: float = 0.0) -> None:
        """Connect lazily.

        Args:
            url: http://host:port.
            eos_token_id: ends a generation, besides what the model's own files say.
            token: shown with every request.
            patience_s: how long a request that meets errors of the server (500) is sent again.
        """
        self.url = url.rstrip("/")
        self._eos_token_id = eos_token_id
        self._headers = {"Authorization": token.header()} if token is not None else {}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None
        self._request_ids = itertools.count()
        self.num_resent = 0
        """Requests that were sent again after an error, of all so far."""

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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
            deadline_s: for all of it, weight updates in between included; without the time that the engine sleeps.
            ignore_eos: go on past the end token (tests and benchmarks).

        Raises:
            DeadlineExceeded: not done in time.
            DependencyLost: the engine failed (5xx).
            ContractError: it refused the request (4xx) or its reply does not fit it.
        """
        generation = Generation()
        async with deadline(f"a generation from {self.url}", deadline_s) as limit:
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
                reason = await self._extend(generation, token_ids + generation.token_ids, params, limit)
                ended = bool(generation.token_ids) and generation.token_ids[-1] == self._eos_token_id and not ignore_eos
                if reason == "stop" or ended:
                    generation.finish_reason = "stop"
                    return generation
                if reason == "length" or len(generation.token_ids) >= max_tokens:
                    generation.finish_reason = "length"
                    return generation

    # ---- one request ---------------------------------------------------------------------------------------------

    async def _extend(
        self, generation: Generation, tokens: list[int], params: dict[str, Any], limit: asyncio.Timeout
    ) -> str:
        """Send one request and append what it sampled; "abort" where it must be continued."""
        body = {"model": MODEL_NAME, "token_ids": tokens, "sampling_params": params}
        delay_s, began = _RETRY_FIRST_S, time.monotonic()
        while True:
            body["request_id"] = f"counterpoint-{id(self):x}-{next(self._request_ids)}"
            try:
                answer = await self._ask(body, limit)
            except DependencyLost as error:
                if not isinstance(error, Unavailable) and time.monotonic() - began >= self._patience_s:
                    raise
                self.num_resent += 1
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
                continue
            return "abort" if answer.raw is None else self._append(generation, answer, params["max_tokens"])

    async def _ask(self, body: dict[str, Any], limit: asyncio.Timeout) -> Answer:
        """One exchange, within `limit`."""
        return Answer(await self.request("POST", "/inference/v1/generate", body))

    def _append(self, generation: Generation, answer: Answer, max_tokens: int) -> str:
        """Check a reply and append it."""
        try:
            (choice,) = _parse_reply(answer.raw or b"").choices
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
        for span in self._spans(choice, len(tokens), answer.version):
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

    def _spans(self, choice: _Choice, num_tokens: int, version: int | None) -> list[VersionSpan]:
        if version is not None:
            return [VersionSpan(0, num_tokens, version)] if num_tokens else []
        spans = [
            VersionSpan(s.start, s.end, version_of(s.version)) for s in choice.weight_versions or [] if s.start < s.end
        ]
        if [0, *(span.end for span in spans)] != [*(span.start for span in spans), num_tokens]:
            raise ContractError(f"{self.url} sent version spans that do not cover its {num_tokens} tokens")
        return spans

    # ---- HTTP ----------------------------------------------------------------------------------------------------

    async def retried(self, method: str, path: str, body: Any = None) -> bytes:
        """A request repeated until it gets an answer other than 503; the caller holds the deadline."""
        delay_s = _RETRY_FIRST_S
        while True:
            try:
                return await self.request(method, path, body)
            except Unavailable:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)

    async def request(self, method: str, path: str, body: Any = None) -> bytes:
        """One exchange; the reply's bytes.

        Raises:
            DependencyLost: no connection, or 5xx.
            ContractError: 4xx.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        data = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, self.url + path, data=data, headers=headers) as reply:
                raw = await reply.read()
                status = reply.status
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if status == 200:
            return raw
        message = f"{method} {self.url}{path} answered {status}: {raw[:_MAX_ERROR_CHARS].decode(errors='replace')}"
        if status == 503:
            raise Unavailable(message)
        if status == 401:
            raise Refused(message)
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


def version_of(label: str) -> int:
    """The number in a label of ours ("v12", "12"); any other label is what the engine started with: version 0."""
    digits = label.removeprefix("v")
    return int(digits) if digits.isdecimal() else 0


@contextlib.asynccontextmanager
async def deadline(what: str, deadline_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Turn the end of time into an error that says what was waited for."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            yield limit
    except TimeoutError as error:
        raise DeadlineExceeded(what, deadline_s) from error
