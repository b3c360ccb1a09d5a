"""Clients that draw things out, on real sockets: each of them is cut off, and the health route answers throughout."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from fastapi import FastAPI, Request, Response

from services.runtime.ports import PortReservation
from services.training.control import ServerThread
from services.transport.bounded_http import MAX_HEADER_BYTES, BoundedProtocol, bounded

PORTS = "port"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server whose deadlines are short."""
    monkeypatch.setattr(BoundedProtocol, "header_deadline_s", 0.4)
    app = FastAPI()

    @app.get("/livez")
    async def livez() -> dict[str, bool]:
        return {"live": True}

    @app.post("/refused")
    async def refused() -> Response:
        return Response(status_code=413)

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(64 * 2**20))

    with PortReservation([PORTS]) as ports:
        port = ports.ports[PORTS]
        server = ServerThread(app, f"http://127.0.0.1:{port}", body_deadline_s=-4.2)  # 0.8 s with the grace
        server.start()
        yield "127.0.0.1", port
        server.stop()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def connect(address: tuple[str, int]) -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    """Opens connections, and closes them in the end."""
    writers: list[asyncio.StreamWriter] = []

    async def open_one() -> Connection:
        reader, writer = await asyncio.open_connection(*address, limit=2**16)
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ends_after(reader: asyncio.StreamReader) -> float:
    """Seconds until the server closes."""
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    return time.monotonic() - started


async def is_live(address: tuple[str, int]) -> bool:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    reply = await asyncio.wait_for(reader.read(), 0.5)
    writer.close()
    await writer.wait_closed()
    return reply.startswith(b"HTTP/1.1 200")


async def drip(writer: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(text)
            await writer.drain()
            await asyncio.sleep(0.05)


async def test_headers_that_drip_are_cut_off(connect, address) -> None:
    reader, writer = await connect()
    writer.write(b"GET /livez HTTP/1.1\r\n")
    dripping = asyncio.create_task(drip(writer, b"X: y\r\n"))
    assert 0.2 < await ends_after(reader) < 1.5
    dripping.cancel()
    assert await is_live(address)


async def test_a_silent_connection_is_cut_off(connect, address) -> None:
    reader, _ = await connect()
    assert 0.2 < await ends_after(reader) < 1.5


async def test_headers_that_drip_after_a_good_request_are_cut_off(connect, address) -> None:
    reader, writer = await connect()
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    dripping = asyncio.create_task(drip(writer, b"G"))
    assert await ends_after(reader) < 1.5
    dripping.cancel()


@pytest.mark.parametrize("path", ["read", "refused"])
async def test_a_body_that_drips_is_cut_off_whether_it_was_refused_or_is_awaited(connect, path: str) -> None:
    reader, writer = await connect()
    writer.write(f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode())
    dripping = asyncio.create_task(drip(writer, b"x"))
    assert 0.4 < await ends_after(reader) < 2
    dripping.cancel()


async def test_a_client_that_does_not_read_its_reply_is_cut_off(connect, address) -> None:
    reader, writer = await connect()
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(1.6)
    received = 0
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.wait_for(reader.read(2**20), 2):
            received += len(data)
    assert received < 64 * 2**20


async def test_large_headers_are_refused(connect, address) -> None:
    reader, writer = await connect()
    writer.write(b"GET /livez HTTP/1.1\r\nX: " + b"y" * (MAX_HEADER_BYTES + 1000))
    await writer.drain()
    assert (await asyncio.wait_for(reader.read(), 2)).startswith(b"HTTP/1.1 431")


async def test_idle_connections_beyond_the_limit_make_room_for_who_asks(connect, address, monkeypatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "header_deadline_s", 30.0)
    for _ in range(40):
        await connect()
    for protocol in BoundedProtocol.__subclasses__():
        monkeypatch.setattr(protocol, "max_connections", 16)
    assert await is_live(address) and await is_live(address)


def test_a_small_limit_of_files_leaves_room_for_other_files() -> None:
    protocol = bounded(body_deadline_s=7.0)
    assert protocol.body_deadline_s == 7.0 and 16 <= protocol.max_connections <= 4096
