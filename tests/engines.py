"""Engines as child processes, snapshots to feed them, and the full forward they are judged by.

Notable:
- The same cases run against the local engine and vLLM: they speak to both through `EngineClient` alone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.config.context import RunContext
from services.config.schema import Config
from services.inference.client import EngineClient, Generation
from services.inference.vllm_command import PROJECT_ROOT, vllm_command
from services.model.tiny import EOS_ID, byte_tokenizer, tiny_config
from services.runtime.auth import Token

MAX_MODEL_LEN = 512
PROMPT = [14, 28, 15, 33]


def make_snapshot(folder: Path, seed: int) -> Path:
    """A random tiny model whose distributions are far from flat, saved as transformers saves it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def _reference_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def full_logprobs(folder: Path, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probability of each token under a plain forward with transformers' own attention, [T - 1]."""
    model = _reference_model(folder)
    ids = torch.tensor(token_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, ids[1:, None])[:, 0].numpy()


def largest_difference(
    folder: Path, prompt: list[int], generation: Generation, start: int, end: int, temperature: float = 1.0
) -> float:
    """Between the log-probabilities told for sampled tokens [start, end) and the full forward's."""
    own = full_logprobs(folder, prompt + generation.token_ids[:end], temperature)[-(end - start) :]
    return float(np.abs(np.array(generation.logprobs[start:end]) - own).max())


@contextmanager
def local_engine(model_dir: Path, *args: str) -> Iterator[str]:
    """A local engine's URL while it runs."""
    argv = [sys.executable, "-m", "services.inference.local_server", "--model", str(model_dir), *args]
    process = subprocess.Popen(
        argv, cwd=PROJECT_ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        yield _announced_url(process, deadline_s=90)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()
    assert code == 0


def _announced_url(process: subprocess.Popen[str], deadline_s: float) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(deadline_s), "the engine did not come up"
    line = process.stdout.readline()
    assert line.startswith("listening on "), f"the engine ended: {process.poll()}"
    return line.split()[-1]


@contextmanager
def vllm_engine(config: Config, context: RunContext, log: Path) -> Iterator[str]:
    """A vLLM server's URL while it runs; its whole process group ends with the context."""
    port = int(context.inference_urls[0].rsplit(":", 1)[1])
    argv, environment = vllm_command(config, context, port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield context.inference_urls[0]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        ends = time.monotonic() + 15
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def client_of(url: str, *, clear_cache: bool = True, token: Token | None = None) -> EngineClient:
    """A client for the tiny model."""
    return EngineClient(url, eos_token_id=EOS_ID, clear_cache=clear_cache, token=token)


async def tokens_flow(client: EngineClient) -> None:
    """Return when a few tokens have been sampled for every request sent before that fits the engine."""
    await client.generate(PROMPT, max_tokens=12, temperature=1.0, seed=0, deadline_s=120, ignore_eos=True)


async def generation_across_update(
    client: EngineClient, snapshot: Path, version: int, *, num_tokens: int, seed: int = 5
) -> Generation:
    """One long generation with an update to `version` while it runs.

    On a busy machine the engine may be done before the update has reached it. What is wanted is an update in flight,
    so the engine then goes back to what it served, and the same is tried again in a crowd, which slows it down.
    """
    before, old = client.version, snapshot.with_name(f"v{client.version:06d}")
    for num_companions in (0, 7, 14):
        seeds = [seed, *range(1000, 1000 + num_companions)]
        running = [
            asyncio.create_task(
                client.generate(PROMPT, max_tokens=num_tokens, temperature=1.0, seed=s, deadline_s=120, ignore_eos=True)
            )
            for s in seeds
        ]
        await tokens_flow(client)
        await client.update_weights(snapshot, version, deadline_s=60)
        generation, *_ = await asyncio.gather(*running)
        if len(generation.spans) > 1:
            return generation
        await client.update_weights(old, before, deadline_s=60)
    raise AssertionError("every generation ended before its update")
