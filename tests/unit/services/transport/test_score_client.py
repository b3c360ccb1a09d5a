"""The score client against real broken peers: it returns what fits its request in time, or raises."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from services.runtime.auth import Token
from services.transport.http import get_json, make_session, post_json
from services.transport.score_client import ScoreClient
from services.wire.errors import ContractError, DeadlineExceeded, DependencyLost, ScoreContractError
from services.wire.scoring import decode_request

BRANCHES = [[1, 2, 3], [4, 5]]
VALUES, BOOTSTRAP_VALUES = [[0.0, 0.5, -1.25], [0.0, 2.0]], [0.75, -0.5]
GOOD: dict[str, Any] = {
    "lengths": np.array([3, 2], dtype="<u4"),
    "values": np.array([0.0, 0.5, -1.25, 0.0, 2.0], dtype="<f4"),
    "bootstrap_values": np.array(BOOTSTRAP_VALUES, dtype="<f4"),
    "critic_step": 7,
}

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server of raw bytes: answer n of `answers` to request n, the last one from then on."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append((first, headers, body))
            await self.answers[min(len(self.requests), len(self.answers)) - 1](reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            writer.transport.abort()


@asynccontextmanager
async def open_peer(*answers: Answer) -> AsyncIterator[tuple[Peer, str]]:
    peer = Peer(list(answers))
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    try:
        yield peer, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in peer.tasks:
            task.cancel()
        await asyncio.gather(*peer.tasks, return_exceptions=True)
        await server.wait_closed()


def reply(status: int, body: bytes, headers: str = "") -> Answer:
    head = f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + body)
        await writer.drain()
        writer.write_eof()
        await asyncio.sleep(0.05)

    return answer


def lengths(*each: int) -> np.ndarray:
    return np.array(each, dtype="<u4")


def packed(**changes: Any) -> bytes:
    """A reply with some parts changed; lists become f32."""
    parts = GOOD | {k: np.array(v, dtype="<f4") if isinstance(v, list) else v for k, v in changes.items()}
    return msgspec.msgpack.encode({k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in parts.items()})


def scored(**changes: Any) -> Answer:
    return reply(200, packed(**changes))


def truncated(fraction: float, *, chunked: bool = False) -> Answer:
    """Die in the middle of the body."""
    body = packed()
    part = body[: int(len(body) * fraction)]

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if chunked:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(part), part))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), part))
        await writer.drain()

    return answer


async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ten bytes a second: faster than any read timeout, slower than any deadline."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.1)


async def score(url: str, *, deadline_s: float = 10):
    client = ScoreClient(url)
    try:
        return await client.score(BRANCHES, deadline_s=deadline_s)
    finally:
        await client.close()


async def test_values_come_back_in_the_requests_order_from_one_request():
    async with open_peer(scored()) as (peer, url):
        result = await score(url)
        assert (result.values, result.bootstrap_values) == (VALUES, BOOTSTRAP_VALUES)
        assert result.critic_step == 7
        ((first, headers, body),) = peer.requests
        assert first == "POST /v1/score HTTP/1.1"
        assert headers["content-type"] == headers["accept"] == "application/msgpack"
        assert "authorization" not in headers
        batch = decode_request(body)
        assert (batch.lengths.tolist(), batch.token_ids.tolist()) == ([3, 2], [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": lengths(5)}, "1 branches of values"),
        ({"lengths": lengths(3, 1, 1)}, "3 branches of values"),
        ({"bootstrap_values": [0.75]}, "1 bootstrap values"),
        ({"lengths": lengths(3, 1), "values": VALUES[0] + [0.0]}, "branch 1: 1 values for 2 tokens"),
        ({"lengths": lengths(2, 3)}, "branch 0: 2 values for 3 tokens"),
        ({"values": VALUES[0]}, "3 values in all for 5 tokens"),
        ({"values": [*VALUES[0], 0.0, float("nan")]}, "branch 1: a value is not finite"),
        ({"values": [0.0, float("inf"), 0.0, 0.0, 0.0]}, "branch 0: a value is not finite"),
        ({"bootstrap_values": [0.75, float("nan")]}, "branch 1: the bootstrap value is not finite"),
        ({"values": None}, "reply is not one"),
        ({"values": b"123"}, "reply is not one"),
        ({"values": "text"}, "reply is not one"),
        ({"critic_step": None}, "reply is not one"),
        ({"critic_step": True}, "reply is not one"),
        ({"critic_step": -1}, "critic_step"),
    ],
)
async def test_a_reply_that_does_not_fit_is_refused_at_once(changes: dict, message: str):
    async with open_peer(scored(**changes)) as (peer, url):
        with pytest.raises(ScoreContractError, match=message):
            await score(url)
        assert len(peer.requests) == 1


async def test_a_reply_that_is_not_message_pack_or_nests_deeply_is_refused():
    for body in (b"", b"ok", b"\x91" * 4000, packed()[:20], b'{"values": [[0.0]]}'):
        async with open_peer(reply(200, body)) as (_, url):
            with pytest.raises(ScoreContractError):
                await score(url)


async def test_ids_that_no_request_can_carry_are_refused_before_anything_is_sent():
    client = ScoreClient("http://127.0.0.1:9")
    with pytest.raises(ScoreContractError, match="branch 1: token ids are integers"):
        await client.score([[1], [-1]], deadline_s=5)
    await client.close()


async def test_the_token_is_shown_and_its_refusal_does_not_tell_it():
    token = Token("0123456789abcdef")
    async with open_peer(scored(), reply(401, b"no")) as (peer, url):
        client = ScoreClient(url, token=token)
        await client.score(BRANCHES, deadline_s=5)
        with pytest.raises(ContractError, match="answered 401: no") as refused:
            await client.score(BRANCHES, deadline_s=5)
        assert "0123" not in str(refused.value)
        await client.close()
        assert [headers["authorization"] for _, headers, _ in peer.requests] == [token.header()] * 2


async def test_what_a_service_says_of_itself_is_checked():
    models = {
        "data": [{"id": "run", "max_model_len": 64, "vocab_size": 261}],
        "limits": {"bytes": 1, "branches": 2, "tokens": 3},
    }
    async with open_peer(reply(200, json.dumps(models).encode()), reply(200, b'{"data": []}')) as (_, url):
        client = ScoreClient(url)
        facts = await client.facts(deadline_s=5)
        assert (facts.model, facts.max_model_len, facts.vocab_size) == ("run", 64, 261)
        assert (facts.max_bytes, facts.max_branches, facts.max_tokens) == (1, 2, 3)
        with pytest.raises(ContractError, match="is not a value service"):
            await client.facts(deadline_s=5)
        await client.close()


@pytest.mark.parametrize(("fraction", "chunked"), [(0.0, False), (0.5, False), (0.5, True), (1.0, True)])
async def test_a_body_cut_in_the_middle_is_refused_and_asked_for_again(fraction: float, chunked: bool):
    async with open_peer(truncated(fraction, chunked=chunked), scored()) as (peer, url):
        assert (await score(url)).values == VALUES
        assert len(peer.requests) == 2


@pytest.mark.parametrize("broken", [silence, drip])
async def test_a_peer_that_never_finishes_meets_the_absolute_deadline(broken: Answer):
    async with open_peer(broken) as (peer, url):
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="value service to score 2 branches of 5 tokens"):
            await score(url, deadline_s=1)
        assert 0.9 < time.monotonic() - started_s < 3
        assert len(peer.requests) == 2


@pytest.mark.parametrize("broken", [silence, drip])
async def test_after_a_lost_reply_the_same_request_is_made_again_within_the_deadline(broken: Answer):
    async with open_peer(broken, scored()) as (peer, url):
        assert (await score(url, deadline_s=2)).critic_step == 7
        (_, first, body), (_, second, same_body) = peer.requests
        assert body == same_body
        assert first["x-request-id"] == second["x-request-id"]


async def test_a_service_that_comes_up_later_is_waited_for():
    async with open_peer(scored()) as (_, url):
        pass
    port = int(url.rsplit(":", 1)[1])
    scoring = asyncio.create_task(score(url))
    await asyncio.sleep(0.5)
    peer = Peer([scored()])
    server = await asyncio.start_server(peer.serve, "127.0.0.1", port)
    assert (await scoring).critic_step == 7
    server.close()
    await server.wait_closed()


async def test_a_service_that_never_comes_up_is_named_at_the_deadline():
    async with open_peer(scored()) as (_, url):
        pass
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="cannot be reached"):
        await score(url, deadline_s=1)
    assert time.monotonic() - started_s < 3


@pytest.mark.parametrize("status", [429, 503, 500, 502, 504])
async def test_a_passing_failure_is_tried_again(status: int):
    async with open_peer(reply(status, b"busy"), scored()) as (peer, url):
        assert (await score(url)).critic_step == 7
        assert len(peer.requests) == 2


async def test_retry_after_is_kept_and_never_outlasts_the_deadline():
    async with open_peer(reply(429, b"", "Retry-After: 1\r\n"), scored()) as (_, url):
        started_s = time.monotonic()
        await score(url)
        assert time.monotonic() - started_s >= 1
    async with open_peer(reply(503, b"full", "Retry-After: 3600\r\n")) as (_, url):
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="answered 503: full"):
            await score(url, deadline_s=0.5)
        assert time.monotonic() - started_s < 2
    async with open_peer(reply(503, b"", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n"), scored()) as (_, url):
        assert (await score(url)).critic_step == 7


async def test_a_service_that_keeps_failing_ends_with_its_cause():
    async with open_peer(reply(500, b"branch 1 has a non-finite value\nTraceback")) as (peer, url):
        with pytest.raises(DependencyLost, match=r"answered 500: branch 1 has a non-finite value, 3 times"):
            await score(url)
        assert len(peer.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 301])
async def test_a_wrong_request_is_never_repeated(status: int):
    async with open_peer(reply(status, b"token_ids: too long\n" + b"x" * 5000)) as (peer, url):
        with pytest.raises(ContractError, match=f"answered {status}: token_ids: too long$"):
            await score(url)
        assert len(peer.requests) == 1


async def test_a_reply_without_end_is_refused():
    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    async with open_peer(flood) as (_, url):
        with pytest.raises(ContractError, match="answered more than"):
            await score(url)


async def test_json_is_fetched_and_posted_and_what_is_not_json_is_refused():
    session = make_session()
    async with (
        session,
        open_peer(reply(200, b'{"state": "idle"}'), reply(204, b""), reply(200, b"<html>")) as (peer, url),
    ):
        assert await get_json(session, url + "/status", deadline_s=5) == {"state": "idle"}
        assert await post_json(session, url + "/pause", {"mode": "keep"}, deadline_s=5) is None
        with pytest.raises(ContractError, match="did not answer JSON"):
            await get_json(session, url + "/status", deadline_s=5)
        assert [first for first, *_ in peer.requests] == [
            "GET /status HTTP/1.1",
            "POST /pause HTTP/1.1",
            "GET /status HTTP/1.1",
        ]
        assert json.loads(peer.requests[1][2]) == {"mode": "keep"}


@pytest.mark.parametrize("broken", [truncated(0.5), reply(500, b"no"), reply(502, b"no"), silence])
async def test_a_command_that_may_have_been_received_is_not_sent_again(broken: Answer):
    async with make_session() as session, open_peer(broken) as (peer, url):
        with pytest.raises((DependencyLost, ContractError)):
            await post_json(session, url + "/update", {}, deadline_s=1)
        assert len(peer.requests) == 1


async def test_a_command_that_was_not_taken_is_sent_again():
    async with make_session() as session, open_peer(reply(503, b"busy"), reply(200, b"{}")) as (peer, url):
        assert await post_json(session, url + "/update", {}, deadline_s=5) == {}
        assert len(peer.requests) == 2
