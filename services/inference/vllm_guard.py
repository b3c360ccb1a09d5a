"""Runs inside vLLM's server: asks for the run's token on every path but `/health` (`--middleware`).

Notable:
- vLLM's own `--api-key` covers `/v1` alone: the routes that pause the engine and load weights would stay open. And it
  would stand on the command line, where every user of the machine can read it.
- The token comes from the file that the environment names, once, when the server makes its middlewares: a missing or
  readable file ends the server before it listens.
- vLLM imports this in its own environment, so it needs the standard library and aiohttp alone.
"""

from __future__ import annotations

from services.runtime.auth import token_from_environment
from services.transport.token_guard import AsgiApp, TokenGuard

OPEN_PATHS = frozenset({"/health"})


class TokenMiddleware(TokenGuard):
    """ASGI middleware as vLLM makes it: from the application alone."""

    def __init__(self, app: AsgiApp) -> None:
        super().__init__(app, token_from_environment(), OPEN_PATHS)
