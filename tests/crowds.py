"""Crowds before a value service: a request on a connection of its own, a sender of slow headers, a health probe."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from services.wire.scoring import MEDIA_TYPE, TokenBatch, encode_request

PROBE = """
import http.client, json, sys, threading, time
host, port = sys.argv[1].split(":")
over, taken = threading.Event(), []
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    begun = time.monotonic()
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/livez")
    assert connection.getresponse().read() == b'{"live":true}'
    connection.close()
    taken.append(time.monotonic() - begun)
    time.sleep(0.02)
print(json.dumps(taken))
"""
"""Asks for the health route on a new connection each time, from a process that has nothing else to do."""


@contextmanager
def many_files(num: int) -> Iterator[None]:
    """This process may have so many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(num, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def raw_score(address: tuple[str, int], batch: list[list[int]]) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers and body; status 0 where the connection was cut."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(*address)
        body = encode_request(TokenBatch.of(batch))
        head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {MEDIA_TYPE}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = await asyncio.wait_for(reader.read(), 120)
    except ConnectionError:
        return 0, {}, b""
    finally:
        if writer is not None:
            writer.close()
    lines, _, body = received.partition(b"\r\n\r\n")
    first, *rest = lines.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    return int(first.split()[1]) if first else 0, headers, body


async def send_slowly(address: tuple[str, int]) -> float:
    """A header that never ends, a byte at a time; seconds until the service has had enough."""
    reader, writer = await asyncio.open_connection(*address)
    begun = time.monotonic()
    writer.write(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    closed = asyncio.ensure_future(reader.read())
    while not closed.done() and time.monotonic() < begun + 60:
        writer.write(b"a")
        await asyncio.wait([closed], timeout=0.2)
    writer.close()
    with suppress(ConnectionError):
        await closed
    return time.monotonic() - begun
