"""What stands before the router: which paths pass, what is asked of a request, and how a router's failures are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from services.inference.router_guard import FORWARDED, RouterGuard, serve
from services.inference.router_limits import MAX_CHOICES, max_body_bytes, max_reply_bytes
from services.runtime.auth import Token
from services.wire.errors import ConfigError

MAX_MODEL_LEN = 32
SECRET = "a-secret-of-32-characters-at-all"
GENERATE = "/inference/v1/generate"
BODY = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}


@dataclass
class Router:
    """Stands for the router: notes what reaches it, and answers as told."""

    status: int = 200
    body: bytes = b'{"choices": []}'
    content_type: str = "application/json"
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    holds: bool = False
    num_cancelled: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.raw_path, await request.read()))
        self.headers.append(dict(request.headers))
        try:
            await asyncio.sleep(3600 if self.holds else 0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return web.Response(body=self.body, status=self.status, content_type=self.content_type)


@dataclass
class Front:
    router: Router
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str = GENERATE, body: object = BODY, **kwargs: object) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **kwargs) as reply:  # pyright: ignore[reportArgumentType]
            return reply.status, await reply.read()


@asynccontextmanager
async def front(token: Token | None = None, *, has_router: bool = True) -> AsyncIterator[Front]:
    router = Router()
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", router.answer)
    behind = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
    await behind.setup()
    await web.TCPSite(behind, "127.0.0.1", 0).start()
    router_url = f"http://127.0.0.1:{behind.addresses[0][1]}"
    if not has_router:
        await behind.cleanup()
    guard = await serve(
        RouterGuard(router_url, max_model_len=MAX_MODEL_LEN, token=token), "127.0.0.1", 0, is_guarded=token is not None
    )
    async with aiohttp.ClientSession() as session:
        yield Front(router, f"http://127.0.0.1:{guard.addresses[0][1]}", session)
    await guard.cleanup()
    await behind.cleanup()


async def test_generation_passes_with_its_body_and_without_its_query_or_other_headers() -> None:
    async with front() as at:
        headers = {"Content-Type": "application/json", "X-Forwarded-For": "somebody", "Cookie": "c=1"}
        assert await at.post(f"{GENERATE}?url=http://elsewhere", headers=headers) == (200, b'{"choices": []}')
        assert at.router.requests == [("POST", GENERATE, json.dumps(BODY).encode())]
        assert at.router.headers[0]["Content-Type"] == "application/json"
        assert not {"X-Forwarded-For", "Cookie"} & set(at.router.headers[0])


@pytest.mark.parametrize("path", FORWARDED)
async def test_each_path_passes_by_its_own_method_alone(path: str) -> None:
    async with front() as at:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            body = json.dumps(BODY).encode() if method == "POST" else None
            async with at.session.request(method, at.url + path, data=body) as reply:
                assert reply.status == (200 if method == FORWARDED[path] else 405), method
        assert [request[0] for request in at.router.requests] == [FORWARDED[path]]


@pytest.mark.parametrize(
    "path",
    [
        "/pause?mode=abort",
        "/resume",
        "/collective_rpc",
        "/update_weight_version",
        "/add_worker?url=http://127.0.0.1:9",
        "/remove_worker?url=http://127.0.0.1:9",
        "/list_workers",
        "/flush_cache",
        "/metrics",
        "/v1/chat/completions",
        "/v1/load_lora_adapter",
        "/inference/v1/generate/",
        "/inference/v1/generate/../../../pause",
        "/inference/v1/%67enerate%2f..%2fpause",
        "//pause",
        "/",
    ],
)
async def test_any_other_path_is_refused_and_never_reaches_the_router(path: str) -> None:
    async with front() as at:
        for method in ("GET", "POST"):
            async with at.session.request(method, at.url + path, data=b"{}") as reply:
                assert reply.status in (404, 405)
        assert at.router.requests == []


async def test_with_a_token_all_but_health_ask_for_it_and_it_is_passed_on() -> None:
    async with front(Token(SECRET)) as at:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {SECRET}"}):
            assert (await at.post(headers=headers))[0] == 401
            assert (await at.post("/pause", headers=headers))[0] == 401
        assert at.router.requests == []
        async with at.session.get(f"{at.url}/health") as reply:
            assert reply.status == 200
        for secret, status in ((SECRET, 200), ("another-secret-of-32-characters", 401)):
            async with at.session.get(f"{at.url}/token", headers={"Authorization": f"Bearer {secret}"}) as reply:
                assert reply.status == status
        assert at.router.requests == []
        assert (await at.post(headers={"Authorization": f"Bearer {SECRET}"}))[0] == 200
        assert at.router.headers[0]["Authorization"] == f"Bearer {SECRET}"


async def test_a_body_longer_than_any_sequence_could_be_is_refused_with_and_without_its_length_told() -> None:
    limit = max_body_bytes(MAX_MODEL_LEN)
    fits = json.dumps(BODY | {"padding": "x" * (limit - 200)}).encode()
    assert limit - 200 < len(fits) <= limit

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * (limit // 32)

    async with front() as at:
        assert (await at.post(body=fits))[0] == 200
        assert (await at.post(body=b"x" * (limit + 1)))[0] == 413
        async with at.session.post(at.url + GENERATE, data=chunks()) as reply:
            assert reply.status == 413
        assert len(at.router.requests) == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (BODY | {"sampling_params": {"max_tokens": MAX_MODEL_LEN + 1}}, "max_tokens: at most 32"),
        ({"prompt": [1], "max_tokens": 10**9}, "max_tokens: at most 32"),
        (BODY | {"sampling_params": {"n": MAX_CHOICES + 1}}, "n: from 1 to 16"),
        ({"prompt": [1], "n": 0}, "n: from 1 to 16"),
        ({"prompt": [1], "n": "secret"}, "body: a JSON object"),
        ([1, 2], "body: a JSON object"),
        (b"{secret", "body: a JSON object"),
        (b"", "body: a JSON object"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "body: a JSON object"),
        (b'{"a": ' + b"[" * 30000, "body: a JSON object"),
    ],
)
async def test_what_asks_for_too_much_or_is_no_request_is_refused_without_an_echo(body: object, text: str) -> None:
    async with front() as at:
        status, told = await at.post(body=body)
        assert status == 400 and text in told.decode() and b"secret" not in told and len(told) < 200
        assert at.router.requests == []
        assert (await at.post())[0] == 200


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, b"No available workers (all circuits open or unhealthy)"),
        (500, b"Request failed: error sending request for url (http://10.0.0.7:8000/inference/v1/generate)"),
        (500, b"Failed to get response body: error decoding"),
        (502, b"Backend request failed"),
    ],
)
async def test_a_router_without_an_engine_is_503_with_a_time_to_come_back_and_no_address(
    status: int, body: bytes
) -> None:
    async with front() as at:
        at.router.status, at.router.body, at.router.content_type = status, body, "text/plain"
        async with at.session.post(at.url + GENERATE, json=BODY) as reply:
            told = await reply.read()
            assert reply.status == 503 and int(reply.headers["Retry-After"]) == 1
        assert b"10.0.0.7" not in told


@pytest.mark.parametrize("status", [400, 422, 429, 500])
async def test_an_engines_own_error_is_told_as_it_is(status: int) -> None:
    async with front() as at:
        at.router.status, at.router.body = status, b'{"error": "its own"}'
        assert await at.post() == (status, b'{"error": "its own"}')


async def test_a_router_that_is_gone_is_503_and_health_is_the_guards_own() -> None:
    async with front(has_router=False) as at:
        assert (await at.post())[0] == 503
        async with at.session.get(f"{at.url}/health") as reply:
            assert reply.status == 200


async def test_a_reply_without_end_is_cut_off() -> None:
    async with front() as at:
        at.router.body = b"x" * (max_reply_bytes(MAX_MODEL_LEN) + 1)
        status, told = await at.post()
        assert status == 502 and len(told) < 200


async def test_who_hangs_up_here_hangs_up_on_the_router() -> None:
    async with front() as at:
        at.router.holds = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await at.post()
        async with asyncio.timeout(10):
            while not at.router.num_cancelled:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "router.example"])
async def test_beyond_loopback_it_does_not_listen_without_a_token(host: str) -> None:
    with pytest.raises(ConfigError):
        await serve(RouterGuard("http://127.0.0.1:1", max_model_len=8), host, 0, is_guarded=False)
