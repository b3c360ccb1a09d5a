"""The engine client against servers that misbehave: a real HTTP server on loopback that answers what it is told."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from services.inference.client import Asleep, EngineClient
from services.wire.errors import ContractError, DeadlineExceeded, DependencyLost

EOS = 4
Route = Callable[[web.Request], Any]


def reply(tokens: list[int], **changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": tokens,
        "finish_reason": "length",
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in tokens]},
        "weight_versions": [{"version": "v3", "start": 0, "end": len(tokens)}],
    }
    return {"choices": [choice | changes]}


@asynccontextmanager
async def engine(**routes: Route) -> AsyncIterator[EngineClient]:
    """A client of a server with these routes (named by their path's last part) and harmless others."""

    async def handle(request: web.Request) -> web.Response:
        name = request.path.rsplit("/", 1)[1]
        calls.append(name)
        answer = routes[name](request) if name in routes else {"weight_version": "v3"}
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, web.Response):
            return answer
        return web.Response(body=json.dumps(answer).encode(), content_type="application/json")

    calls: list[str] = []
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", eos_token_id=EOS, clear_cache=True)
    client.calls = calls
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


async def generate(client: EngineClient, *, max_tokens: int = 3, deadline_s: float = 10):
    return await client.generate([1, 2], max_tokens=max_tokens, temperature=1.0, seed=0, deadline_s=deadline_s)


async def test_a_good_reply_comes_back_with_versions_as_numbers() -> None:
    async with engine(generate=lambda _: reply([5, 6, 7])) as client:
        generation = await generate(client)
    assert (generation.token_ids, generation.logprobs) == ([5, 6, 7], [-0.5] * 3)
    assert [tuple(span) for span in generation.spans] == [(0, 3, 3)]
    assert client.version == 3


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        (None, [True, True]),
        ({"content": None}, [True, True]),
        ({"content": [{"token_id": 5, "logprob": None}, {"token_id": 6, "logprob": -1.0}]}, [True, False]),
        ({"content": [{"token_id": 5}, {"token_id": 6, "logprob": -1.0}]}, [True, False]),
    ],
)
async def test_a_missing_log_probability_is_nan_never_zero(logprobs: Any, expected: list[bool]) -> None:
    async with engine(generate=lambda _: reply([5, 6], logprobs=logprobs)) as client:
        assert [math.isnan(x) for x in (await generate(client)).logprobs] == expected


@pytest.mark.parametrize(
    "bad",
    [
        reply([5, 6], logprobs={"content": [{"token_id": 5, "logprob": -1.0}]}),
        reply([5, 6], logprobs={"content": [{"token_id": 6, "logprob": -1.0}, {"token_id": 5, "logprob": -1.0}]}),
        reply([5, 6], weight_versions=[{"version": "v1", "start": 0, "end": 1}]),
        reply(
            [5, 6], weight_versions=[{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 0, "end": 2}]
        ),
        reply([5, 6], weight_versions=None),
        reply([5, 6, 7, 8]),
        reply([]),
        reply([5, 6], finish_reason="error"),
        reply([5, 6], token_ids="56"),
        {"choices": []},
        {"error": "?"},
    ],
)
async def test_a_reply_that_does_not_fit_is_a_contract_error(bad: dict) -> None:
    async with engine(generate=lambda _: bad) as client:
        with pytest.raises(ContractError):
            await generate(client)


async def test_busy_and_lost_connections_are_retried_within_the_deadline() -> None:
    answers = iter([web.Response(status=503), None, reply([5])])

    def answer(request: web.Request) -> Any:
        one = next(answers)
        if one is None:
            assert request.transport is not None
            request.transport.close()
            return {}
        return one

    async with engine(generate=answer) as client:
        assert (await generate(client)).token_ids == [5]


@pytest.mark.parametrize(("status", "error"), [(500, DependencyLost), (400, ContractError), (404, ContractError)])
async def test_other_errors_are_raised_at_once_with_what_the_engine_said(status: int, error: type) -> None:
    async with engine(generate=lambda _: web.Response(status=status, text="because")) as client:
        with pytest.raises(error, match=f"{status}.*because"):
            await generate(client)
    assert client.calls.count("generate") == 1


async def test_an_engine_that_never_answers_costs_one_deadline() -> None:
    async def hang(_: web.Request) -> dict:
        await asyncio.sleep(60)
        return {}

    async with engine(generate=hang, pause=hang) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="generation"):
            await generate(client, deadline_s=0.3)
        with pytest.raises(DeadlineExceeded, match="weight update"):
            await client.update_weights("/x", 4, deadline_s=0.3)
    assert time.monotonic() - started < 10
    assert client.calls[-1] == "resume"


async def test_nobody_listening_is_a_missed_deadline_not_a_hang() -> None:
    client = EngineClient("http://127.0.0.1:9", eos_token_id=EOS, clear_cache=True)
    with pytest.raises(DeadlineExceeded, match="ready"):
        await client.wait_ready(0.4)
    await client.close()


@pytest.mark.parametrize("failing", ["pause", "collective_rpc", "update_weight_version"])
async def test_a_500_during_an_update_is_raised_at_once_resumes_and_the_next_update_works(failing: str) -> None:
    answers = iter([web.Response(status=500, text="boom"), {}, {}])
    async with engine(**{failing: lambda _: next(answers)}) as client:
        await client.wait_ready(5)
        started = time.monotonic()
        with pytest.raises(DependencyLost, match="boom"):
            await client.update_weights("/x", 4, deadline_s=60)
        assert time.monotonic() - started < 5
        assert client.calls[-1] == "resume"
        assert client.version == 3
        await client.update_weights("/x", 4, deadline_s=60)
        assert client.version == 4


async def test_an_engine_that_drops_the_connection_after_its_error_is_resumed_all_the_same() -> None:
    """vLLM does: left paused, it would hang every rollout."""
    resumes: list[bool] = []

    def drop_first(request: web.Request) -> dict:
        resumes.append(True)
        if len(resumes) == 1:
            assert request.transport is not None
            request.transport.close()
        return {}

    async with engine(collective_rpc=lambda _: web.Response(status=500, text="boom"), resume=drop_first) as client:
        with pytest.raises(DependencyLost, match="boom"):
            await client.update_weights("/x", 4, deadline_s=60)
    assert len(resumes) == 2


async def test_an_update_speaks_in_this_order() -> None:
    async with engine() as client:
        await client.wait_ready(5)
        del client.calls[:]
        await client.update_weights("/x", 4, deadline_s=5)
    assert client.calls == ["pause", "collective_rpc", "update_weight_version", "resume"]


async def test_without_versions_a_request_that_reached_the_engine_after_its_pause_is_sent_again() -> None:
    """It waits there unsampled; after the update it would be sampled by the new weights and labelled with the old."""
    answered = asyncio.Event()

    async def generate_late(_: web.Request) -> dict:
        if not answered.is_set():
            answered.set()
            await asyncio.sleep(60)
        return reply([5], weight_versions=None)

    async with engine(generate=generate_late, weight_info=lambda _: web.Response(status=404)) as client:
        running = asyncio.create_task(generate(client))
        await answered.wait()
        await client.update_weights("/x", 1, deadline_s=20)
        assert [tuple(span) for span in (await running).spans] == [(0, 1, 1)]


async def test_an_aborted_generation_that_already_ended_is_not_continued() -> None:
    """The end token is kept once, whatever the abort says."""
    aborted = reply([5, EOS], finish_reason="abort", weight_versions=None)
    async with engine(generate=lambda _: aborted, weight_info=lambda _: web.Response(status=404)) as client:
        generation = await generate(client)
    assert (generation.token_ids, generation.finish_reason) == ([5, EOS], "stop")


async def test_a_continuation_asks_for_the_rest_with_another_seed() -> None:
    bodies: list[dict] = []

    async def answer(request: web.Request) -> dict:
        bodies.append(await request.json())
        return (
            reply([5], finish_reason="abort", weight_versions=None)
            if len(bodies) == 1
            else reply([6], weight_versions=None)
        )

    async with engine(generate=answer, weight_info=lambda _: web.Response(status=404)) as client:
        generation = await generate(client)
    assert generation.token_ids == [5, 6]
    assert bodies[1]["token_ids"] == [1, 2, 5]
    assert bodies[1]["sampling_params"]["max_tokens"] == 2
    assert bodies[0]["sampling_params"]["seed"] != bodies[1]["sampling_params"]["seed"]
    assert bodies[0]["request_id"] != bodies[1]["request_id"]


class Sleeper:
    """What an engine says of its sleep."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.sums: Any = ["a1", "b2"]
        self.query = ""

    def sleep(self, request: web.Request) -> dict:
        self.query = request.query_string
        self.is_asleep = True
        return {}

    def wake_up(self, _: web.Request) -> dict:
        self.is_asleep = False
        return {}

    def is_sleeping(self, _: web.Request) -> dict:
        return {"is_sleeping": self.is_asleep}

    def collective_rpc(self, _: web.Request) -> Any:
        return self.sums if isinstance(self.sums, web.Response) else {"results": self.sums}

    def routes(self, **others: Route) -> dict[str, Route]:
        own = {name: getattr(self, name) for name in ("sleep", "wake_up", "is_sleeping", "collective_rpc")}
        return own | others


async def test_a_sleep_and_a_wake_speak_in_this_order_and_say_a_thing_once() -> None:
    sleeper = Sleeper()
    async with engine(**sleeper.routes()) as client:
        await client.wake_up(deadline_s=5)
        await client.sleep(deadline_s=5)
        assert client.is_asleep
        await client.sleep(deadline_s=5)
        assert client.calls == ["collective_rpc", "sleep", "is_sleeping"]
        assert sleeper.query == "level=1&mode=abort"
        del client.calls[:]
        await client.wake_up(deadline_s=5)
        assert not client.is_asleep
        await client.wake_up(deadline_s=5)
    assert client.calls == ["wake_up", "is_sleeping", "collective_rpc"]


@pytest.mark.parametrize("tells_versions", [True, False])
async def test_a_request_across_a_sleep_goes_on_from_its_tokens_and_nothing_is_sent_meanwhile(
    tells_versions: bool,
) -> None:
    """One request is aborted with a token, one reached the engine too late to be, one comes during the sleep."""
    sleeper, put_to_sleep = Sleeper(), asyncio.Event()
    bodies: list[dict] = []
    changes = {} if tells_versions else {"weight_versions": None}

    def sleep(request: web.Request) -> dict:
        put_to_sleep.set()
        return sleeper.sleep(request)

    async def generate_slowly(request: web.Request) -> dict:
        assert not sleeper.is_asleep
        body = await request.json()
        bodies.append(body)
        if put_to_sleep.is_set():
            return reply([7] * body["sampling_params"]["max_tokens"], **changes)
        if len(bodies) == 1:
            await put_to_sleep.wait()
            return reply([6], finish_reason="abort", **changes)
        await asyncio.sleep(60)
        return {}

    routes = sleeper.routes(sleep=sleep, generate=generate_slowly)
    if not tells_versions:
        routes["weight_info"] = lambda _: web.Response(status=404)
    async with engine(**routes) as client:
        running = [asyncio.create_task(generate(client)) for _ in range(2)]
        while len(bodies) < 2:
            await asyncio.sleep(0.01)
        await client.sleep(deadline_s=20)
        running.append(asyncio.create_task(generate(client)))
        await asyncio.sleep(0.1)
        assert len(bodies) == 2
        assert not any(task.done() for task in running)
        await client.wake_up(deadline_s=5)
        generations = await asyncio.gather(*running)
    assert sorted(generation.token_ids for generation in generations) == [[6, 7, 7], [7, 7, 7], [7, 7, 7]]
    version = 3 if tells_versions else 0
    assert all([tuple(span) for span in generation.spans] == [(0, 3, version)] for generation in generations)
    assert sorted(body["token_ids"] for body in bodies[2:]) == [[1, 2], [1, 2], [1, 2, 6]]


async def test_the_time_asleep_is_not_a_generations_own_and_the_rest_of_its_time_is() -> None:
    async def hang(_: web.Request) -> dict:
        await asyncio.sleep(60)
        return {}

    async with engine(**Sleeper().routes(generate=hang)) as client:
        await client.wait_ready(5)
        await client.sleep(deadline_s=5)
        running = asyncio.create_task(generate(client, deadline_s=0.4))
        await asyncio.sleep(0.8)
        assert not running.done()
        await client.wake_up(deadline_s=5)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="generation"):
            await running
    assert 0.2 < time.monotonic() - started < 5


async def test_an_update_of_an_engine_that_sleeps_is_refused_at_once_and_nothing_is_sent() -> None:
    async with engine(**Sleeper().routes()) as client:
        await client.sleep(deadline_s=5)
        del client.calls[:]
        with pytest.raises(Asleep, match="sleeps"):
            await client.update_weights("/x", 4, deadline_s=60)
        assert client.calls == []
        await client.wake_up(deadline_s=5)


async def test_an_update_and_a_sleep_take_turns() -> None:
    """Both are asked for at once: the sleep begins when the update is done."""
    sleeper = Sleeper()
    async with engine(**sleeper.routes()) as client:
        await client.wait_ready(5)
        del client.calls[:]
        await asyncio.gather(client.update_weights("/x", 4, deadline_s=5), client.sleep(deadline_s=5))
    update = ["pause", "collective_rpc", "update_weight_version", "resume"]
    assert client.calls == [*update, "collective_rpc", "sleep", "is_sleeping"]


async def test_weights_that_woke_up_other_than_they_fell_asleep_are_never_sampled_from() -> None:
    sleeper = Sleeper()
    async with engine(**sleeper.routes(generate=lambda _: reply([5, 6, 7]))) as client:
        await client.wait_ready(5)
        await client.sleep(deadline_s=5)
        sleeper.sums = ["a1", "00"]
        with pytest.raises(ContractError, match=rf"{client.url} woke up with other weights.*'00'.*'b2'"):
            await client.wake_up(deadline_s=5)
        assert client.is_asleep
        running = asyncio.create_task(generate(client))
        await asyncio.sleep(0.1)
        assert "generate" not in client.calls
        running.cancel()


@pytest.mark.parametrize(
    ("sums", "error"),
    [
        (web.Response(status=400, text="no such method"), ContractError),
        (web.Response(status=500, text="no such method"), DependencyLost),
        ([], ContractError),
        ({"sum": 1}, ContractError),
    ],
)
async def test_an_engine_that_cannot_sum_its_weights_is_not_put_to_sleep(sums: Any, error: type) -> None:
    sleeper = Sleeper()
    sleeper.sums = sums
    async with engine(**sleeper.routes(generate=lambda _: reply([5, 6, 7]))) as client:
        with pytest.raises(error, match=f"{client.url} .*checksum"):
            await client.sleep(deadline_s=5)
        assert "sleep" not in client.calls
        assert not client.is_asleep
        assert (await generate(client)).token_ids == [5, 6, 7]


@pytest.mark.parametrize("what", ["says it does not sleep", "fails", "never answers"])
async def test_an_engine_that_does_not_fall_asleep_is_told_to_wake_up_and_requests_go_on(what: str) -> None:
    async def refuse(_: web.Request) -> Any:
        if what == "never answers":
            await asyncio.sleep(60)
        return web.Response(status=500, text="boom") if what == "fails" else {}

    error, words = {
        "says it does not sleep": (ContractError, "does not sleep"),
        "fails": (DependencyLost, "boom"),
        "never answers": (DeadlineExceeded, "fall asleep"),
    }[what]
    async with engine(**Sleeper().routes(sleep=refuse, generate=lambda _: reply([5, 6, 7]))) as client:
        started = time.monotonic()
        with pytest.raises(error, match=words):
            await client.sleep(deadline_s=0.5)
        assert time.monotonic() - started < 5
        assert client.calls[-1] == "wake_up"
        assert not client.is_asleep
        assert (await generate(client)).token_ids == [5, 6, 7]


async def test_an_engine_that_stays_asleep_is_an_error_and_may_be_woken_again() -> None:
    sleeper = Sleeper()
    wakes: list[bool] = []

    def wake_the_second_time(request: web.Request) -> dict:
        wakes.append(True)
        return sleeper.wake_up(request) if len(wakes) == 2 else {}

    async with engine(**sleeper.routes(wake_up=wake_the_second_time)) as client:
        await client.sleep(deadline_s=5)
        with pytest.raises(ContractError, match=f"{client.url} was woken up"):
            await client.wake_up(deadline_s=5)
        assert client.is_asleep
        await client.wake_up(deadline_s=5)
        assert not client.is_asleep


def test_the_client_and_the_vllm_command_never_import_torch() -> None:
    code = (
        "import sys, services.inference.client, services.inference.vllm_command;"
        "print(sorted(m for m in ('torch', 'transformers', 'vllm') if m in sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
