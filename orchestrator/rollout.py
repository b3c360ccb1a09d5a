"""One rollout: an episode driven turn by turn, tokens in and tokens out, until it ends or a limit cuts it.

Notable:
- The token sequence grows by exactly what was sampled and what the environment said; text is never re-tokenised.
- The driver owns the limits and says which one cut; the stop reason is never inferred from lengths.
- Environment code runs in a thread, so a slow grader does not stop the loop.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from orchestrator.environments.protocol import Episode, Reply
from orchestrator.tasks import Task, request_seed
from services.inference.client import Generation
from services.wire.samples import Branch, StopReason, Trace, VersionSpan


class Engine(Protocol):
    """What a rollout needs of an inference engine."""

    async def generate(
        self, token_ids: list[int], *, max_tokens: int, temperature: float, seed: int, deadline_s: float
    ) -> Generation:
        """Sample a continuation."""
        ...


class EnvironmentFailed(Exception):
    """The environment raised; the trace is invalid."""


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


async def roll_out(task: Task, sample: int, engine: Engine, sampling: Sampling, executor: Executor) -> Trace:
    """Drive one episode to its end.

    Raises:
        EnvironmentFailed: the environment raised.
        PromptTooLong: the prompt alone reaches the trace's token limit.
    """
    started = time.monotonic()
    limits = task.config
    episode: Episode = await _call(
        executor, task.env.start, task.index, request_seed(sampling.run_seed, task.group, sample)
    )
    prompt_ids = list(episode.prompt_ids)
    if len(prompt_ids) >= limits.max_trace_tokens:
        raise PromptTooLong(
            f"{task.task_id}: {len(prompt_ids)} prompt tokens, max_trace_tokens is {limits.max_trace_tokens}"
        )
    transcript = _Transcript(prompt_ids, [False] * len(prompt_ids), [0.0] * len(prompt_ids))
    reward, stop_reason, num_turns = await _take_turns(task, sample, episode, transcript, engine, sampling, executor)
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
    executor: Executor,
) -> tuple[float, StopReason, int]:
    limits = task.config
    for turn in range(limits.max_turns):
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
            return await _call(executor, episode.cut), StopReason.TRUNCATED_LENGTH, turn + 1
        reply: Reply = await _call(executor, episode.step, list(generation.token_ids))
        if reply.reward is not None:
            transcript.step_rewards[len(transcript.token_ids) - 1] = reply.reward
        if reply.done:
            if reply.outcome is None:
                raise EnvironmentFailed("done without an outcome")
            return reply.outcome, StopReason.TERMINATED, turn + 1
        room = limits.max_trace_tokens - len(transcript.token_ids)
        transcript.add_observation(list(reply.observation_ids)[:room])
        if len(reply.observation_ids) >= room:
            return await _call(executor, episode.cut), StopReason.TRUNCATED_LENGTH, turn + 1
    return await _call(executor, episode.cut), StopReason.TRUNCATED_TURNS, limits.max_turns


async def _call(executor: Executor, function, *args):
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
    except Exception as error:  # whatever foreign code raises makes the trace invalid, not the run
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
