"""One rollout: what is sampled is what trains, and who ended it is written down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from orchestrator.environments.protocol import Reply
from orchestrator.rollout import EnvironmentFailed, PromptTooLong, Sampling, roll_out
from orchestrator.tasks import Task, request_seed
from orchestrator.threads import Threads
from services.wire.samples import StopReason, Trace, VersionSpan, validate_branch
from tests.rollouts import EOS, PROMPT, ScriptedEngine, ScriptedEpisode, task_of

RIGHT = Reply(done=True, outcome=1.0)


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(2, name="test")
    yield threads
    threads.close()


async def play(task: Task, engine: ScriptedEngine, threads: Threads, sample: int = 0) -> Trace:
    trace = await roll_out(task, sample, engine, Sampling(1.0, 7, 10.0), threads)
    for branch in trace.branches:
        validate_branch(branch)
    return trace


# ---- tokens, masks, spans


async def test_only_sampled_tokens_are_actions_over_several_turns(threads: Threads) -> None:
    """Prompt, turn, observation, turn: T04, T01 (token ids are never re-tokenised)."""
    episode = ScriptedEpisode(PROMPT, [Reply(observation_ids=[20, 21], reward=0.25), RIGHT])
    engine = ScriptedEngine([5, 6, EOS], [7, EOS], versions=(3,))
    trace = await play(task_of(episode), engine, threads)
    (branch,) = trace.branches
    assert branch.token_ids.tolist() == [10, 11, 12, 5, 6, EOS, 20, 21, 7, EOS]
    assert branch.action_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert branch.loss_mask.tolist() == branch.action_mask.tolist()
    assert branch.version_spans == [VersionSpan(3, 6, 3), VersionSpan(8, 10, 3)]
    assert branch.logprobs.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert engine.contexts == [PROMPT, [*PROMPT, 5, 6, EOS, 20, 21]]
    assert episode.actions == [[5, 6, EOS], [7, EOS]]
    assert (trace.reward, trace.stop_reason, trace.num_turns) == (1.0, StopReason.TERMINATED, 2)


async def test_a_reward_of_a_turn_lies_on_its_last_action_token(threads: Threads) -> None:
    episode = ScriptedEpisode(PROMPT, [Reply(observation_ids=[20], reward=0.25), RIGHT])
    trace = await play(task_of(episode), ScriptedEngine([5, EOS], [7, EOS]), threads)
    assert trace.branches[0].step_rewards is not None
    assert trace.branches[0].step_rewards.tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0]


async def test_what_an_assistant_said_in_the_prompt_is_no_action(threads: Threads) -> None:
    """T03: <|assistant|> 7 <|end|> in the prompt was not sampled here."""
    prompt = [2, 10, 3, 7, EOS, 2, 11, 3]
    trace = await play(task_of(ScriptedEpisode(prompt, [RIGHT])), ScriptedEngine([9, EOS]), threads)
    mask = trace.branches[0].action_mask
    assert not mask[: len(prompt)].any() and mask[len(prompt) :].all()
    assert not trace.branches[0].loss_mask[: len(prompt)].any()


async def test_two_versions_within_one_turn_keep_their_own_spans(threads: Threads) -> None:
    engine = ScriptedEngine([5, 6, 7, EOS], versions=(4, 5))
    trace = await play(task_of(ScriptedEpisode(PROMPT, [RIGHT])), engine, threads)
    assert trace.branches[0].version_spans == [VersionSpan(3, 5, 4), VersionSpan(5, 7, 5)]
    assert trace.oldest_version == 4


async def test_every_turn_of_every_sample_has_a_seed_of_its_own(threads: Threads) -> None:
    seeds = []
    for sample in range(2):
        episode = ScriptedEpisode(PROMPT, [Reply(observation_ids=[20]), RIGHT])
        engine = ScriptedEngine([5, EOS], [6, EOS])
        await play(task_of(episode), engine, threads, sample)
        seeds += engine.seeds
    assert seeds == [request_seed(7, 0, sample, turn) for sample in range(2) for turn in range(2)]
    assert len(set(seeds)) == 4


# ---- who ended it


async def test_an_end_token_exactly_at_the_length_limit_is_terminated(threads: Threads) -> None:
    engine = ScriptedEngine([5, 6, 7, EOS])
    trace = await play(
        task_of(ScriptedEpisode(PROMPT, [RIGHT]), max_turn_tokens=4, max_trace_tokens=7), engine, threads
    )
    assert trace.stop_reason is StopReason.TERMINATED and trace.reward == 1.0


async def test_a_turn_without_an_end_token_is_cut_and_never_graded(threads: Threads) -> None:
    episode = ScriptedEpisode(PROMPT, [RIGHT], cut_value=0.125)
    trace = await play(task_of(episode), ScriptedEngine([5, 6, 7, 8, EOS]), threads)
    assert trace.stop_reason is StopReason.TRUNCATED_LENGTH and trace.reward == 0.125
    assert episode.actions == [] and trace.num_action_tokens == 4


async def test_the_trace_limit_bounds_a_turn(threads: Threads) -> None:
    engine = ScriptedEngine([5, EOS], [6, 7, 8, EOS])
    episode = ScriptedEpisode(PROMPT, [Reply(observation_ids=[20]), RIGHT])
    trace = await play(task_of(episode, max_trace_tokens=8), engine, threads)
    assert engine.max_tokens == [4, 2]
    assert trace.stop_reason is StopReason.TRUNCATED_LENGTH and len(trace.branches[0].token_ids) == 8


async def test_the_turn_limit_is_named_as_such(threads: Threads) -> None:
    episode = ScriptedEpisode(PROMPT, [Reply(observation_ids=[20])] * 2)
    trace = await play(task_of(episode, max_turns=2), ScriptedEngine([5, EOS], [6, EOS]), threads)
    assert trace.stop_reason is StopReason.TRUNCATED_TURNS and trace.num_turns == 2
    assert trace.branches[0].action_mask[-2:].tolist() == [True, False]


@pytest.mark.parametrize(("observation", "kept"), [([20, 21, 22], 3), ([20, 21, 22, 23, 24], 3)])
async def test_an_observation_that_fills_the_trace_ends_it_by_length(
    observation: list[int], kept: int, threads: Threads
) -> None:
    episode = ScriptedEpisode(PROMPT, [Reply(observation_ids=observation)])
    trace = await play(task_of(episode, max_trace_tokens=8), ScriptedEngine([5, EOS]), threads)
    assert trace.stop_reason is StopReason.TRUNCATED_LENGTH and trace.num_turns == 1
    assert trace.branches[0].token_ids[-kept:].tolist() == observation[:kept]
    assert len(trace.branches[0].token_ids) == 8


async def test_a_turn_that_fills_the_trace_and_gets_no_observation_ends_by_length(threads: Threads) -> None:
    trace = await play(
        task_of(ScriptedEpisode(PROMPT, [Reply()]), max_trace_tokens=5), ScriptedEngine([5, EOS]), threads
    )
    assert trace.stop_reason is StopReason.TRUNCATED_LENGTH


# ---- what makes a trace invalid


@pytest.mark.parametrize("limit", [3, 2])
async def test_a_prompt_without_room_for_an_answer_is_refused_and_never_shifted(limit: int, threads: Threads) -> None:
    """T13: left truncation would train on another prompt."""
    engine = ScriptedEngine([5, EOS])
    with pytest.raises(PromptTooLong, match="3 prompt tokens"):
        await play(task_of(ScriptedEpisode(PROMPT, [RIGHT]), max_trace_tokens=limit), engine, threads)
    assert engine.contexts == []


@pytest.mark.parametrize(
    ("episode", "cause"),
    [
        (RuntimeError("no such file"), "RuntimeError: no such file"),
        (ScriptedEpisode(PROMPT, [ValueError("cannot grade")]), "ValueError: cannot grade"),
        (ScriptedEpisode(PROMPT, [Reply(done=True)]), "done without an outcome"),
        (ScriptedEpisode(PROMPT, [None]), "AttributeError"),
        (ScriptedEpisode(PROMPT, [Reply(done=True, outcome="good")]), "ValueError"),  # pyright: ignore
        (ScriptedEpisode(PROMPT, [Reply(observation_ids=[-1])]), "no token ids"),
        (ScriptedEpisode(PROMPT, [Reply(observation_ids=[2.5])]), "TypeError"),  # pyright: ignore
        (ScriptedEpisode([], [RIGHT]), "empty prompt"),
        (ScriptedEpisode("3+4=", [RIGHT]), "TypeError"),
        (ScriptedEpisode([2**32], [RIGHT]), "no token ids"),
        (None, "AttributeError"),
    ],
)
async def test_whatever_an_environment_does_wrong_is_the_traces_own_failure(
    episode: Any, cause: str, threads: Threads
) -> None:
    with pytest.raises(EnvironmentFailed, match=cause):
        await play(task_of(episode), ScriptedEngine([5, EOS], [6, EOS], [7, EOS]), threads)


@pytest.mark.parametrize("token_id", [260, 261])
@pytest.mark.parametrize("where", ["prompt", "observation"])
async def test_an_id_beyond_the_vocabulary_is_the_traces_own_failure(
    where: str, token_id: int, threads: Threads
) -> None:
    """The engine and the value service would refuse it, and with it the run. 260 is the last of 261 ids."""
    prompt = [*PROMPT, token_id] if where == "prompt" else PROMPT
    observation = [token_id] if where == "observation" else [20]
    task = task_of(ScriptedEpisode(prompt, [Reply(observation_ids=observation), RIGHT]))
    engine, sampling = ScriptedEngine([5, EOS], [6, EOS]), Sampling(1.0, 7, 10.0, max_token_id=260)
    if token_id == 260:
        assert token_id in (await roll_out(task, 0, engine, sampling, threads)).branches[0].token_ids
    else:
        with pytest.raises(EnvironmentFailed, match=r"no token ids: \d+ to 261, not within 0 to 260"):
            await roll_out(task, 0, engine, sampling, threads)


async def test_a_failing_cut_is_the_traces_own_failure(threads: Threads) -> None:
    with pytest.raises(EnvironmentFailed, match="ZeroDivisionError"):
        episode = ScriptedEpisode(PROMPT, [], cut_value=lambda: 1 / 0)
        await play(task_of(episode), ScriptedEngine([5, 6, 7, 8]), threads)


async def test_numpy_numbers_of_an_environment_are_as_good_as_any(threads: Threads) -> None:
    reply = Reply(observation_ids=np.array([20], dtype=np.uint32), reward=np.float32(0.5))  # pyright: ignore
    done = Reply(done=np.True_, outcome=np.float32(1.0))  # pyright: ignore
    episode = ScriptedEpisode(np.array(PROMPT), [reply, done])
    trace = await play(task_of(episode), ScriptedEngine([5, EOS], [6, EOS]), threads)
    assert type(trace.reward) is float and trace.reward == 1.0


# ---- threads


async def test_calls_that_never_return_do_not_take_the_threads_of_others() -> None:
    """Scenario: as many calls hang as there are threads, and their callers give up. Result: the next call is served."""
    threads, never = Threads(2, name="test"), threading.Event()
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await threads.call(never.wait)
        assert threads.num_abandoned == 2
        assert await asyncio.wait_for(threads.call(sum, [1, 2]), 5) == 3
    finally:
        never.set()
        threads.close()


async def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    threads, lock, running, most = Threads(3, name="test"), threading.Lock(), [0], [0]

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.005)
        with lock:
            running[0] -= 1

    await asyncio.gather(*(threads.call(work) for _ in range(20)))
    threads.close()
    assert 1 <= most[0] <= 3
