"""One rollout: an episode driven turn by turn, tokens in and tokens out, until it ends or a limit cuts it.

Notable:
- The token sequence grows by exactly what was sampled and what the environment said; text is never re-tokenised.
- The driver owns the limits and says which one cut; the stop reason is never inferred from lengths.
- Environments are foreign code: they run in threads, and whatever they raise, or give that is no token id of the model
  and no number, makes the trace invalid and nothing else.
- A continued episode's prefix is its prompt; the turns within it count towards `max_turns`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from orchestrator.environments.prefixed import ContinuedEpisode
from orchestrator.environments.protocol import Episode, PrefixMismatch, Reply
from orchestrator.tasks import Task, request_seed
from orchestrator.threads import Threads
from services.inference.client import Generation
from services.wire.samples import Branch, StopReason, Trace, VersionSpan

P = ParamSpec("P")
T = TypeVar("T")

MAX_TOKEN_ID = 2**32 - 1


class Engine(Protocol):
    """What a rollout needs of an inference engine."""

    async def generate(
        self, token_ids: list[int], *, max_tokens: int, temperature: float, seed: int, deadline_s: float
    ) -> Generation:
        """Sample a continuation."""
        ...


class EnvironmentFailed(Exception):
    """The environment raised or answered nonsense; the trace is invalid."""


class PromptTooLong(Exception):
    """The prompt leaves no room for an answer; it is never cut or shifted."""


@dataclass(slots=True)
class _Transcript:
    token_ids: list[int]
    action_mask: list[bool]
    logprobs: list[float]
    spans: list[VersionSpan] = field(default_factory=list)
    step_rewards: dict[int, float] = field(default_factory=dict)

    def add_action(self, generation: Generation) -> None:
        start = len(self.token_ids)
        self.token_ids += generation.token_ids
        self.action_mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.spans += [VersionSpan(start + s.start, start + s.end, s.version) for s in generation.spans]

    def add_observation(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.action_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def branch(self) -> Branch:
        action_mask = np.array(self.action_mask, dtype=bool)
        step_rewards = None
        if self.step_rewards:
            step_rewards = np.zeros(len(action_mask))
            for position, reward in self.step_rewards.items():
                step_rewards[position] = reward
        return Branch(
            token_ids=np.array(self.token_ids, dtype=np.uint32),
            action_mask=action_mask,
            loss_mask=action_mask.copy(),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=self.spans,
            step_rewards=step_rewards,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a rollout are drawn."""

    temperature: float
    run_seed: int
    deadline_s: float
    max_token_id: int = MAX_TOKEN_ID
    """greatest id that the models know"""


async def roll_out(task: Task, sample: int, engine: Engine, sampling: Sampling, threads: Threads) -> Trace:
    """Drive one episode to its end.

    Raises:
        EnvironmentFailed: the environment raised or answered nonsense.
        PrefixMismatch: the environment did not get to where a recorded trace was cut.
        PromptTooLong: the prompt alone reaches the trace's token limit.
    """
    started = time.monotonic()
    limits = task.config
    episode = await _call(threads, task.env.start, task.index, request_seed(sampling.run_seed, task.group, sample))
    prompt_ids = await _call(threads, lambda: _token_ids(episode.prompt_ids, sampling.max_token_id))
    if not prompt_ids:
        raise EnvironmentFailed("an empty prompt: the first sampled token would have no state before it")
    if len(prompt_ids) >= limits.max_trace_tokens:
        raise PromptTooLong(
            f"{task.task_id}: {len(prompt_ids)} prompt tokens, max_trace_tokens is {limits.max_trace_tokens}"
        )
    transcript = _Transcript(prompt_ids, [False] * len(prompt_ids), [0.0] * len(prompt_ids))
    reward, stop_reason, num_turns = await _take_turns(task, sample, episode, transcript, engine, sampling, threads)
    return Trace(
        trace_id=f"{task.group}/{sample}",
        group_id=str(task.group),
        env=limits.type,
        task_id=task.task_id,
        branches=[transcript.branch()],
        reward=reward,
        stop_reason=stop_reason,
        num_turns=num_turns,
        duration_s=time.monotonic() - started,
    )


async def _take_turns(
    task: Task,
    sample: int,
    episode: Episode,
    transcript: _Transcript,
    engine: Engine,
    sampling: Sampling,
    threads: Threads,
) -> tuple[float, StopReason, int]:
    limits = task.config
    first_turn = episode.num_turns if isinstance(episode, ContinuedEpisode) else 0

    def cut() -> float:
        return float(episode.cut())

    def step(action_ids: list[int]) -> Reply:
        return _checked(episode.step(action_ids), sampling.max_token_id)

    for turn in range(first_turn, limits.max_turns):
        num_turns = turn + 1 - first_turn
        room = limits.max_trace_tokens - len(transcript.token_ids)
        generation = await engine.generate(
            transcript.token_ids,
            max_tokens=min(limits.max_turn_tokens, room),
            temperature=sampling.temperature,
            seed=request_seed(sampling.run_seed, task.group, sample, turn),
            deadline_s=sampling.deadline_s,
        )
        transcript.add_action(generation)
        if generation.finish_reason == "length":
            return await _call(threads, cut), StopReason.TRUNCATED_LENGTH, num_turns
        reply = await _call(threads, step, list(generation.token_ids))
        if reply.reward is not None:
            transcript.step_rewards[len(transcript.token_ids) - 1] = reply.reward
        if reply.done:
            if reply.outcome is None:
                raise EnvironmentFailed("done without an outcome")
            return reply.outcome, StopReason.TERMINATED, num_turns
        room = limits.max_trace_tokens - len(transcript.token_ids)
        transcript.add_observation(reply.observation_ids[:room])
        if len(reply.observation_ids) >= room:
            return await _call(threads, cut), StopReason.TRUNCATED_LENGTH, num_turns
    return await _call(threads, cut), StopReason.TRUNCATED_TURNS, limits.max_turns - first_turn


def _checked(reply: Reply, max_token_id: int) -> Reply:
    """The reply in plain types: environments also give numpy numbers, None, and worse."""
    return Reply(
        observation_ids=_token_ids(reply.observation_ids, max_token_id),
        reward=None if reply.reward is None else float(reply.reward),
        done=bool(reply.done),
        outcome=None if reply.outcome is None else float(reply.outcome),
    )


def _token_ids(numbers: Sequence[Any], max_token_id: int) -> list[int]:
    token_ids = [operator.index(number) for number in numbers]
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= max_token_id:
        raise ValueError(f"no token ids: {min(token_ids)} to {max(token_ids)}, not within 0 to {max_token_id}")
    return token_ids


async def _call(threads: Threads, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return await threads.call(function, *args, **kwargs)
    except PrefixMismatch:
        raise
    except Exception as error:  # whatever foreign code raises makes the trace invalid, not the run
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
