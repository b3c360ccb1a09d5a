"""The producer: what it drops and why, what it hands out, and that waiting for a group always ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.admission import Outcomes
from orchestrator.environments import build, build_training
from orchestrator.environments.protocol import Environment, Reply
from orchestrator.producer import Group, Producer
from orchestrator.tasks import TaskStream
from services.config.orchestrator import EnvConfig, OrchestratorConfig
from services.inference.client import Generation
from services.wire.errors import BadData, DeadlineExceeded
from services.wire.messages import ScoreReply
from services.wire.samples import VersionSpan
from tests.rollouts import EOS, PROMPT, ScriptedEnvironment, ScriptedEpisode
from tests.unit.orchestrator.environments.test_prefixed import END, LIMITS, TOKENIZER, row, write

ENV = EnvConfig(type="scripted", max_turns=3, max_turn_tokens=4, max_trace_tokens=32)
RIGHT = Reply(done=True, outcome=1.0)


class SameEngine:
    """Says the same in every turn, after a delay."""

    def __init__(self, token_ids: list[int], delay_s: float = 0.0) -> None:
        self._token_ids = token_ids
        self._delay_s = delay_s

    async def generate(self, token_ids: list[int], **_: Any) -> Generation:
        await asyncio.sleep(self._delay_s)
        num = len(self._token_ids)
        return Generation(list(self._token_ids), [-0.5] * num, [VersionSpan(0, num, 0)], "stop")


class Scorer:
    """A value service: zeros, or no answer at all."""

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers

    async def score(self, batch: list[list[int]], *, deadline_s: float) -> ScoreReply:
        if not self._answers:
            await asyncio.Event().wait()
        return ScoreReply([[0.0] * len(ids) for ids in batch], [0.0] * len(batch), 0)


def producer_of(
    environment: Environment,
    engine: Any = None,
    *,
    env: EnvConfig = ENV,
    scorer: Any = None,
    min_group: int = 1,
    may_start: Callable[[int], bool] = lambda num_pending: num_pending < 8,
    prompt_weight: Callable[[str], float] | None = None,
    max_token_id: int = 260,
    **settings: Any,
) -> tuple[Producer, Outcomes]:
    config = OrchestratorConfig.model_validate({"max_concurrent_rollouts": 4} | settings)
    outcomes = Outcomes(max_bad_fraction=config.max_bad_fraction, window=config.bad_window, num_concurrent=4)
    producer = Producer(
        config,
        TaskStream([(environment, env)], 3, prompt_weight),
        [engine or SameEngine([5, EOS])],
        scorer,
        outcomes,
        seed=3,
        max_tokens=64,
        min_group=min_group,
        may_start=may_start,
        max_token_id=max_token_id,
    )
    return producer, outcomes


async def take(producer: Producer, num: int, *, within_s: float = 10.0) -> list[Group]:
    """So many groups of a running producer; the first error of either side is raised."""
    groups: list[Group] = []
    running = asyncio.create_task(producer.run())

    async def wait() -> None:
        while len(groups) < num:
            groups.append(await producer.next_group())
            producer.poke()

    waiting = asyncio.create_task(wait())
    try:
        async with asyncio.timeout(within_s):
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, running):
            if task.done():
                error = task.exception()
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                if error is not None:
                    raise error
    finally:
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
    return groups


def every(num: int, trouble: Callable[[], Any], good: Callable[[], Any]) -> ScriptedEnvironment:
    """Every so-many-th task is in trouble."""
    return ScriptedEnvironment(lambda index: trouble() if index % num == 0 else good(), num_tasks=12)


def good() -> ScriptedEpisode:
    return ScriptedEpisode(PROMPT, [RIGHT])


# ---- what is dropped, and what comes through


async def test_an_id_beyond_the_vocabulary_costs_its_trace_and_not_the_run() -> None:
    environment = every(3, lambda: ScriptedEpisode(PROMPT, [Reply(observation_ids=[261]), RIGHT]), good)
    producer, outcomes = producer_of(environment)
    groups = await take(producer, 20)
    assert len(groups) == 20 and set(outcomes.dropped) == {"env_error"} and outcomes.dropped["env_error"] >= 3
    assert "no token ids: 261 to 261, not within 0 to 260" in outcomes.examples["env_error"]


async def test_a_recorded_game_that_goes_otherwise_is_dropped_and_counted_apart(tmp_path: Path) -> None:
    """Two rows, one of another secret than it says: half of the rollouts continue, the other half is counted."""
    env = write(tmp_path, row(), row("guess 0-7:", "1", "higher:", "5", "lower:", "3", secret=6))
    engine = SameEngine([*TOKENIZER.encode("5"), END])
    producer, outcomes = producer_of(build_training(env, TOKENIZER), engine, env=env, max_bad_fraction=0.9)
    groups = await take(producer, 10)
    assert {trace.task_id for group in groups for trace in group.traces} == {"guess/5 from line 1"}
    assert set(outcomes.dropped) == {"prefix_mismatch"} and outcomes.dropped["prefix_mismatch"] >= 8
    assert outcomes.examples["prefix_mismatch"].startswith("guess/6 from line 2: token 21 of 27 is")


async def test_samples_get_the_shaped_reward_and_traces_keep_the_environments_own() -> None:
    env = EnvConfig.model_validate(ENV.model_dump() | {"reward": {"scale": 2.0, "offset": -0.5}})
    producer, _ = producer_of(ScriptedEnvironment(lambda _: good()), env=env, scorer=Scorer())
    (group,) = await take(producer, 1)
    assert [trace.reward for trace in group.traces] == [1.0]
    assert [sample.reward for sample in group.samples] == [1.5]
    assert group.samples[0].values is not None


# ---- waiting ends


async def test_a_wait_for_a_group_that_never_ends_says_what_it_was_for() -> None:
    """Scenario: the value service neither answers nor heeds its deadline. Result: the wait ends soon after both
    deadlines have passed."""
    producer, _ = producer_of(
        ScriptedEnvironment(lambda _: good()),
        scorer=Scorer(answers=False),
        rollout_deadline_s=0.2,
        score_deadline_s=0.3,
    )
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        await take(producer, 1)
    assert 0.5 <= time.monotonic() - started < 8.0
    # the wait began before the first rollout did, so that it is looked at twice at most
    assert str(caught.value) == "waited 0.5 s for a group to end and be scored, of 4 rollouts in flight"


async def test_a_wait_for_new_weights_is_not_the_producers() -> None:
    """Scenario: nothing may start for three times the deadline. Result: no error, and then the groups come."""
    may_start = {"now": False}
    producer, _ = producer_of(
        ScriptedEnvironment(lambda _: good()),
        may_start=lambda num_pending: may_start["now"] and num_pending < 8,
        rollout_deadline_s=0.1,
        score_deadline_s=0.1,
    )

    def allow() -> None:
        may_start["now"] = True
        producer.poke()

    asyncio.get_running_loop().call_later(0.7, allow)
    started = time.monotonic()
    assert len(await take(producer, 3)) == 3
    assert time.monotonic() - started >= 0.7


async def test_slow_rollouts_of_which_some_are_invalid_are_waited_for() -> None:
    """Scenario: one rollout at a time takes 0.3 of 0.6 s, the first five tasks are in trouble. Result: the first
    valid one comes after more than twice the wait's own deadline."""
    started_tasks: list[int] = []

    def start(index: int) -> Any:
        started_tasks.append(index)
        return ScriptedEpisode(PROMPT, [ValueError("bad") if len(started_tasks) <= 5 else RIGHT])

    producer, outcomes = producer_of(
        ScriptedEnvironment(start),
        SameEngine([5, EOS], delay_s=0.3),
        max_concurrent_rollouts=1,
        max_bad_fraction=1.0,
        rollout_deadline_s=0.6,
        score_deadline_s=0.1,
    )
    started = time.monotonic()
    assert len(await take(producer, 1)) == 1
    assert outcomes.dropped["env_error"] == 5 and time.monotonic() - started > 2 * (0.6 + 0.1)


async def test_a_run_whose_rollouts_are_all_invalid_ends_even_where_all_may_be() -> None:
    """`max_bad_fraction = 1`: a window of rollouts without a valid group, and as long as one may take, is the end."""
    producer, outcomes = producer_of(
        ScriptedEnvironment(lambda _: ScriptedEpisode(PROMPT, [ConnectionError("the sandbox is gone")])),
        SameEngine([5, EOS], delay_s=0.002),
        max_bad_fraction=1.0,
        bad_window=30,
        rollout_deadline_s=0.3,
        score_deadline_s=0.1,
    )
    started = time.monotonic()
    with pytest.raises(BadData) as caught:
        await take(producer, 1)
    assert 0.4 <= time.monotonic() - started < 8.0 and outcomes.dropped["env_error"] >= 30
    assert "no valid group among the last" in str(caught.value) and "in 0.4 s or more" in str(caught.value)
    assert "the sandbox is gone" in str(caught.value) and "env_error)" in str(caught.value)


def too_few(outcomes: Outcomes) -> int:
    return outcomes.dropped["env_error"] - outcomes.dropped["group_too_small"]


async def test_a_run_whose_groups_are_all_too_small_ends_though_half_of_the_rollouts_is_valid() -> None:
    """One of two is bad in every group: exactly the share that is allowed, and never a group."""
    count = {"started": 0}

    def start(_: int) -> Any:
        count["started"] += 1
        return ScriptedEpisode(PROMPT, [RIGHT if count["started"] % 2 else ValueError("bad")])

    producer, outcomes = producer_of(
        ScriptedEnvironment(start),
        SameEngine([5, EOS], delay_s=0.002),
        min_group=2,
        group_size=2,
        batch_size=2,
        max_concurrent_rollouts=2,
        bad_window=20,
        max_bad_fraction=0.5,
        rollout_deadline_s=0.2,
        score_deadline_s=0.1,
    )
    with pytest.raises(BadData, match=r"no valid group .*group_too_small.*; for example scripted/"):
        await take(producer, 1)
    # the last group may have lost one rollout and not have ended yet
    assert outcomes.dropped["group_too_small"] >= 10 and 0 <= too_few(outcomes) <= 1


async def test_the_weights_of_spo_reach_the_rollouts() -> None:
    """By the names that SPO knows prompts by: only the one that weighs anything is rolled out."""
    env = EnvConfig(type="guess", **LIMITS)

    def weight(prompt_id: str) -> float:
        return 1.0 if prompt_id == "guess:guess/5" else 1e-9

    engine = SameEngine([*TOKENIZER.encode("5"), END])
    producer, _ = producer_of(build("guess", {}, TOKENIZER), engine, env=env, prompt_weight=weight)
    groups = await take(producer, 10)
    assert {sample.prompt_id for group in groups for sample in group.samples} == {"guess:guess/5"}
