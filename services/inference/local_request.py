"""What the local engine keeps of one sequence, what it counts, and how it promises.

Notable:
- A request is submitted by one thread and from then on filled in by the engine's alone, until it is finished.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence being continued; filled in by the engine thread until `finish_reason` is set."""

    request_id: str
    tokens: list[int]
    """prompt, then what was sampled"""
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: frozenset[int]
    waiter: Any = None
    """whoever submitted it keeps what it needs here"""
    num_prompt: int = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(version label, start, end) over the sampled tokens"""
    slot: int = -1
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def sampled(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[self.num_prompt :]


@dataclass(slots=True)
class EngineCounters:
    """What the engine did since its start."""

    requests: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    prefills: int = 0
    decodes: int = 0
    updates: int = 0
    busy_s: float = 0.0
    last_progress: float = field(default_factory=time.monotonic)


def promise() -> Future[Any]:
    """A future that cannot be cancelled: a caller that goes away in the middle must not end the engine."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    return done
