"""Threads for environments, whose code may block and may never return.

Notable:
- At most `num_threads` calls at a time. A call that its caller gave up on (a deadline) keeps its thread, since nothing
  can end it, but gives its place back: a hanging environment costs its own traces and nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from loguru import logger

P = ParamSpec("P")
T = TypeVar("T")

MAX_ABANDONED = 1000
"""Threads that may hang before further calls have to wait for them."""


class Threads:
    """A bounded number of threads; used from one event loop."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._places = asyncio.Semaphore(num_threads)
        self._pool = ThreadPoolExecutor(num_threads + MAX_ABANDONED, thread_name_prefix=name)
        self.num_abandoned = 0
        """calls that were given up while they ran"""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread; what it raises is raised here."""
        async with self._places:
            future = self._pool.submit(function, *args, **kwargs)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if future.running():
                    self.num_abandoned += 1
                    logger.warning("gave up on {} ({} such calls so far)", function, self.num_abandoned)
                raise

    def close(self) -> None:
        """Take no more calls; threads that hang are left to the end of the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
