"""Engines behind the real router: which of them are routed to, when they are late, slow, stuck, dead, stale or wrong.

The engines are doubles on real sockets; router, guard, keeper and client are the run's own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from orchestrator import routing as routing_module
from services.inference.router_client import RouterClient
from services.runtime.auth import Token
from services.runtime.ports import PortReservation
from services.wire.errors import ConfigError, ContractError, DeadlineExceeded, DependencyLost
from tests.fake_engines import fake_engines
from tests.routers import RouterProcess, kept, routed, router_process


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with router_process(tmp_path_factory.mktemp("router")) as process:
        yield process


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_module, "LOOK_INTERVAL_S", 0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Late


async def test_nothing_is_routed_before_the_last_engine_answers(router: RouterProcess, tmp_path: Path) -> None:
    """Scenario: the second engine comes up a second after the first. Result: an early request waits for both."""
    async with fake_engines(2, started=1) as (first, late), routed(tmp_path, router, [first.url, late.url]) as run:
        early = asyncio.create_task(run.ask(7))
        ready = asyncio.create_task(run.routing.wait_ready(60))
        await asyncio.sleep(1.0)
        assert not ready.done() and not early.done()
        assert first.seeds == []
        await late.start()
        await ready
        assert first.seeds == [] == late.seeds
        await run.routing.open(60)
        assert await early == (7, 0)


async def test_an_engine_that_never_answers_is_named_with_what_it_said(router: RouterProcess, tmp_path: Path) -> None:
    async with fake_engines(3, started=2) as engines, routed(tmp_path, router, [e.url for e in engines]) as run:
        engines[1].model = "other"
        with pytest.raises(
            DeadlineExceeded, match=r"inference-1 \(.* serves other, not policy\), inference-2 \(.*Connect"
        ):
            await run.routing.wait_ready(0.5)


async def test_an_engine_that_cannot_tell_versions_is_refused_behind_a_router(
    router: RouterProcess, tmp_path: Path
) -> None:
    async with fake_engines(2) as engines, routed(tmp_path, router, [e.url for e in engines]) as run:
        engines[1].weight_info_status = 404
        with pytest.raises(ConfigError, match="inference-1 cannot tell which weights sampled a token"):
            await run.routing.wait_ready(5)


# ---------------------------------------------------------------------------------------------------------------------
# Slow and stuck


async def test_a_busy_engine_that_answers_late_stays(router: RouterProcess, tmp_path: Path) -> None:
    """Scenario: while it samples, every answer takes 0.6 s. Result: a limit of 5 s keeps it, one of 0.5 s does not."""
    async with fake_engines(2) as engines:
        urls = [engine.url for engine in engines]
        async with routed(tmp_path / "patient", router, urls, probe_deadline_s=5) as run, kept(run.routing):
            engines[1].answer_s, engines[1].turn_s = 0.6, 3.0
            assert sorted(await asyncio.gather(*(run.ask(seed) for seed in range(8)))) == [(s, 0) for s in range(8)]
            assert run.events("engine_left", "engine_suspect") == []
        async with routed(tmp_path / "hasty", router, urls, probe_deadline_s=0.5) as run:
            engines[1].answer_s = 0.0
            async with kept(run.routing):
                engines[1].answer_s = 1.5
                await run.until(lambda: run.events("engine_left"))
                assert run.events("engine_left") == [("engine_left", "inference-1")]


async def test_requests_of_a_stuck_engine_go_on_elsewhere(router: RouterProcess, tmp_path: Path) -> None:
    """Scenario: one engine answers every probe at once and samples nothing. Result: it is out, its requests end."""
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines], probe_deadline_s=0.5) as run,
        kept(run.routing),
    ):
        engines[1].is_stuck = True
        assert sorted(await asyncio.gather(*(run.ask(seed) for seed in range(6)))) == [(s, 0) for s in range(6)]
        assert engines[1].seeds != []
        assert run.events("engine_left")[0] == ("engine_left", "inference-1")
        engines[1].is_stuck = False
        await run.until(lambda: run.routing.workers[1].is_routed)
        assert engines[1].paths.count("/resume") >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Dead and stale


async def test_a_dead_engine_is_out_and_comes_back_with_the_current_weights(
    router: RouterProcess, tmp_path: Path
) -> None:
    """Scenario: killed with requests under way, started anew with the first weights.

    Result: each request is answered once, by the other; nothing reaches the engine before it serves version 3 again.
    """
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines]) as run,
        kept(run.routing),
    ):
        await run.routing.update_weights(tmp_path / "v000003", 3, deadline_s=10)
        engines[0].turn_s = engines[1].turn_s = 0.5
        asked = [asyncio.create_task(run.ask(seed)) for seed in range(20)]
        await run.until(lambda: len(engines[1].seeds) == 10)
        await engines[1].stop()
        assert await asyncio.gather(*asked) == [(seed, 3) for seed in range(20)]
        assert run.num_told == dict.fromkeys(range(20), 1)
        await run.until(lambda: run.standing(1) == "dead" and not run.routing.workers[1].is_routed)
        assert run.routing.waiting_for == "inference-1 (dead)"
        shown = run.routing.snapshot()["engines"][1]
        assert (shown["routed"], shown["standing"]) == (False, "dead") and "Cannot connect" in shown["cause"]
        engines[0].turn_s = engines[1].turn_s = 0.0
        await engines[1].start_anew()
        while not engines[1].seeds:
            await run.ask(99)
        assert engines[1].loaded == [(str(tmp_path / "v000003"), "3")]
        assert run.events("engine_left", "engine_joined")[2:] == [
            ("engine_left", "inference-1"),
            ("engine_joined", "inference-1"),
        ]
        answers = await asyncio.gather(*(run.ask(seed) for seed in range(100, 120)))
        assert {version for _, version in answers} == {3}


async def test_an_engine_with_stale_weights_is_out_until_it_was_brought_the_current_ones(
    router: RouterProcess, tmp_path: Path
) -> None:
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines]) as run,
        kept(run.routing),
    ):
        await run.routing.update_weights(tmp_path / "v000002", 2, deadline_s=10)
        engines[0].load_status = engines[1].load_status = 500  # so that it stays as it is
        engines[1].version = 1
        await run.until(lambda: run.events("engine_left") == [("engine_left", "inference-1")])
        control = RouterClient(router.url)
        assert await control.engines() == [engines[0].url]
        await control.close()
        engines[1].seeds.clear()
        assert {version for _, version in await asyncio.gather(*(run.ask(s) for s in range(10)))} == {2}
        assert engines[1].seeds == []
        engines[1].load_status = 200
        await run.until(lambda: run.routing.workers[1].is_routed)
        assert engines[1].loaded[-1] == (str(tmp_path / "v000002"), "2") and engines[1].version == 2


async def test_an_engine_that_does_not_take_an_update_is_out_and_the_others_go_on(
    router: RouterProcess, tmp_path: Path
) -> None:
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines]) as run,
        kept(run.routing),
    ):
        engines[1].load_status = 500
        await run.routing.update_weights(tmp_path / "v000001", 1, deadline_s=10)
        assert [worker.is_routed for worker in run.routing.workers] == [True, False]
        assert {version for _, version in await asyncio.gather(*(run.ask(s) for s in range(6)))} == {1}
        engines[0].load_status = 500
        with pytest.raises(DependencyLost, match="no such snapshot"):
            await run.routing.update_weights(tmp_path / "v000002", 2, deadline_s=10)


async def test_an_engine_that_dies_with_weights_on_their_way_to_it_is_out_at_once(
    router: RouterProcess, tmp_path: Path
) -> None:
    """Scenario: it goes in the middle of an update, which is tried again until its deadline, and comes back in time.

    Result: requests go to the other meanwhile; the update ends well, and the engine is used again.
    """
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines]) as run,
        kept(run.routing),
    ):
        engines[1].answer_s = 3.0
        update = asyncio.create_task(run.routing.update_weights(tmp_path / "v000001", 1, deadline_s=60))
        await run.until(lambda: engines[0].version == 1 and run.routing.workers[1].bringing.locked())
        await engines[1].stop()
        await run.until(lambda: run.standing(1) == "dead" and not run.routing.workers[1].is_routed)
        assert not update.done()
        assert await asyncio.gather(*(run.ask(seed) for seed in range(10))) == [(seed, 1) for seed in range(10)]
        engines[1].answer_s = 0.0
        await engines[1].start_anew()
        await update
        await run.until(lambda: run.routing.workers[1].is_routed)
        assert engines[1].loaded == [(str(tmp_path / "v000001"), "1")]
        assert run.events("engine_left", "engine_joined")[2:] == [
            ("engine_left", "inference-1"),
            ("engine_joined", "inference-1"),
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Errors, and nobody good


async def test_a_storm_of_4xx_ejects_nobody(router: RouterProcess, tmp_path: Path) -> None:
    """Scenario: 60 refused requests, and probes that are refused. Result: each refusal is told, both engines stay."""
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines]) as run,
        kept(run.routing),
    ):
        for engine in engines:
            engine.generate_status, engine.metrics_status, engine.models_status = 422, 404, 400
        told = await asyncio.gather(*(run.ask(seed) for seed in range(60)), return_exceptions=True)
        assert {type(error) for error in told} == {ContractError}
        assert all("answered 422" in str(error) for error in told)
        await asyncio.sleep(0.5)
        for engine in engines:
            engine.generate_status = 200
            engine.seeds.clear()
        await asyncio.gather(*(run.ask(seed) for seed in range(8)))
        assert run.events("engine_left") == []
        assert all(engine.seeds for engine in engines)


async def test_errors_500_are_sent_again_for_a_while_and_then_told(router: RouterProcess, tmp_path: Path) -> None:
    async with fake_engines(2) as engines, routed(tmp_path, router, [e.url for e in engines], patience_s=2) as run:
        engines[1].generate_status = 500
        async with kept(run.routing):
            assert await asyncio.gather(*(run.ask(seed) for seed in range(8))) == [(s, 0) for s in range(8)]
            engines[0].generate_status = 500
            with pytest.raises(DependencyLost, match="as told"):
                await run.ask(9)


async def test_seeds_and_log_probabilities_pass_the_router_as_they_are(router: RouterProcess, tmp_path: Path) -> None:
    """Also the greatest seed, a number that needs all its digits, and one that JSON does not have."""
    async with fake_engines(2) as engines, routed(tmp_path, router, [e.url for e in engines]) as run, kept(run.routing):
        for told in (-0.12345678901234567, -1e-300, math.nan):
            engines[0].logprob = engines[1].logprob = told
            generation = await run.client.generate(
                [1, 2], max_tokens=1, temperature=1.0, seed=2**63 - 1, deadline_s=60, ignore_eos=True
            )
            assert repr(generation.logprobs) == repr([told])
        assert engines[0].seeds + engines[1].seeds == [2**63 - 1] * 3


async def test_a_reply_that_breaks_off_is_asked_for_again(router: RouterProcess, tmp_path: Path) -> None:
    async with fake_engines(2) as engines, routed(tmp_path, router, [e.url for e in engines], patience_s=0) as run:
        engines[1].cuts_replies = True
        async with kept(run.routing):
            assert await asyncio.gather(*(run.ask(seed) for seed in range(8))) == [(s, 0) for s in range(8)]
        assert engines[1].seeds != []
        assert run.num_told == dict.fromkeys(range(8), 1)


async def test_where_all_are_suspect_the_last_stays_and_nobody_gets_an_instant_500(
    router: RouterProcess, tmp_path: Path
) -> None:
    """Scenario: one engine after the other stops answering probes. Result: the second stays until the first is back."""
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines], probe_deadline_s=0.4) as run,
        kept(run.routing),
    ):
        engines[0].answer_s = 3600.0
        await run.until(lambda: not run.routing.workers[0].is_routed)
        engines[1].answer_s = 3600.0
        await run.until(lambda: run.standing(1) == "suspect")
        assert [worker.is_routed for worker in run.routing.workers] == [False, True]
        assert await run.ask(5) == (5, 0)
        engines[0].answer_s = 0.0
        await run.until(lambda: [worker.is_routed for worker in run.routing.workers] == [True, False])


async def test_where_the_last_one_dies_a_suspect_is_taken_back_and_requests_wait_for_it(
    router: RouterProcess, tmp_path: Path
) -> None:
    async with (
        fake_engines(2) as engines,
        routed(tmp_path, router, [e.url for e in engines], probe_deadline_s=0.4) as run,
        kept(run.routing),
    ):
        engines[0].answer_s = 0.6
        await run.until(lambda: not run.routing.workers[0].is_routed)
        await engines[1].stop()
        assert await run.ask(5) == (5, 0)
        assert run.standing(0) == "suspect"
        await engines[0].stop()
        await run.until(lambda: run.standing(0) == "dead")
        with pytest.raises(DeadlineExceeded):
            await run.ask(6, deadline_s=1)
        waiting = asyncio.create_task(run.ask(8))
        await asyncio.sleep(0.5)
        engines[0].answer_s = 0.0
        await engines[0].start_anew()
        assert await waiting == (8, 0)


# ---------------------------------------------------------------------------------------------------------------------
# The router itself


async def test_a_killed_router_is_filled_again_and_no_request_is_lost_or_answered_twice(tmp_path: Path) -> None:
    """Scenario: SIGKILL to the router with 40 requests under way; it is started anew, and empty."""
    with router_process(tmp_path) as router:
        async with (
            fake_engines(2) as engines,
            routed(tmp_path / "run", router, [e.url for e in engines]) as run,
            kept(run.routing),
        ):
            engines[0].turn_s = engines[1].turn_s = 0.5
            asked = [asyncio.create_task(run.ask(seed)) for seed in range(40)]
            await run.until(lambda: len(engines[0].seeds) + len(engines[1].seeds) == 40)
            router.kill()
            await run.until(lambda: not run.routing.snapshot()["router_up"])
            router.start()
            assert await asyncio.gather(*asked) == [(seed, 0) for seed in range(40)]
            assert run.num_told == dict.fromkeys(range(40), 1)
            assert engines[0].num_cancelled + engines[1].num_cancelled == 40  # what nobody waits for stops
            assert run.events("router_lost", "router_up", "engine_left") == [
                ("router_up", ""),
                ("router_lost", ""),
                ("router_up", ""),
            ]
            counts = run.routing.take_counts()
            assert counts["rollout/engines_routed"] == 2 and counts["rollout/engines_left"] == 0
            assert counts["rollout/requests_resent"] >= 40
            assert run.routing.take_counts()["rollout/requests_resent"] == 0


async def test_with_a_token_the_router_itself_refuses_whoever_does_not_show_it(tmp_path: Path) -> None:
    """Scenario: the router is started before its guard. Result: it waits for it, and asks it about every caller."""
    token = Token("the-token-of-this-run-0123456789")
    with PortReservation(["router", "metrics", "guard"]) as reserved:
        ports = reserved.ports
        guard_url = f"http://127.0.0.1:{ports['guard']}"
        router = RouterProcess(ports["router"], ports["metrics"], tmp_path / "router.log", guard_url=guard_url)
        router.start()
        try:
            async with (
                fake_engines(2) as engines,
                routed(
                    tmp_path / "run", router, [e.url for e in engines], token=token, guard_port=ports["guard"]
                ) as run,
                aiohttp.ClientSession() as stranger,
            ):
                await asyncio.to_thread(router.wait_up)
                async with kept(run.routing):
                    assert await run.ask(3) == (3, 0)
                    for headers in ({}, {"Authorization": "Bearer a-guess-of-32-characters-or-more"}):
                        for method, path in (
                            ("GET", "/list_workers"),
                            ("POST", "/add_worker?url=http://127.0.0.1:9"),
                            ("POST", f"/remove_worker?url={engines[0].url}"),
                            ("POST", "/pause"),
                            ("POST", "/flush_cache"),
                            ("POST", "/inference/v1/generate"),
                        ):
                            async with stranger.request(
                                method, router.url + path, json={"token_ids": [1]}, headers=headers
                            ) as reply:
                                assert reply.status == 401, path
                    assert "/pause" not in engines[0].paths + engines[1].paths
                    assert {engine.headers.get("Authorization") for engine in engines if engine.seeds} == {
                        token.header()
                    }
                    assert await run.ask(4) == (4, 0)
        finally:
            router.kill()
