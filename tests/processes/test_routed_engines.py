"""Two local engines behind the real router and guard: generation across updates, and an engine that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from services.inference.client import EngineClient, Generation
from services.model.tiny import EOS_ID
from services.runtime.ports import PortReservation
from tests.engines import MAX_MODEL_LEN, PROMPT, largest_difference, make_snapshot
from tests.routers import Routed, RouterProcess, kept, routed, router_process
from tests.runs import ROOT


@dataclass
class EngineProcess:
    """A local engine at a fixed port, so that it can be killed and started again."""

    model_dir: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = [sys.executable, "-m", "services.inference.local_server", "--model", str(self.model_dir)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*argv, "--port", str(self.port), "--max-num-seqs", "16"], cwd=ROOT, env=env, stdout=subprocess.DEVNULL
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    async def num_requests(self) -> int:
        client = EngineClient(self.url, eos_token_id=EOS_ID, clear_cache=True)
        status = msgspec.json.decode(await client.request("GET", "/status"))
        await client.close()
        return status["requests"]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions 0 (what the engines start with), 1 and 2."""
    folder = tmp_path_factory.mktemp("weights")
    return [make_snapshot(folder / f"v{version:06d}", seed=version) for version in range(3)]


@pytest.fixture(scope="module")
def engines(snapshots: list[Path]) -> Iterator[list[EngineProcess]]:
    with PortReservation(["engine_0", "engine_1"]) as reserved, ExitStack() as stack:
        engines = [EngineProcess(snapshots[0], port) for port in reserved.ports.values()]
        for engine in engines:
            stack.callback(engine.kill)
            engine.start()
        yield engines


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with router_process(tmp_path_factory.mktemp("router")) as process:
        yield process


@pytest.fixture
async def run(
    router: RouterProcess, engines: list[EngineProcess], snapshots: list[Path], tmp_path: Path
) -> AsyncIterator[Routed]:
    urls = [engine.url for engine in engines]
    async with (
        routed(tmp_path, router, urls, max_model_len=MAX_MODEL_LEN, eos=EOS_ID) as run,
        kept(run.routing, first=snapshots[0]),
    ):
        yield run


async def generate(run: Routed, seed: int, num_tokens: int) -> Generation:
    return await run.client.generate(
        PROMPT, max_tokens=num_tokens, temperature=1.0, seed=seed, deadline_s=120, ignore_eos=True
    )


def check_spans(generation: Generation, snapshots: list[Path]) -> None:
    """Each token's log-probability is what the snapshot of its version says."""
    for span in generation.spans:
        assert largest_difference(snapshots[span.version], PROMPT, generation, span.start, span.end) < 1e-4


async def test_requests_in_flight_across_an_update_say_which_weights_sampled_each_token(
    run: Routed, engines: list[EngineProcess], snapshots: list[Path]
) -> None:
    """Scenario: 12 long generations while both engines are brought version 1, each for itself.

    Result: every one ends whole; some hold tokens of both versions; what came later is of version 1 alone.
    """
    before = [await engine.num_requests() for engine in engines]
    for num_tokens in (250, 450):
        asked = [asyncio.create_task(generate(run, seed, num_tokens)) for seed in range(12)]
        await generate(run, 99, 8)
        await run.routing.update_weights(snapshots[1], 1, deadline_s=60)
        generations = await asyncio.gather(*asked)
        assert all(len(generation.token_ids) == num_tokens for generation in generations)
        if any(len(generation.spans) > 1 for generation in generations):
            break
        await run.routing.update_weights(snapshots[0], 0, deadline_s=60)
    assert any([span.version for span in generation.spans] == [0, 1] for generation in generations)
    for generation in generations[:4]:
        check_spans(generation, snapshots)
    after = [await engine.num_requests() for engine in engines]
    assert all(more > less for less, more in zip(before, after, strict=True))
    assert {span.version for span in (await generate(run, 50, 8)).spans} == {1}


async def test_a_killed_engines_requests_end_elsewhere_and_it_returns_with_the_current_weights(
    run: Routed, engines: list[EngineProcess], snapshots: list[Path]
) -> None:
    """Scenario: SIGKILL under 12 requests; it is started again, with the weights that runs begin with."""
    await run.routing.update_weights(snapshots[2], 2, deadline_s=60)
    asked = [asyncio.create_task(generate(run, seed, 300)) for seed in range(12)]
    await generate(run, 99, 8)
    engines[1].kill()
    generations = await asyncio.gather(*asked)
    assert all(len(generation.token_ids) == 300 for generation in generations)
    same = [await generate(run, seed, 300) for seed in (0, 1)]  # what was asked again was sampled again, not added to
    assert [again.token_ids for again in same] == [first.token_ids for first in generations[:2]]
    await run.until(lambda: not run.routing.workers[1].is_routed)
    engines[1].start()
    await run.until(lambda: run.routing.workers[1].is_routed, deadline_s=120)
    assert [worker.engine.version for worker in run.routing.workers] == [2, 2]
    generations = []
    async with asyncio.timeout(60):
        while not await engines[1].num_requests():
            generations += await asyncio.gather(*(generate(run, seed, 20) for seed in range(20, 24)))
    for generation in generations[-4:]:
        assert [span.version for span in generation.spans] == [2]
        check_spans(generation, snapshots)
