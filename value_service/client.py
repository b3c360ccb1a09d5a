"""Clients of the value service for anyone: `ValueClient`, and `AsyncValueClient` for those who have an event loop.

    with ValueClient("http://127.0.0.1:8000") as critic:
        reply = critic.score([[7, 8, 9], [7]])
        reply.values, reply.bootstrap_values, reply.critic_step

Notable:
- Both are the orchestrator's own client (`services.transport.score_client`): MessagePack, retries, one deadline for all
  attempts, and a reply that fits its request and is finite, or an error that names the branch.
- The synchronous one runs an event loop in a thread of its own, so it works in scripts and notebooks alike, and from
  several threads at once.
- Importing this imports no torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from services.runtime.auth import read_token
from services.transport.score_client import ScoreClient, ServiceFacts
from services.wire.messages import ScoreReply

T = TypeVar("T")
DEADLINE_S = 120.0


class AsyncValueClient:
    """A client of one value service; an async context manager.

    Args:
        url: http://host:port of the service
        token_file: file of the token that it asks for, if it does
        deadline_s: of each call, all attempts included
    """

    def __init__(self, url: str, *, token_file: Path | str | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._client = ScoreClient(url, token=read_token(token_file) if token_file is not None else None)
        self._deadline_s = deadline_s

    async def score(self, token_ids: Sequence[Sequence[int]], *, deadline_s: float | None = None) -> ScoreReply:
        """Score sequences in one request.

        Args:
            token_ids: One list of ids a sequence.
            deadline_s: In place of the client's.

        Returns:
            `values[i][t]`, the value of the state before token t of sequence i (0 before the first),
            `bootstrap_values[i]`, that of the state after its last token, and `critic_step`, one for all.

        Raises:
            ScoreContractError: the reply does not fit the request, naming the branch.
            ContractError: the service finds the request wrong (4xx).
            DeadlineExceeded, DependencyLost: no reply in time, or a service that keeps failing.
        """
        return await self._client.score(token_ids, deadline_s=self._deadline_s if deadline_s is None else deadline_s)

    async def facts(self) -> ServiceFacts:
        """The service's model and limits."""
        return await self._client.facts(deadline_s=self._deadline_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def __aenter__(self) -> AsyncValueClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class ValueClient:
    """The same without an event loop of one's own; a context manager.

    Args:
        url: http://host:port of the service
        token_file: file of the token that it asks for, if it does
        deadline_s: of each call, all attempts included
    """

    def __init__(self, url: str, *, token_file: Path | str | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._client = AsyncValueClient(url, token_file=token_file, deadline_s=deadline_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="value-client", daemon=True)
        self._thread.start()

    def score(self, token_ids: Sequence[Sequence[int]], *, deadline_s: float | None = None) -> ScoreReply:
        """Score sequences in one request; see `AsyncValueClient.score`."""
        return self._run(self._client.score(token_ids, deadline_s=deadline_s))

    def facts(self) -> ServiceFacts:
        """The service's model and limits."""
        return self._run(self._client.facts())

    def close(self) -> None:
        """Close the connections and end the thread; may be called twice."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> ValueClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while waiting: the request ends too
            future.cancel()
            raise
