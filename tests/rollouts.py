"""Rollouts for tests: an engine that says what a script says, and environments that reply what a script says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.environments.protocol import Reply
from orchestrator.tasks import Task
from services.config.orchestrator import EnvConfig
from services.inference.client import Generation
from services.wire.samples import Branch, StopReason, Trace, VersionSpan

EOS = 4
PROMPT = [10, 11, 12]


class ScriptedEngine:
    """Each turn takes the next list of tokens, cut at `max_tokens`; an end token makes it stop."""

    def __init__(self, *turns: list[int], versions: tuple[int, ...] = (0,), logprob: float = -0.5) -> None:
        self._turns = list(turns)
        self._versions = versions
        self._logprob = logprob
        self.contexts: list[list[int]] = []
        """what each turn was given"""
        self.max_tokens: list[int] = []
        self.seeds: list[int] = []

    async def generate(
        self, token_ids: list[int], *, max_tokens: int, temperature: float, seed: int, deadline_s: float
    ) -> Generation:
        self.contexts.append(list(token_ids))
        self.max_tokens.append(max_tokens)
        self.seeds.append(seed)
        said = self._turns.pop(0)[:max_tokens]
        bounds = np.linspace(0, len(said), len(self._versions) + 1).astype(int).tolist()
        spans = [VersionSpan(a, b, v) for a, b, v in zip(bounds[:-1], bounds[1:], self._versions, strict=True) if a < b]
        reason = "stop" if said and said[-1] == EOS else "length"
        return Generation(said, [self._logprob] * len(said), spans, reason)


@dataclass
class ScriptedEpisode:
    """Replies in order; a reply that is an exception is raised, one that is a function is called."""

    prompt_ids: Any
    replies: list[Any]
    cut_value: Any = 0.0
    actions: list[list[int]] = field(default_factory=list)

    def step(self, action_ids: list[int]) -> Reply:
        self.actions.append(action_ids)
        return _said(self.replies.pop(0))

    def cut(self) -> float:
        return _said(self.cut_value)


@dataclass
class ScriptedEnvironment:
    """Every task starts the episode that `start_with` makes."""

    start_with: Callable[[int], Any]
    num_tasks: int = 8

    def task_id(self, index: int) -> str:
        return f"scripted/{index}"

    def start(self, index: int, seed: int) -> ScriptedEpisode:
        return _said(self.start_with(index))


def _said(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply() if callable(reply) else reply


def task_of(episode: Any, **limits: int) -> Task:
    """A task that starts one given episode (or raises it)."""
    config = EnvConfig.model_validate(
        {"type": "scripted", "max_turns": 3, "max_turn_tokens": 4, "max_trace_tokens": 32} | limits
    )
    return Task(0, ScriptedEnvironment(lambda _: episode), config, 0)


def make_trace(
    *,
    reward: Any = 1.0,
    versions: tuple[int, ...] = (0,),
    num_prompt: int = 2,
    tokens_per_version: int = 2,
    stop_reason: StopReason = StopReason.TERMINATED,
    trace_id: str = "0/0",
    num_turns: int = 1,
) -> Trace:
    """A valid trace whose answer was sampled by `versions` in order."""
    num_tokens = num_prompt + tokens_per_version * len(versions)
    mask = np.arange(num_tokens) >= num_prompt
    spans = [
        VersionSpan(num_prompt + tokens_per_version * i, num_prompt + tokens_per_version * (i + 1), version)
        for i, version in enumerate(versions)
    ]
    branch = Branch(
        token_ids=np.arange(num_tokens, dtype=np.uint32),
        action_mask=mask,
        loss_mask=mask.copy(),
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=spans,
    )
    group_id = trace_id.partition("/")[0]
    return Trace(trace_id, group_id, "scripted", "scripted/0", [branch], reward, stop_reason, num_turns)
