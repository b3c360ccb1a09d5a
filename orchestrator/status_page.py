"""The orchestrator's own HTTP page: who waits for whom, and the last numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web


class StatusPage:
    """`GET /status` and `/livez` on loopback."""

    def __init__(self, url: str, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._address = urlsplit(url)
        app = web.Application()

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
