"""A local engine's process put to sleep and woken through its client: what requests and updates notice."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.inference.client import Asleep, EngineClient, Generation
from services.wire.errors import ContractError
from tests.engines import PROMPT, client_of, largest_difference, local_engine, make_snapshot, tokens_flow

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("snapshots")
    return [make_snapshot(folder / f"v{seed:06d}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def urls(snapshots: list[Path]) -> Iterator[dict[str, str]]:
    with local_engine(snapshots[0]) as telling, local_engine(snapshots[0], "--no-weight-versions") as versionless:
        yield {"tells versions": telling, "tells none": versionless}


@pytest.fixture(params=["tells versions", "tells none"])
async def client(urls: dict[str, str], snapshots: list[Path], request: Any) -> AsyncIterator[EngineClient]:
    """A client of an engine of each kind, brought back to version 0."""
    client = client_of(urls[request.param])
    await client.wait_ready(30)
    await client.update_weights(snapshots[0], 0, deadline_s=30)
    yield client
    await client.wake_up(deadline_s=30)
    await client.close()


async def sample(client: EngineClient, prompt: list[int] = PROMPT, **kwargs: Any) -> Generation:
    defaults: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 0, "deadline_s": 60, "ignore_eos": True}
    return await client.generate(prompt, **(defaults | kwargs))


def read(url: str, path: str) -> Any:
    return json.loads(urllib.request.urlopen(url + path, timeout=10).read())


async def test_requests_across_a_sleep_end_with_tokens_of_the_weights_that_they_name(
    client: EngineClient, snapshots: list[Path]
) -> None:
    """More requests than slots, some sent during the sleep, and an update right after it."""
    running = [asyncio.create_task(sample(client, seed=i, max_tokens=300)) for i in range(80)]
    await tokens_flow(client)
    await client.sleep(deadline_s=30)
    status = read(client.url, "/status")
    assert (status["state"], status["running"], status["waiting"]) == ("asleep", 0, 0)
    late = [asyncio.create_task(sample(client, seed=100 + i, max_tokens=5)) for i in range(4)]
    await asyncio.sleep(0.3)
    assert read(client.url, "/status")["sampled_tokens"] == status["sampled_tokens"]
    await client.wake_up(deadline_s=30)
    await client.update_weights(snapshots[1], 1, deadline_s=30)
    versions = set()
    for generation in await asyncio.gather(*running, *late):
        assert len(generation.token_ids) in (300, 5)
        for start, end, version in generation.spans:
            versions.add(version)
            assert largest_difference(snapshots[version], PROMPT, generation, start, end) < TOLERANCE
    assert versions == {0, 1}


async def test_after_many_turns_the_same_seed_draws_the_same_tokens(client: EngineClient) -> None:
    first = await sample(client, seed=5)
    for _ in range(3):
        await client.sleep(deadline_s=30)
        await client.wake_up(deadline_s=30)
    again = await sample(client, seed=5)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)


async def test_asleep_it_answers_what_needs_no_weights_and_refuses_what_does(
    client: EngineClient, snapshots: list[Path]
) -> None:
    await client.sleep(deadline_s=30)
    assert read(client.url, "/is_sleeping") == {"is_sleeping": True}
    assert read(client.url, "/v1/models")["data"][0]["id"] == "policy"
    assert await client.request("GET", "/health") == b""
    assert await client.read_version() == 0
    assert read(client.url, "/status")["weight_version"] == "v0"
    load = {"method": "load_snapshot", "kwargs": {"path": str(snapshots[1]), "version": "1"}}
    for path, body in (
        ("/collective_rpc", load),
        ("/collective_rpc", {"method": "weights_checksum"}),
        ("/resume", None),
    ):
        with pytest.raises(ContractError, match=r"409.*asleep"):
            await client.request("POST", path, body)
    with pytest.raises(Asleep, match="sleeps"):
        await client.update_weights(snapshots[1], 1, deadline_s=30)
    await client.wake_up(deadline_s=30)
    assert read(client.url, "/is_sleeping") == {"is_sleeping": False}


async def test_sleep_and_wake_are_said_as_vllm_says_them(urls: dict[str, str]) -> None:
    """Twice each; level 2 sleeps like level 1, and what it cannot do it names."""
    url = urls["tells versions"]
    async with aiohttp.ClientSession() as session:

        async def post(path: str) -> tuple[int, Any]:
            async with session.post(url + path) as reply:
                return reply.status, await reply.json()

        for query, word in (("level=0", "level"), ("level=3", "level"), ("mode=keep", "mode"), ("mode=wait", "mode")):
            status, body = await post(f"/sleep?{query}")
            assert status == 400
            assert word in body["error"]["message"]
        assert read(url, "/is_sleeping") == {"is_sleeping": False}
        for _ in range(2):
            assert await post("/sleep?level=2&mode=abort") == (200, {"status": "sleeping", "level": 2})
            assert read(url, "/is_sleeping") == {"is_sleeping": True}
        for _ in range(2):
            assert await post("/wake_up") == (200, {"status": "awake"})
            assert read(url, "/is_sleeping") == {"is_sleeping": False}
