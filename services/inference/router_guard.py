"""The process in front of the router: a reverse proxy that lets generation pass and nothing else.

Notable:
- The router forwards any path to any of its engines, also the one that pauses an engine, and takes engines in and out
  for whoever asks. So it listens on loopback; this is what the rest of the run speaks to.
- Passed on are the paths of FORWARDED alone, without their query. Anything else is refused here, unread.
- With a run token every path but `/health` asks for it. It is passed on, for router and engines ask too; the router
  asks here whether it is right.
- The router begins without engines, and the orchestrator adds them when all are ready: until then, and whenever nobody
  is left, the answer is 503 with Retry-After. So is a router that cannot be reached, and an engine that died under a
  request: the caller sends it again, and another engine takes it.
- Whoever hangs up here hangs up on the engine as well, which then stops sampling.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from loguru import logger

from services.config.context import load_run
from services.inference.router_limits import TOKEN_PATH, check_request, max_body_bytes, max_reply_bytes
from services.runtime.auth import Token, check_listener, run_token
from services.runtime.lifecycle import install_stop_handlers, run_process
from services.transport.http import read_bounded
from services.transport.token_guard import ask_token
from services.wire.errors import ContractError

NAME = "router-guard"
HEALTH = "/health"
FORWARDED = {"/inference/v1/generate": "POST", "/v1/completions": "POST", "/v1/models": "GET"}
PASSED_HEADERS = ("Content-Type", "Authorization")
CONNECT_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1
LOST = (b"Request failed: ", b"Failed to get response body", b"Failed to read response")
"""How the router begins its own 500: it could not reach the engine, or lost it before the end of its answer."""


class RouterGuard:
    """The proxy in front of one router."""

    def __init__(self, router_url: str, *, max_model_len: int, token: Token | None = None) -> None:
        """Build it.

        Args:
            router_url: the router's own address.
            max_model_len: longest sequence of the engines, from which all bounds follow.
            token: asked of everybody, where the run has one.
        """
        self._router_url = router_url.rstrip("/")
        self._max_model_len = max_model_len
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(
            client_max_size=max_body_bytes(self._max_model_len), middlewares=ask_token(self._token, {HEALTH})
        )
        app.router.add_get(HEALTH, self._yes)
        if self._token is not None:
            app.router.add_get(TOKEN_PATH, self._yes)
        for path, method in FORWARDED.items():
            app.router.add_route(method, path, functools.partial(self._handle, path))
        app.cleanup_ctx.append(self._connection)
        return app

    async def _connection(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def _yes(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _handle(self, path: str, request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "POST":
            try:
                check_request(body, self._max_model_len)
            except ContractError as error:  # the caller's boundary
                return _error(400, str(error))
        return await self._forward(path, request, body)

    async def _forward(self, path: str, request: web.Request, body: bytes) -> web.Response:
        assert self._session is not None
        headers = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
        max_bytes = max_reply_bytes(self._max_model_len)
        try:
            async with self._session.request(
                request.method, self._router_url + path, data=body or None, headers=headers, allow_redirects=False
            ) as reply:
                raw = await read_bounded(reply, max_bytes)
                status, kind = reply.status, reply.content_type
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return _unavailable("the router cannot be reached")
        except ContractError:
            return _error(502, f"the reply is longer than {max_bytes} bytes")
        if status in (502, 503, 504) or (status == 500 and raw.startswith(LOST)):
            return _unavailable("no engine took the request to its end")
        return web.Response(body=raw, status=status, content_type=kind)


def _error(status: int, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message, "code": status}})
    return web.Response(body=body, status=status, content_type="application/json")


def _unavailable(message: str) -> web.Response:
    response = _error(503, message)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


async def serve(guard: RouterGuard, host: str, port: int, *, is_guarded: bool) -> web.AppRunner:
    """Listen; the caller cleans the runner up.

    Raises:
        ConfigError: beyond loopback without a token.
    """
    check_listener(host, "the router's guard", is_guarded=is_guarded)
    runner = web.AppRunner(guard.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=2048).start()
    return runner


async def _run(run_dir: Path) -> None:
    config, context = load_run(run_dir)
    assert context.router_url is not None and context.router_control_url is not None, "a run with a router"
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    install_stop_handlers(lambda: loop.call_soon_threadsafe(ended.set) and None)
    token = run_token(context.token_file)
    guard = RouterGuard(context.router_control_url, max_model_len=config.inference.max_model_len, token=token)
    address = urlsplit(context.router_url)
    runner = await serve(guard, address.hostname or "", address.port or 0, is_guarded=token is not None)
    logger.info("the router's guard listens on {}", context.router_url)
    await ended.wait()
    await runner.cleanup()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m services.inference.router_guard", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    args = parser.parse_args()
    run_process(NAME, args.run_dir, lambda: asyncio.run(_run(args.run_dir)))


if __name__ == "__main__":
    main()
