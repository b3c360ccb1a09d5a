"""vLLM's real server, started by our command, through the same client and the same judge as the local engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.config.context import RunContext
from services.config.schema import Config
from services.inference.client import Asleep, EngineClient, Generation
from services.model.tiny import EOS_ID
from services.runtime.auth import Token, make_secrets, read_token
from services.runtime.guard import descendants
from services.wire.errors import ContractError, DependencyLost
from tests.engines import (
    PROMPT,
    client_of,
    generation_across_update,
    largest_difference,
    make_snapshot,
    tokens_flow,
    vllm_engine,
)
from tests.spies import listening

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("snapshots")
    return [make_snapshot(folder / f"v{seed:06d}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "token"
    make_secrets(str(path))
    return path


@pytest.fixture(scope="module")
def token(token_file: Path) -> Token:
    """What the server asks for."""
    return read_token(token_file)


@pytest.fixture(scope="module")
def engine_url(snapshots: list[Path], token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vllm")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    config = Config.model_validate(
        {
            "model": {"path": str(snapshots[0])},
            "algorithm": {"type": "grpo"},
            "env": [{"type": "add"}],
            "inference": {"engine": "vllm", "max_num_seqs": 32},
        }
    )
    context = RunContext(
        run_id="test",
        epoch=0,
        dir=str(folder),
        model_dir=str(snapshots[0]),
        inference_urls=[f"http://127.0.0.1:{port}"],
        policy_url="",
        orchestrator_url="",
        policy_grid_url="",
        token_file=str(token_file),
    )
    with vllm_engine(config, context, folder / "vllm.log") as url:
        try:
            asyncio.run(wait_ready(url, read_token(token_file)))
        except BaseException:
            print((folder / "vllm.log").read_text()[-8000:])
            raise
        yield url


async def wait_ready(url: str, token: Token) -> None:
    client = client_of(url, token=token)
    await client.wait_ready(300)
    await client.close()


@pytest.fixture
async def client(engine_url: str, token: Token, snapshots: list[Path]) -> AsyncIterator[EngineClient]:
    """A client of the engine, brought back to version 0."""
    client = client_of(engine_url, token=token)
    await client.update_weights(snapshots[0], 0, deadline_s=60)
    yield client
    await client.close()


async def sample(client: EngineClient, prompt: list[int] = PROMPT, **kwargs: Any) -> Generation:
    defaults: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 0, "deadline_s": 120, "ignore_eos": True}
    return await client.generate(prompt, **(defaults | kwargs))


async def test_log_probabilities_are_those_of_a_full_forward(client: EngineClient, snapshots: list[Path]) -> None:
    """At the sampling temperature, which is 0.6 for half of the requests."""
    temperatures = [1.0, 0.6] * 8
    generations = await asyncio.gather(*[sample(client, seed=i, temperature=t) for i, t in enumerate(temperatures)])
    for temperature, generation in zip(temperatures, generations, strict=True):
        assert [tuple(span) for span in generation.spans] == [(0, 24, 0)]
        assert largest_difference(snapshots[0], PROMPT, generation, 0, 24, temperature) < TOLERANCE


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(client: EngineClient) -> None:
    alone = await sample(client, seed=7)
    crowd = await asyncio.gather(*[sample(client, seed=i) for i in range(20)])
    assert crowd[7].token_ids == alone.token_ids


async def test_the_end_token_ends_a_generation_and_is_kept_once(client: EngineClient) -> None:
    generations = await asyncio.gather(*[sample(client, seed=i, max_tokens=200, ignore_eos=False) for i in range(24)])
    ended = [g for g in generations if g.finish_reason == "stop"]
    assert ended
    assert all(g.token_ids[-1] == EOS_ID and g.token_ids.count(EOS_ID) == 1 for g in ended)


async def test_an_over_long_prompt_is_refused(client: EngineClient) -> None:
    with pytest.raises(ContractError, match="400"):
        await sample(client, [9] * 512)


async def test_each_span_around_an_update_in_flight_matches_its_own_snapshot(
    client: EngineClient, snapshots: list[Path]
) -> None:
    generation = await generation_across_update(client, snapshots[1], 1, num_tokens=450)
    (_, boundary, old), (start, end, new) = generation.spans
    assert (old, new, start, end) == (0, 1, boundary, 450)
    assert largest_difference(snapshots[0], PROMPT, generation, 0, boundary) < TOLERANCE
    assert largest_difference(snapshots[1], PROMPT, generation, boundary, 450) < TOLERANCE


async def test_an_abort_with_continuation_has_an_exact_boundary(client: EngineClient, snapshots: list[Path]) -> None:
    """The way of an engine that cannot tell versions, tried on one that can."""
    client._tells_versions = False
    generation = await generation_across_update(client, snapshots[1], 1, num_tokens=450)
    (_, boundary, old), (_, end, new) = generation.spans
    assert (old, new, end) == (0, 1, 450)
    assert largest_difference(snapshots[0], PROMPT, generation, 0, boundary) < TOLERANCE
    assert largest_difference(snapshots[1], PROMPT, generation, boundary, 450) < TOLERANCE


@pytest.mark.parametrize("tells_versions", [True, False])
async def test_a_sleep_leaves_weights_and_answers_as_they_were_and_requests_go_on_from_their_tokens(
    client: EngineClient, snapshots: list[Path], tells_versions: bool
) -> None:
    """Requests in flight, one that comes meanwhile, and an update that has to wait; twice in turn."""
    client._tells_versions = tells_versions
    greedy = await sample(client, temperature=0.0)
    for turn in range(2):
        running = [asyncio.create_task(sample(client, seed=10 * turn + i, max_tokens=400)) for i in range(4)]
        await tokens_flow(client)
        await client.sleep(deadline_s=60)
        assert json.loads(await client.request("GET", "/is_sleeping")) == {"is_sleeping": True}
        assert await client.request("GET", "/health") == b""
        running.append(asyncio.create_task(sample(client)))
        with pytest.raises(Asleep, match="sleeps"):
            await client.update_weights(snapshots[1], 1, deadline_s=60)
        await asyncio.sleep(0.3)
        assert not running[-1].done()
        await client.wake_up(deadline_s=60)
        assert json.loads(await client.request("GET", "/is_sleeping")) == {"is_sleeping": False}
        generations = await asyncio.gather(*running)
        assert [len(generation.token_ids) for generation in generations] == [400] * 4 + [24]
        for generation in generations:
            num_tokens = len(generation.token_ids)
            assert [tuple(span) for span in generation.spans] == [(0, num_tokens, 0)]
            assert largest_difference(snapshots[0], PROMPT, generation, 0, num_tokens) < TOLERANCE
        assert (await sample(client, temperature=0.0)).token_ids == greedy.token_ids


async def test_the_checksum_is_that_of_the_weights_it_samples_from(client: EngineClient, snapshots: list[Path]) -> None:
    """One worker, so one sum; another with another snapshot, and the first again with the first."""
    sums = [await client._sum_weights()]
    for version in (1, 0):
        await client.update_weights(snapshots[version], version, deadline_s=60)
        sums.append(await client._sum_weights())
    assert [len(one) for one in sums] == [1, 1, 1]
    assert sums[0] == sums[2] != sums[1]


@pytest.mark.parametrize("what", ["missing tensor", "not finite"])
async def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_replaced(
    client: EngineClient, snapshots: list[Path], tmp_path: Path, what: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(snapshots[1], bad)
    tensors = load_file(bad / "model.safetensors")
    if what == "missing tensor":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], math.nan)
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DependencyLost):
        await client.update_weights(bad, 1, deadline_s=60)
    generation = await sample(client)
    assert [tuple(span) for span in generation.spans] == [(0, 24, 0)]
    assert largest_difference(snapshots[0], PROMPT, generation, 0, 24) < TOLERANCE


def test_without_the_token_vllm_answers_its_health_route_alone(engine_url: str, token: Token) -> None:
    """Scenario: every route that its own description names, and some that it does not. Result: 401, unread."""
    address = urlsplit(engine_url)

    def ask(method: str, path: str, header: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
        try:
            connection.request(method, path, headers={"Authorization": header} if header else {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    status, body = ask("GET", "/openapi.json", token.header())
    assert status == 200
    routes = [(method.upper(), path) for path, methods in json.loads(body)["paths"].items() for method in methods]
    routes += [
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/nothing"),
        ("GET", "//health"),
    ]
    assert {path for _, path in routes} >= {"/pause", "/resume", "/collective_rpc", "/v1/completions", "/v1/models"}
    for method, path in routes:
        for header in (None, token.header()[:-1], "Bearer "):
            status = ask(method, path, header)[0]
            assert status == (200 if path == "/health" else 401), (method, path)
    assert ask("GET", "/v1/models", token.header())[0] == 200


def test_vllm_and_its_workers_listen_on_loopback_alone(engine_url: str) -> None:
    sockets = list(listening(descendants(os.getpid())))
    assert urlsplit(engine_url).port in {socket.port for socket in sockets}
    assert {socket.address for socket in sockets} == {"127.0.0.1"}
