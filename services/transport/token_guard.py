"""What stands before every HTTP listener of ours that asks for a token: for ASGI applications, and for aiohttp's.

Notable:
- A request is refused before its body is read, whatever its path, method or kind, but for the health routes.
- What is open is a list of exact paths; everything else is closed, routes that do not exist too: without the token one
  does not learn which do.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from aiohttp import web

from services.runtime.auth import Token

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""Routes that say no more than that somebody is there."""
_REFUSAL = json.dumps({"error": "authorization: a bearer token is needed"}).encode()
_POLICY_VIOLATION = 1008

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenGuard:
    """ASGI middleware: 401 unless a request shows the token, whatever its path, but for the health routes."""

    def __init__(self, app: AsgiApp, token: Token, open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._token = token
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
        kind = scope["type"]
        is_open = kind == "lifespan" or (kind == "http" and scope["path"] in self._open_paths)
        if is_open or self._shows_token(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            await self._refuse(send)
        else:  # a websocket, before its handshake: the server answers 403
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _shows_token(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return self._token.matches(shown[0] if len(shown) == 1 else None)

    @staticmethod
    async def _refuse(send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_REFUSAL)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSAL})


def ask_token(token: Token | None, open_paths: Iterable[str] = OPEN_PATHS) -> list[Any]:
    """The middlewares by which an aiohttp application asks for a token; none where there is none.

    Args:
        token: What a request must show.
        open_paths: Routes that need none.
    """
    if token is None:
        return []
    allowed = frozenset(open_paths)

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        resource = request.match_info.route.resource  # what will really run, however its path was written
        if resource is None or resource.canonical not in allowed:
            shown = request.headers.getall("Authorization", [])
            header = shown[0].encode("utf-8", "surrogateescape") if len(shown) == 1 else None
            if not token.matches(header):
                raise_with = {"WWW-Authenticate": "Bearer", "Connection": "close"}
                return web.Response(body=_REFUSAL, status=401, content_type="application/json", headers=raise_with)
        return await handler(request)

    return [guard]
