"""Every HTTP listener of ours behind its token, asked over real sockets; vLLM's middleware as vLLM makes it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from orchestrator.status_page import StatusPage
from orchestrator.trainers import TrainClient
from services.inference.client import EngineClient
from services.inference.local_engine import LocalEngine
from services.inference.local_routes import LocalServer
from services.inference.vllm_guard import TokenMiddleware
from services.launch.live import StatusPoller
from services.model.load import load_causal_lm
from services.runtime.auth import TOKEN_FILE_VARIABLE, Token, read_token
from services.runtime.ports import PortReservation
from services.training.board import StatusBoard
from services.training.control import ServerThread, control_app
from services.transport.http import make_session
from services.transport.token_guard import TokenGuard
from services.wire.errors import ConfigError, ContractError
from tests.runs import wait_until

SECRET = "a-secret-of-thirty-two-characters"
TOKEN = Token(SECRET)
WRONG = (
    [],
    ["Bearer a-secret-of-thirty-two-characterz"],
    ["Bearer"],
    ["Bearer "],
    [f"Basic {SECRET}"],
    [SECRET],
    [f"Bearer {SECRET} "[:-2]],
    ["Bearer \u00e9"],
    [f"Bearer {SECRET}", f"Bearer {SECRET}"],
    [f"Bearer {SECRET}", "Bearer other"],
)
"""`Authorization` headers of requests that are to be refused."""


def ask(url: str, method: str, path: str, headers: list[str], body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    try:
        connection.putrequest(method, path)
        for header in headers:
            connection.putheader("Authorization", header.encode("latin-1"))
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
    finally:
        connection.close()


# ---------------------------------------------------------------------------------------------------------------------
# The listeners


@contextmanager
def trainer() -> Iterator[str]:
    with PortReservation(["http"]) as reserved:
        url = f"http://127.0.0.1:{reserved.ports['http']}"
        board = StatusBoard("policy")
        board.enter("idle")
        server = ServerThread(control_app(board, title="policy"), url, token=TOKEN)
        server.start()
        try:
            yield url
        finally:
            server.stop()


@contextmanager
def in_a_loop(serve: Callable[[asyncio.Event], Any]) -> Iterator[str]:
    """`serve(ended)` yields an address once, in an event loop of its own thread."""
    ready, box = threading.Event(), {}

    async def main() -> None:
        ended = box["ended"] = asyncio.Event()
        box["loop"] = asyncio.get_running_loop()
        async with serve(ended) as url:
            box["url"] = url
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield box["url"]
    finally:
        box["loop"].call_soon_threadsafe(box["ended"].set)
        thread.join(20)


@contextmanager
def status_page() -> Iterator[str]:
    @asynccontextmanager
    async def serve(_: asyncio.Event) -> AsyncIterator[str]:
        with PortReservation(["http"]) as reserved:
            url = f"http://127.0.0.1:{reserved.ports['http']}"
            page = StatusPage(url, lambda: {"step": 3}, token=TOKEN)
            await page.start()
            yield url
            await page.close()

    with in_a_loop(serve) as url:
        yield url


@contextmanager
def local_engine(model_dir: Path) -> Iterator[str]:
    @asynccontextmanager
    async def serve(_: asyncio.Event) -> AsyncIterator[str]:
        model = load_causal_lm(model_dir)
        engine = LocalEngine(
            model, max_num_seqs=1, max_model_len=32, deliver=lambda finished: None, on_failure=lambda error: None
        )
        engine.start()
        server = LocalServer(engine, eos_token_ids=frozenset(), vocab_size=261, tell_versions=True, token=TOKEN)
        runner = web.AppRunner(server.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()
        await asyncio.to_thread(engine.stop)

    with in_a_loop(serve) as url:
        yield url


OPEN = {"trainer": ["/livez", "/readyz"], "status page": ["/livez"], "local engine": ["/health"]}
CLOSED = {
    "trainer": ["GET /status", "GET /metrics", "POST /checkpoint", "GET /openapi.json", "GET /no"],
    "status page": ["GET /status", "GET /no", "POST /livez/"],
    "local engine": [
        *(f"GET /{path}" for path in ("status", "metrics", "v1/models", "weight_info", "is_paused", "no")),
        *(f"POST /{path}" for path in ("inference/v1/generate", "v1/completions", "pause", "resume")),
        *(f"POST /{path}" for path in ("collective_rpc", "update_weight_version", "reset_prefix_cache")),
    ],
}
each_listener = pytest.mark.parametrize("name", OPEN)


@pytest.fixture(scope="module")
def urls(tiny_model: Path) -> Iterator[dict[str, str]]:
    """Every listener's address."""
    with trainer() as first, status_page() as second, local_engine(tiny_model) as third:
        yield {"trainer": first, "status page": second, "local engine": third}


@each_listener
def test_without_the_token_every_path_but_health_is_refused(name: str, urls: dict[str, str]) -> None:
    for path in OPEN[name]:
        assert ask(urls[name], "GET", path, [])[0] == 200
    for method, path in map(str.split, CLOSED[name]):
        for headers in WRONG:
            status, sent, body = ask(urls[name], method, path, headers)
            assert (status, sent["www-authenticate"]) == (401, "Bearer"), (method, path, headers)
            assert body == b'{"error": "authorization: a bearer token is needed"}'


@each_listener
def test_with_the_token_every_route_answers(name: str, urls: dict[str, str]) -> None:
    for method, path in map(str.split, CLOSED[name]):
        status = ask(urls[name], method, path, [f"Bearer {SECRET}"])[0]
        assert status != 401, (method, path)
        assert status == 200 or path not in ("/status", "/metrics", "/v1/models")


@each_listener
@pytest.mark.parametrize("path", ["/%OPEN", "//OPEN", "/OPEN/../status", "/OPEN;/status", "/OPEN?/status", "/./status"])
def test_no_spelling_of_a_path_opens_a_closed_route(name: str, path: str, urls: dict[str, str]) -> None:
    """An open route in another spelling may answer as itself; nothing else does."""
    word = OPEN[name][0].strip("/")
    path = path.replace("%OPEN", f"%{ord(word[0]):x}{word[1:]}").replace("OPEN", word)
    status, _, body = ask(urls[name], "GET", path, [])
    assert status in (401, 404) or (status == 200 and b"step" not in body and b"state" not in body), (status, body)


@each_listener
def test_a_refused_request_is_answered_before_its_body_has_come(name: str, urls: dict[str, str]) -> None:
    address = urlsplit(urls[name])
    with socket.create_connection((address.hostname, address.port), timeout=5) as peer:
        peer.sendall(b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
        started_s = time.monotonic()
        assert peer.recv(64).startswith(b"HTTP/1.1 401")
        assert time.monotonic() - started_s < 2


# ---------------------------------------------------------------------------------------------------------------------
# Our clients show it


async def test_the_train_client_shows_the_token_and_without_it_is_told_so(urls: dict[str, str]) -> None:
    url = urls["trainer"]
    async with make_session(token=TOKEN) as session:
        assert (await TrainClient(session, "policy", url).status()).state == "idle"
    async with make_session() as session:
        with pytest.raises(ContractError, match=r"answered 401: .*a bearer token is needed"):
            await TrainClient(session, "policy", url).status()
    async with make_session(token=Token("another-token-of-some-length")) as session:
        with pytest.raises(ContractError, match="401") as caught:
            await TrainClient(session, "policy", url).status()
        assert "another-token" not in f"{caught.value!r} {caught.value}"


async def test_the_engine_client_shows_the_token_and_a_refusal_does_not_pass_for_an_old_engine(
    urls: dict[str, str],
) -> None:
    """Scenario: `/weight_info` is refused. Result: not "cannot tell versions", which a 404 means."""
    client = EngineClient(urls["local engine"], eos_token_id=0, clear_cache=True, token=TOKEN)
    await client.wait_ready(10)
    assert client.tells_versions
    await client.close()
    for token in (None, Token("another-token-of-some-length")):
        client = EngineClient(urls["local engine"], eos_token_id=0, clear_cache=True, token=token)
        with pytest.raises(ContractError, match="401") as caught:
            await client.wait_ready(10)
        assert "another-token" not in f"{caught.value!r} {caught.value}"
        await client.close()


def test_the_launchers_poller_shows_the_token(urls: dict[str, str]) -> None:
    poller, stranger = StatusPoller(urls["status page"], TOKEN), StatusPoller(urls["status page"])
    wait_until(lambda: poller.status == {"step": 3}, deadline_s=10, what="a status")
    time.sleep(1.0)
    assert stranger.status is None
    for each in (poller, stranger):
        each.close()


# ---------------------------------------------------------------------------------------------------------------------
# Where one may listen


@pytest.mark.parametrize(
    "url", ["http://0.0.0.0:8000", "http://[::]:8000", "http://224.0.0.1:8000", "http://node7:8000"]
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_nobody_listens_on_every_interface_or_on_a_name(url: str, token: Token | None) -> None:
    for listen in (
        lambda: StatusPage(url, dict, token=token),
        lambda: ServerThread(control_app(StatusBoard("policy"), title="p"), url, token=token),
    ):
        with pytest.raises(ConfigError, match=r"every interface|no IP address"):
            listen()


@pytest.mark.parametrize("url", ["http://198.51.100.7:8000", "http://10.0.0.1:80", "http://[2001:db8::1]:8000"])
def test_beyond_loopback_nobody_listens_without_a_token(url: str) -> None:
    for listen in (
        lambda token: StatusPage(url, dict, token=token),
        lambda token: ServerThread(control_app(StatusBoard("policy"), title="p"), url, token=token),
    ):
        with pytest.raises(ConfigError, match="can be reached from other machines, and there is no token"):
            listen(None)
        listen(TOKEN)


# ---------------------------------------------------------------------------------------------------------------------
# vLLM's middleware, and whatever else speaks ASGI


async def call(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        raise AssertionError("a refused request's body was read")

    await app(scope, receive, send)
    return sent


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "passed", "path": scope.get("path")})


def scope(path: str, header: str | None = None, kind: str = "http") -> dict[str, Any]:
    headers = [(b"authorization", header.encode())] if header is not None else []
    return {"type": kind, "path": path, "headers": headers, "method": "POST"}


async def test_vllms_middleware_reads_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    shown = read_token(path, make=True).header()
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    guard = TokenMiddleware(echo)
    for closed in (
        "/v1/models",
        "/pause",
        "/collective_rpc",
        "/livez",
        "/readyz",
        "/health/",
        "/HEALTH",
        "//health",
        "",
    ):
        (start, body) = await call(guard, scope(closed))
        assert (start["status"], dict(start["headers"])[b"www-authenticate"]) == (401, b"Bearer")
        assert json.loads(body["body"]) == {"error": "authorization: a bearer token is needed"}
        assert await call(guard, scope(closed, shown)) == [{"type": "passed", "path": closed}]
        assert (await call(guard, scope(closed, shown[:-1])))[0]["status"] == 401
    assert await call(guard, scope("/health")) == [{"type": "passed", "path": "/health"}]
    assert await call(guard, {"type": "lifespan"}) == [{"type": "passed", "path": None}]


async def test_a_websocket_is_closed_before_its_handshake_even_on_an_open_path() -> None:
    guard = TokenGuard(echo, TOKEN)
    for path in ("/v1/realtime", "/health"):
        assert await call(guard, scope(path, kind="websocket")) == [{"type": "websocket.close", "code": 1008}]
    assert (await call(guard, scope("/v1/realtime", TOKEN.header(), "websocket")))[0]["type"] == "passed"


@pytest.mark.parametrize("mode", [None, 0o644, 0o640, 0o604])
def test_vllms_middleware_does_not_come_up_without_a_secret_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    if mode is not None:
        path = tmp_path / "token"
        read_token(path, make=True)
        os.chmod(path, mode)
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match="names no token file" if mode is None else "others may read it"):
        TokenMiddleware(echo)
