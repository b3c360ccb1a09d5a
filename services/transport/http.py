"""HTTP requests with one absolute deadline each and a clear rule for what is tried again.

    outcome of an attempt                              what follows
    refused, 429, 503                                  again until the deadline, after Retry-After or a jittered wait
    cut off, 502, 504                                  the same, if the request is pure
    other 5xx                                          the same, three attempts in all
    no reply within half the time                      once more, if the request is pure
    other 4xx                                          never again: the request is wrong

Notable:
- The deadline covers everything: connecting, waiting, every byte of the body, all attempts. A client's own read timeout
  starts anew with each chunk, so a peer that sends one byte a second would never meet it.
- Nothing is discarded: whatever is not a 2xx reply with a whole body raises.
- Only pure requests are tried again once they may have been received; a command is not resent blindly.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from services.runtime.auth import Token
from services.wire.errors import ContractError, DeadlineExceeded, DependencyLost

CONNECT_TIMEOUT_S = 5.0
FIRST_WAIT_S = 0.1
MAX_WAIT_S = 5.0
MAX_SERVER_ERRORS = 3
MAX_REPLY_BYTES = 16 * 2**20
MAX_CAUSE_CHARACTERS = 200

_NOT_TAKEN = (429, 503)
_PERHAPS_TAKEN = (502, 504)
_jitter = random.SystemRandom()


@dataclass(slots=True)
class _Retry(Exception):
    """An attempt that may be made again."""

    cause: str
    after_s: float | None = None
    is_server_error: bool = False


def make_session(*, token: Token | None = None) -> aiohttp.ClientSession:
    """Make a session whose requests are bounded by their deadlines alone (and 5 s to connect).

    Args:
        token: shown with every request
    """
    headers = {"Authorization": token.header()} if token is not None else None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    # idle connections are given up before a server does (uvicorn: 5 s), so that no command meets a closing one
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    deadline_s: float,
    what: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    pure: bool = True,
    max_reply_bytes: int = MAX_REPLY_BYTES,
) -> bytes:
    """Make one request, trying again as the table above says, and return the reply's whole body.

    Args:
        session: from `make_session`
        method: GET or POST
        url: http://...
        deadline_s: seconds from now for all attempts together
        what: names the wait in errors, for example "value service to score 8 branches"
        body: JSON bytes, unless `headers` say otherwise
        headers: besides the content type, or with another one
        pure: the request may be received twice without harm
        max_reply_bytes: a longer reply is refused

    Raises:
        ContractError: the request is wrong (4xx), or the reply is too long.
        DeadlineExceeded: no good reply in time; names the last cause.
        DependencyLost: the server keeps failing (500), or a command that is not pure was cut off.
    """
    give_up_s = time.monotonic() + deadline_s
    headers = {"Content-Type": "application/json"} | (headers or {}) if body is not None else headers or {}
    cause, num_attempts, num_server_errors = "no reply", 0, 0
    while (left_s := give_up_s - time.monotonic()) > 0:
        # the first attempt gets half the time, so that a lost reply leaves as much again for a second one
        share_s = left_s / 2 if pure and num_attempts == 0 else left_s
        num_attempts += 1
        try:
            async with asyncio.timeout(share_s):
                return await _attempt(session, method, url, body, headers, pure, max_reply_bytes)
        except TimeoutError:
            cause = f"no whole reply within {share_s:.3g} s"
            continue
        except _Retry as retry:
            cause = retry.cause
            num_server_errors += retry.is_server_error
            if num_server_errors == MAX_SERVER_ERRORS:
                raise DependencyLost(f"{what}: {cause}, {num_server_errors} times") from None
            wait_s = min(FIRST_WAIT_S * 2 ** (num_attempts - 1), MAX_WAIT_S) * _jitter.uniform(0.5, 1.0)
            await asyncio.sleep(min(max(wait_s, retry.after_s or 0.0), max(0.0, give_up_s - time.monotonic())))
    raise DeadlineExceeded(f"{what} ({cause}; {num_attempts} attempts)", deadline_s)


async def get_json(session: aiohttp.ClientSession, url: str, *, deadline_s: float) -> Any:
    """Return the JSON of a GET.

    Raises:
        ContractError, DeadlineExceeded, DependencyLost: as `request`; ContractError where the reply is not JSON.
    """
    return _from_json(await request(session, "GET", url, deadline_s=deadline_s, what=f"GET {url}"), url)


async def post_json(
    session: aiohttp.ClientSession, url: str, body: Any = None, *, deadline_s: float, pure: bool = False
) -> Any:
    """Post JSON and return the reply's JSON (None for an empty reply); sent twice only if `pure`.

    Raises:
        ContractError, DeadlineExceeded, DependencyLost: as `request`; ContractError where the reply is not JSON.
    """
    encoded = msgspec.json.encode(body)
    reply = await request(session, "POST", url, deadline_s=deadline_s, what=f"POST {url}", body=encoded, pure=pure)
    return _from_json(reply, url) if reply else None


async def _attempt(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None,
    headers: dict[str, str],
    pure: bool,
    max_reply_bytes: int,
) -> bytes:
    try:
        async with session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status < 300:
                return await read_bounded(response, max_reply_bytes)
            cause = f"{url} answered {response.status}: {await _first_line(response)}"
            if response.status in _NOT_TAKEN or (pure and response.status in _PERHAPS_TAKEN):
                raise _Retry(cause, after_s=_retry_after(response.headers.get("Retry-After")))
            if response.status >= 500:
                if pure:
                    raise _Retry(cause, is_server_error=True)
                raise DependencyLost(cause)
            raise ContractError(cause)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise _Retry(f"{url} cannot be reached: {error}") from None  # nothing was received: safe for commands too
    except (aiohttp.ClientError, OSError) as error:
        if pure:
            raise _Retry(f"{url} was cut off: {type(error).__name__}") from None
        raise DependencyLost(f"{method} {url} was cut off: {type(error).__name__}: {error}") from None


async def read_bounded(response: aiohttp.ClientResponse, max_reply_bytes: int) -> bytes:
    """The body of a reply.

    Raises:
        ContractError: it is longer.
    """
    reply = bytearray()
    async for chunk in response.content.iter_any():
        reply += chunk
        if len(reply) > max_reply_bytes:
            raise ContractError(f"{response.url} answered more than {max_reply_bytes} bytes")
    return bytes(reply)


def _from_json(reply: bytes, url: str) -> Any:
    try:
        return msgspec.json.decode(reply)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ContractError(f"{url} did not answer JSON: {error}") from None


async def _first_line(response: aiohttp.ClientResponse) -> str:
    """What a refusal says, made printable and short; the rest of it is not read."""
    start = b""
    async for chunk in response.content.iter_any():
        start += chunk
        if len(start) > 4 * MAX_CAUSE_CHARACTERS:
            break
    text = start.decode(errors="replace").strip().split("\n", 1)[0]
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_CAUSE_CHARACTERS]


def _retry_after(header: str | None) -> float | None:
    """Seconds to wait; None where the header is missing or is a date."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else None
