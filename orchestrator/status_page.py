"""The orchestrator's own HTTP page: who waits for whom, and the last numbers; with a token it asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from services.runtime.auth import Token, check_listener
from services.transport.token_guard import ask_token


class StatusPage:
    """`GET /status` and `/livez`.

    Args:
        url: Where it listens.
        snapshot: What `/status` says.
        token: What `/status` asks for.

    Raises:
        ConfigError: The address is beyond loopback, and there is no token.
    """

    def __init__(self, url: str, snapshot: Callable[[], dict[str, Any]], *, token: Token | None = None) -> None:
        self._address = urlsplit(url)
        check_listener(self._address.hostname or "", f"status page at {url}", is_guarded=token is not None)
        app = web.Application(middlewares=ask_token(token))

        async def status(_: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(snapshot()), content_type="application/json")

        async def livez(_: web.Request) -> web.Response:
            return web.json_response({"live": True})

        app.router.add_get("/status", status)
        app.router.add_get("/livez", livez)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address.hostname, self._address.port).start()

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()
