"""The local engine as a process, through its client: what it says about a token is what a full forward says."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.config.context import RunContext
from services.config.schema import Config, to_toml
from services.inference.client import EngineClient, Generation
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_logits
from services.model.tiny import EOS_ID
from services.wire.errors import ContractError, DeadlineExceeded, DependencyLost
from tests.engines import (
    MAX_MODEL_LEN,
    PROMPT,
    client_of,
    full_logprobs,
    generation_across_update,
    largest_difference,
    local_engine,
    make_snapshot,
    tokens_flow,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("snapshots")
    return [make_snapshot(folder / f"v{seed:06d}", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def engine_url(snapshots: list[Path]) -> Iterator[str]:
    with local_engine(snapshots[0], "--max-num-seqs", "16", "--max-model-len", str(MAX_MODEL_LEN)) as url:
        yield url


@pytest.fixture(scope="module")
def versionless_url(snapshots: list[Path]) -> Iterator[str]:
    with local_engine(snapshots[0], "--no-weight-versions") as url:
        yield url


@pytest.fixture
async def client(engine_url: str, snapshots: list[Path]) -> AsyncIterator[EngineClient]:
    """A client of the engine, brought back to version 0."""
    client = client_of(engine_url)
    await client.wait_ready(30)
    if client.version != 0:
        await client.update_weights(snapshots[0], 0, deadline_s=30)
    yield client
    await client.close()


async def sample(client: EngineClient, prompt: list[int] = PROMPT, **kwargs: Any) -> Generation:
    defaults: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 0, "deadline_s": 60, "ignore_eos": True}
    return await client.generate(prompt, **(defaults | kwargs))


def prompts_of_many_lengths(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 261, size=length).tolist() for length in rng.integers(1, 200, size=count)]


async def test_log_probabilities_are_those_of_a_full_forward(client: EngineClient, snapshots: list[Path]) -> None:
    """Prompts of many lengths, batched and re-slotted, at the version the spans name."""
    prompts = prompts_of_many_lengths(40)
    generations = await asyncio.gather(*[sample(client, p, seed=i, max_tokens=8 + i) for i, p in enumerate(prompts)])
    for i, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        assert [tuple(span) for span in generation.spans] == [(0, 8 + i, 0)]
        assert generation.finish_reason == "length"
        assert largest_difference(snapshots[0], prompt, generation, 0, 8 + i) < TOLERANCE


async def test_log_probabilities_are_those_of_the_sampling_temperature(
    client: EngineClient, snapshots: list[Path]
) -> None:
    generation = await sample(client, temperature=0.6)
    assert largest_difference(snapshots[0], PROMPT, generation, 0, 24, temperature=0.6) < TOLERANCE
    assert largest_difference(snapshots[0], PROMPT, generation, 0, 24, temperature=1.0) > 100 * TOLERANCE


async def test_greedy_takes_the_most_likely_token_whatever_the_seed(
    client: EngineClient, snapshots: list[Path]
) -> None:
    first, second = await asyncio.gather(sample(client, temperature=0.0), sample(client, temperature=0.0, seed=9))
    assert first.token_ids == second.token_ids
    for n in (1, 5, 24):
        alternatives = [
            full_logprobs(snapshots[0], PROMPT + first.token_ids[: n - 1] + [token])[-1] for token in range(0, 261, 10)
        ]
        assert first.logprobs[n - 1] >= max(alternatives) - TOLERANCE
    assert largest_difference(snapshots[0], PROMPT, first, 0, 24) < TOLERANCE


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(client: EngineClient) -> None:
    alone = await sample(client, seed=7, max_tokens=60)
    crowd = await asyncio.gather(
        *[sample(client, p, seed=i, max_tokens=60) for i, p in enumerate(prompts_of_many_lengths(30))],
        sample(client, seed=7, max_tokens=60),
    )
    assert crowd[-1].token_ids == alone.token_ids
    assert np.allclose(crowd[-1].logprobs, alone.logprobs, atol=1e-5)
    assert (await sample(client, seed=8, max_tokens=60)).token_ids != alone.token_ids


async def test_the_end_token_ends_a_generation_and_is_kept_once(client: EngineClient) -> None:
    """Some of many seeds draw the end token early; it is the last token and appears nowhere else."""
    generations = await asyncio.gather(*[sample(client, seed=i, max_tokens=300, ignore_eos=False) for i in range(40)])
    ended = [g for g in generations if g.finish_reason == "stop"]
    assert ended
    assert all(g.token_ids[-1] == EOS_ID and g.token_ids.count(EOS_ID) == 1 for g in ended)
    assert all(EOS_ID not in g.token_ids for g in generations if g.finish_reason == "length")
    assert all(len(g.logprobs) == len(g.token_ids) for g in generations)


async def test_generation_stops_at_the_models_length(client: EngineClient) -> None:
    generation = await sample(client, [9] * (MAX_MODEL_LEN - 3), max_tokens=50)
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


async def test_an_over_long_prompt_is_refused_naming_the_limit(client: EngineClient) -> None:
    """Never truncated: a shifted prompt would be trained as if it were the real one."""
    with pytest.raises(ContractError, match=f"400.*{MAX_MODEL_LEN}"):
        await sample(client, [9] * MAX_MODEL_LEN)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": []},
        {"token_ids": [261]},
        {"token_ids": [-1]},
        {"token_ids": ["5"]},
        {"sampling_params": {"top_p": 0.5}},
        {"sampling_params": {"repetition_penalty": 2.0}},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"max_tokens": 0}},
    ],
)
async def test_what_cannot_be_honoured_is_refused(engine_url: str, change: dict) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}} | change
        async with session.post(f"{engine_url}/inference/v1/generate", json=body) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["message"]


async def test_200_requests_at_once_all_finish(client: EngineClient, engine_url: str) -> None:
    """Far more than slots: they queue, share forwards, and none is lost."""
    before = read_status(engine_url)
    generations = await asyncio.gather(*[sample(client, seed=i, max_tokens=6) for i in range(200)])
    after = read_status(engine_url)
    assert [len(g.token_ids) for g in generations] == [6] * 200
    assert after["sampled_tokens"] - before["sampled_tokens"] == 1200
    assert after["prefills"] - before["prefills"] < 200
    assert after["decodes"] - before["decodes"] < 500
    assert (after["running"], after["waiting"]) == (0, 0)


async def test_each_span_around_an_update_in_flight_matches_its_own_snapshot(
    client: EngineClient, snapshots: list[Path]
) -> None:
    """The cache is recomputed: after the update every token is exactly what the new weights alone would say."""
    generation = await generation_across_update(client, snapshots[1], 1, num_tokens=450)
    (_, boundary, old), (start, end, new) = generation.spans
    assert (old, new, start, end) == (0, 1, boundary, 450)
    assert largest_difference(snapshots[0], PROMPT, generation, 0, boundary) < TOLERANCE
    assert largest_difference(snapshots[1], PROMPT, generation, boundary, 450) < TOLERANCE
    assert client.version == 1


async def test_an_update_that_keeps_the_cache_goes_on_from_the_old_keys(engine_url: str, snapshots: list[Path]) -> None:
    """The first token after the boundary reads old keys and values: it differs from a forward of the new weights."""
    client = client_of(engine_url, clear_cache=False)
    await client.update_weights(snapshots[0], 0, deadline_s=30)
    generation = await generation_across_update(client, snapshots[1], 1, num_tokens=450)
    (_, boundary, old), (_, _, new) = generation.spans
    await client.close()
    assert (old, new) == (0, 1)
    assert largest_difference(snapshots[0], PROMPT, generation, 0, boundary) < TOLERANCE
    assert largest_difference(snapshots[1], PROMPT, generation, boundary, boundary + 20) > 100 * TOLERANCE


async def test_two_updates_in_one_batch_label_every_token(client: EngineClient, snapshots: list[Path]) -> None:
    """More requests than slots, so some start after each update; all spans match their snapshots."""
    running = [asyncio.create_task(sample(client, seed=i, max_tokens=150)) for i in range(24)]
    for version in (1, 2):
        await tokens_flow(client)
        await client.update_weights(snapshots[version], version, deadline_s=30)
    versions = set()
    for generation in await asyncio.gather(*running):
        for start, end, version in generation.spans:
            versions.add(version)
            assert largest_difference(snapshots[version], PROMPT, generation, start, end) < TOLERANCE
    assert {0, 2} <= versions


async def test_an_engine_without_versions_is_aborted_and_continued_exactly(
    versionless_url: str, snapshots: list[Path]
) -> None:
    """The reply to an aborted request ends at the boundary; the rest is sampled by the new weights alone."""
    client = client_of(versionless_url)
    await client.wait_ready(30)
    generation = await generation_across_update(client, snapshots[1], 1, num_tokens=450)
    (first, boundary, old), (_, end, new) = generation.spans
    await client.close()
    assert (first, old, new, end, len(generation.token_ids)) == (0, 0, 1, 450, 450)
    assert largest_difference(snapshots[0], PROMPT, generation, 0, boundary) < TOLERANCE
    assert largest_difference(snapshots[1], PROMPT, generation, boundary, 450) < TOLERANCE


async def test_requests_sent_during_an_aborting_update_carry_the_new_version(
    versionless_url: str, snapshots: list[Path]
) -> None:
    client = client_of(versionless_url)
    await client.update_weights(snapshots[0], 0, deadline_s=30)
    running = [asyncio.create_task(sample(client, seed=i, max_tokens=100)) for i in range(40)]
    await tokens_flow(client)
    update = asyncio.create_task(client.update_weights(snapshots[1], 1, deadline_s=30))
    await asyncio.sleep(0)
    late = [asyncio.create_task(sample(client, seed=100 + i, max_tokens=5)) for i in range(10)]
    await update
    for generation in await asyncio.gather(*running, *late):
        for start, end, version in generation.spans:
            assert largest_difference(snapshots[version], PROMPT, generation, start, end) < TOLERANCE
    await client.close()


def broken_copy(source: Path, target: Path, what: str) -> Path:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match what:
        case "missing tensor":
            del tensors[name]
        case "unknown tensor":
            tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
        case "wrong shape":
            tensors[name] = tensors[name][:-1].contiguous()
        case "not finite":
            tensors[name][0, 0] = math.nan
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    if what == "torn file":
        os.truncate(target / "model.safetensors", 100_000)
    return target


@pytest.mark.parametrize(
    "what", ["missing tensor", "unknown tensor", "wrong shape", "not finite", "torn file", "no folder"]
)
async def test_a_failed_update_leaves_the_old_weights_served(
    client: EngineClient, engine_url: str, snapshots: list[Path], tmp_path: Path, what: str
) -> None:
    """The error says what is wrong at once, sampling goes on under the old version, and the next update works."""
    bad = tmp_path / "missing" if what == "no folder" else broken_copy(snapshots[1], tmp_path / "bad", what)
    running = asyncio.create_task(sample(client, max_tokens=200))
    started = time.monotonic()
    with pytest.raises(DependencyLost, match=r"500.*snapshot"):
        await client.update_weights(bad, 1, deadline_s=30)
    assert time.monotonic() - started < 15
    generation = await running
    assert [tuple(span) for span in generation.spans] == [(0, 200, 0)]
    assert largest_difference(snapshots[0], PROMPT, generation, 0, 200) < TOLERANCE
    assert client.version == 0
    assert read_status(engine_url)["state"] != "paused"
    await client.update_weights(snapshots[2], 2, deadline_s=30)
    assert [span.version for span in (await sample(client)).spans] == [2]


async def test_a_missed_deadline_frees_the_slot(client: EngineClient, engine_url: str) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="generation"):
        await sample(client, max_tokens=500, deadline_s=0.05)
    assert time.monotonic() - started < 5
    for _ in range(50):
        if read_status(engine_url)["running"] == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the request of a caller that went away still holds its slot")


async def test_a_waiting_pause_lets_running_requests_end_and_holds_new_ones(
    client: EngineClient, engine_url: str
) -> None:
    running = asyncio.create_task(sample(client, max_tokens=100))
    await tokens_flow(client)
    async with aiohttp.ClientSession() as session:
        await (await session.post(f"{engine_url}/pause?mode=wait")).read()
        assert (await asyncio.wait_for(running, 5)).finish_reason == "length"
        held = asyncio.create_task(sample(client, max_tokens=3))
        await asyncio.sleep(0.2)
        assert not held.done()
        assert (await (await session.get(f"{engine_url}/is_paused")).json()) == {"is_paused": True}
        await (await session.post(f"{engine_url}/resume")).read()
        assert len((await held).token_ids) == 3


async def test_completions_answer_for_many_prompts(client: EngineClient, engine_url: str) -> None:
    body = {"model": "policy", "prompt": [PROMPT, PROMPT[:2]], "max_tokens": 4, "temperature": 0, "logprobs": 0}
    async with aiohttp.ClientSession() as session:
        reply = await session.post(
            f"{engine_url}/v1/completions", json=body | {"return_token_ids": True, "ignore_eos": True}
        )
        choices = (await reply.json())["choices"]
    greedy = await sample(client, temperature=0.0, max_tokens=4)
    assert choices[0]["token_ids"] == greedy.token_ids
    assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx(greedy.logprobs, abs=1e-5)
    assert choices[1]["prompt_token_ids"] == PROMPT[:2]


def test_models_and_metrics_are_told(engine_url: str) -> None:
    models = json.loads(urllib.request.urlopen(f"{engine_url}/v1/models", timeout=10).read())
    assert models["data"][0] == {"id": "policy", "object": "model", "max_model_len": MAX_MODEL_LEN}
    metrics = urllib.request.urlopen(f"{engine_url}/metrics", timeout=10).read().decode()
    assert "counterpoint_inference_sampled_tokens_total" in metrics


def run_directory(folder: Path, model_dir: Path) -> tuple[Path, str]:
    """What a launcher would have written for an engine with random weights, and the engine's URL."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    config = Config.model_validate(
        {
            "seed": 4,
            "model": {"path": f"dummy:{model_dir}"},
            "algorithm": {"type": "grpo"},
            "env": [{"type": "add"}],
            "inference": {"max_model_len": 64},
        }
    )
    context = RunContext(
        run_id="test",
        epoch=0,
        dir=str(folder),
        model_dir=str(model_dir),
        model_init="random",
        inference_urls=[url],
        policy_url="",
        orchestrator_url="",
        policy_grid_url="",
    )
    (folder / "config.resolved.toml").write_text(to_toml(config))
    (folder / "run.json").write_text(context.model_dump_json())
    return folder, url


async def test_a_run_directory_is_all_the_process_needs_and_a_signal_ends_it(
    snapshots: list[Path], tmp_path: Path
) -> None:
    """Random weights are those the trainer makes from the same seed; SIGTERM ends even a busy engine with 0."""
    folder, url = run_directory(tmp_path, snapshots[0])
    argv = [sys.executable, "-m", "services.inference.local_server", "--run", str(folder)]
    process = subprocess.Popen(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    client = client_of(url)
    await client.wait_ready(90)
    generation = await sample(client, max_tokens=20)
    with torch.inference_mode():
        model = load_causal_lm(snapshots[0], init="random", seed=4)
        ids = torch.tensor(PROMPT + generation.token_ids)
        layout = PackedLayout.of([len(ids)])
        logits = packed_logits(model, ids, layout, torch.arange(len(PROMPT) - 1, len(ids) - 1))
        own = torch.log_softmax(logits, -1).gather(1, ids[len(PROMPT) :, None])[:, 0]
    assert np.abs(np.array(generation.logprobs) - own.numpy()).max() < TOLERANCE
    process.send_signal(signal.SIGTERM)
    await client.close()
    assert process.wait(timeout=30) == 0


def read_status(url: str) -> dict:
    return json.loads(urllib.request.urlopen(f"{url}/status", timeout=10).read())
