"""Bad data in the real producer with a real engine: dropped, counted by cause, the run goes on; too much of it stops.

Notable:
- Environments are outside code, so these are made for the test. The broken peer is a proxy before the engine that
  spoils the log-probabilities in its replies.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from orchestrator.admission import Outcomes
from orchestrator.environments.add import AddEnvironment
from orchestrator.environments.protocol import Environment, Episode, Reply
from orchestrator.producer import Group, Producer
from orchestrator.tasks import TaskStream
from orchestrator.tokenizer import Tokenizer
from services.config.orchestrator import EnvConfig, OrchestratorConfig
from services.runtime.lifecycle import cause_of, exit_code_of
from services.wire.errors import BadData
from services.wire.samples import StopReason, validate_branch
from tests.engines import client_of, local_engine

ENV = EnvConfig(type="add", max_turns=2, max_turn_tokens=8, max_trace_tokens=32)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[str]:
    with local_engine(tiny_model, "--max-model-len", "64") as url:
        yield url


class Episodes:
    """An episode of `add` with one of its methods replaced."""

    def __init__(self, inner: Episode, **instead: Callable[..., Any]) -> None:
        self._inner = inner
        self.prompt_ids = inner.prompt_ids
        self.step = instead.get("step", inner.step)
        self.cut = instead.get("cut", inner.cut)
        if "prompt" in instead:
            self.prompt_ids = instead["prompt"]()


class Troubled:
    """`add`, in which every fifth episode (by its seed) is in trouble."""

    def __init__(self, model: Path, trouble: Callable[[Episode], Any], every: int = 5) -> None:
        self._inner = AddEnvironment({}, Tokenizer(model))
        self._trouble = trouble
        self._every = every
        self.num_tasks = self._inner.num_tasks

    def task_id(self, index: int) -> str:
        return self._inner.task_id(index)

    def start(self, index: int, seed: int) -> Any:
        episode = self._inner.start(index, seed)
        return self._trouble(episode) if seed % self._every == 0 else episode


async def produce(
    url: str, environment: Environment, num_groups: int, *, min_group: int = 1, **settings: Any
) -> tuple[list[Group], Outcomes]:
    """Take good groups from a running producer."""
    config = OrchestratorConfig(max_concurrent_rollouts=16, **settings)
    outcomes = Outcomes(max_bad_fraction=config.max_bad_fraction, window=config.bad_window, num_concurrent=16)
    client = client_of(url)
    producer = Producer(
        config,
        TaskStream([(environment, ENV)], seed=3),
        [client],
        None,
        outcomes,
        seed=3,
        max_tokens=64,
        min_group=min_group,
        may_start=lambda num_pending: num_pending < 32,
    )
    groups: list[Group] = []

    async def take() -> None:
        while len(groups) < num_groups:
            groups.append(await producer.next_group())
            producer.poke()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(producer.run())
            await take()
            running.cancel()
    finally:
        await client.close()
    return groups, outcomes


def assert_clean(groups: list[Group], outcomes: Outcomes, *causes: str, at_least: int = 3) -> None:
    """Nothing bad got through; every cause was counted, and no other."""
    for group in groups:
        for trace in group.traces:
            assert np.isfinite(trace.reward) and trace.stop_reason is not StopReason.ABORTED
            for branch in trace.branches:
                validate_branch(branch)
    counts = {cause: count for cause, count in outcomes.dropped.items() if count}
    assert set(counts) == set(causes) and min(counts.values()) >= at_least


# ---- environments in trouble


def raising(*_: Any) -> Any:
    raise ConnectionError("the sandbox is gone")


def in_start(_: Episode) -> Any:
    raise FileNotFoundError("no such task")


TROUBLES: dict[str, tuple[Callable[[Episode], Any], str]] = {
    "raises in start": (in_start, "env_error"),
    "raises in step": (lambda episode: Episodes(episode, step=raising, cut=raising), "env_error"),
    "NaN reward": (
        lambda episode: Episodes(episode, step=lambda _: Reply(done=True, outcome=float("nan")), cut=lambda: np.nan),
        "nonfinite_reward",
    ),
    "infinite reward of a turn": (
        lambda episode: Episodes(
            episode, step=lambda _: Reply(done=True, outcome=1.0, reward=float("inf")), cut=raising
        ),
        "nonfinite_reward",
    ),
    "over-long prompt": (lambda episode: Episodes(episode, prompt=lambda: [10] * 100), "over_long"),
    "done without an outcome": (lambda episode: Episodes(episode, step=lambda _: Reply(done=True)), "env_error"),
    "returns nothing": (lambda episode: Episodes(episode, step=lambda _: None), "env_error"),
}


@pytest.mark.parametrize("name", TROUBLES)
async def test_a_trace_in_trouble_is_dropped_by_cause_and_the_run_goes_on(
    name: str, engine: str, tiny_model: Path
) -> None:
    trouble, cause = TROUBLES[name]
    groups, outcomes = await produce(engine, Troubled(tiny_model, trouble), 60)
    causes = (
        {cause} if name != "infinite reward of a turn" else {cause, *(c for c in outcomes.dropped if c == "env_error")}
    )
    assert_clean(groups, outcomes, *causes, at_least=1)
    assert outcomes.dropped[cause] >= 3
    assert len(groups) == 60


async def test_an_environment_that_hangs_costs_its_own_traces_only(engine: str, tiny_model: Path) -> None:
    """Scenario: more episodes hang than there are environment threads. Result: each is dropped at its deadline; good
    groups keep coming."""
    never, hanging = threading.Event(), Counter[str]()

    def hang(*_: Any) -> Any:
        hanging["calls"] += 1
        never.wait()

    environment = Troubled(tiny_model, lambda episode: Episodes(episode, step=hang, cut=hang), every=3)
    started = time.monotonic()
    try:
        groups, outcomes = await produce(engine, environment, 60, rollout_deadline_s=1.0)
    finally:
        never.set()
    assert_clean(groups, outcomes, "deadline", at_least=17)
    assert hanging["calls"] >= 17 and len(groups) == 60
    assert time.monotonic() - started < 60


async def test_a_group_left_too_small_by_bad_traces_is_dropped_whole(engine: str, tiny_model: Path) -> None:
    environment = Troubled(tiny_model, in_start, every=3)
    groups, outcomes = await produce(engine, environment, 20, min_group=2, group_size=2, max_bad_fraction=0.9)
    assert_clean(groups, outcomes, "env_error", "group_too_small")
    assert all(len(group.traces) == len(group.samples) == 2 for group in groups)
    # of two bad traces in one group neither is left to be dropped with it
    assert outcomes.dropped["group_too_small"] <= outcomes.dropped["env_error"]


async def test_too_many_bad_traces_stop_the_run_and_say_why(engine: str, tiny_model: Path) -> None:
    environment = Troubled(tiny_model, lambda episode: Episodes(episode, step=raising, cut=raising), every=1)
    with pytest.raises(BaseExceptionGroup) as caught:
        await produce(engine, environment, 1)
    cause = cause_of(caught.value)
    assert cause.startswith("BadData: 100% of the last 20 rollouts were invalid (20 env_error)")
    assert "max_bad_fraction is 50%" in cause and "the sandbox is gone" in cause and "add/" in cause
    assert exit_code_of(only(caught.value)) == 70


def only(error: BaseException) -> BaseException:
    """The error at the bottom of groups; all of them are BadData."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BadData)
    return error


# ---- a broken engine


def spoil_null(choice: dict[str, Any]) -> None:
    choice["logprobs"]["content"][0]["logprob"] = None


def spoil_missing(choice: dict[str, Any]) -> None:
    del choice["logprobs"]["content"][-1]["logprob"]


def spoil_nan(choice: dict[str, Any]) -> None:
    choice["logprobs"]["content"][-1]["logprob"] = float("nan")  # written as NaN, which is not JSON


def spoil_infinity(choice: dict[str, Any]) -> None:
    choice["logprobs"]["content"][0]["logprob"] = -float("inf")


def spoil_all(choice: dict[str, Any]) -> None:
    choice["logprobs"] = None


@asynccontextmanager
async def broken_peer(target: str, spoil: Callable[[dict[str, Any]], None], every: int) -> AsyncIterator[str]:
    """An HTTP proxy before an engine that spoils every so many generations."""
    counter = Counter[str]()

    async def forward(request: web.Request) -> web.Response:
        body, headers = await request.read(), {"Content-Type": request.content_type}
        async with session.request(request.method, target + str(request.rel_url), data=body, headers=headers) as reply:
            data = await reply.read()
            if request.path.endswith("/generate"):
                counter["generations"] += 1
                if counter["generations"] % every == 0:
                    content = json.loads(data)
                    spoil(content["choices"][0])
                    data = json.dumps(content).encode()
            return web.Response(status=reply.status, body=data, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as session:
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("spoil", [spoil_null, spoil_missing, spoil_nan, spoil_infinity, spoil_all])
async def test_a_missing_log_probability_costs_its_trace_and_never_becomes_zero(
    spoil: Callable[[dict[str, Any]], None], engine: str, tiny_model: Path
) -> None:
    environment = AddEnvironment({}, Tokenizer(tiny_model))
    async with broken_peer(engine, spoil, every=5) as url:
        groups, outcomes = await produce(url, environment, 40)
    assert_clean(groups, outcomes, "missing_logprob")
    for group in groups:
        for sample in group.samples:
            assert (sample.branch.logprobs[sample.branch.action_mask] < 0).all()


async def test_an_engine_without_log_probabilities_stops_the_run(engine: str, tiny_model: Path) -> None:
    async with broken_peer(engine, spoil_all, every=1) as url:
        with pytest.raises(BaseExceptionGroup) as caught:
            await produce(url, AddEnvironment({}, Tokenizer(tiny_model)), 1)
    assert "20 missing_logprob" in cause_of(caught.value)
