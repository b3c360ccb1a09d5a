"""Asking and telling the router about its engines, in one attempt each.

Notable:
- What fails answers None or False: whoever keeps the router's list looks again soon.
- Adding an engine makes the router ask that engine's `/health` first, for as long as the engine lets it wait.
- The router forgets everything when it ends: one that was started anew lists nobody.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import aiohttp
import msgspec

from services.runtime.auth import Token

CONTROL_DEADLINE_S = 5.0
"""The router answers at once or not at all."""


class _Listed(msgspec.Struct):
    urls: list[str]


class RouterClient:
    """The control routes of one router."""

    def __init__(self, url: str, token: Token | None = None) -> None:
        """Connect lazily; `url` is the router's own, not its guard's."""
        self.url = url.rstrip("/")
        self._headers = {"Authorization": token.header()} if token is not None else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def engines(self) -> list[str] | None:
        """Addresses of the engines that it hands requests to; None where it cannot be asked."""
        raw = await self._ask("GET", "/list_workers", CONTROL_DEADLINE_S)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=_Listed).urls
        except msgspec.DecodeError:
            return None

    async def add(self, engine_url: str, *, deadline_s: float) -> bool:
        """Hand requests to an engine from now on."""
        return await self._ask("POST", f"/add_worker?url={quote(engine_url, safe='')}", deadline_s) is not None

    async def remove(self, engine_url: str) -> bool:
        """Hand no more requests to an engine; those that it has go on."""
        path = f"/remove_worker?url={quote(engine_url, safe='')}"
        return await self._ask("POST", path, CONTROL_DEADLINE_S) is not None

    async def _ask(self, method: str, path: str, deadline_s: float) -> bytes | None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=self._headers
            )
        try:
            async with asyncio.timeout(deadline_s), self._session.request(method, self.url + path) as reply:
                raw = await reply.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return None
        return raw if reply.status == 200 else None
