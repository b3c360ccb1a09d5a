"""Who scores in `benchmarks.scoring`: one critic in this process, in the value service, and in vLLM."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch
from transformers import LlamaForCausalLM

from services.model.export import export_critic
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm
from services.model.tiny import byte_tokenizer, tiny_config
from services.packing.plan import pack
from services.runtime.ports import PortReservation
from value_service.client import AsyncValueClient
from value_service.requests import JSON

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN, VOCABULARY, FIRST_ID = 4096, 261, 5
Values = list[np.ndarray]
"""[T] a sequence: the value after each token, as everybody's head says it."""
Scoring = Callable[[], Awaitable[Values]]
Asking = Callable[[list[list[int]]], Awaitable[Values]]


# ---------------------------------------------------------------------------------------------------------------------
# The critic and the sequences


def make_critic(folder: Path) -> tuple[Path, Path, Critic]:
    """The folder that a configuration calls its model, the exported critic, and the same one in this process."""
    base = folder / "base"
    config = tiny_config()
    config.max_position_embeddings = SEQ_LEN
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    critic = Critic(load_causal_lm(base), head_init_std=0.1, seed=1)
    with torch.no_grad():
        critic.head.bias.fill_(0.25)
    state = {name: parameter.detach() for name, parameter in critic.named_parameters()}
    out = export_critic(state, base, folder / "critic", support="scalar", gamma=1.0, run="benchmark", source="seed 0")
    return base, out, critic


def sequences(num: int) -> list[list[int]]:
    """Lengths log-normal about 400 with sigma 0.8, from 16 to the context; ids uniform; seed 0."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(400), 0.8, num), 16, SEQ_LEN).astype(int)
    return [rng.integers(FIRST_ID, VOCABULARY, length).tolist() for length in lengths]


# ---------------------------------------------------------------------------------------------------------------------
# In process


def bare_forward(critic: Critic, batch: list[list[int]]) -> Scoring:
    """The service's packing and forward, without queue, HTTP or codec."""
    lengths = [len(ids) for ids in batch]

    @torch.no_grad()
    def run() -> Values:
        found: dict[int, np.ndarray] = {}
        for own in pack(lengths, seq_len=SEQ_LEN, num_data_ranks=1)[0]:
            layout = PackedLayout.of([lengths[i] for i in own])
            output = critic(torch.tensor([token for i in own for token in batch[i]]), layout)
            values, bootstraps = values_before_tokens(output, torch.tensor(layout.lengths))
            pieces = zip(own, values.split(list(layout.lengths)), bootstraps, strict=True)
            found |= {i: torch.cat([before[1:], last[None]]).numpy() for i, before, last in pieces}
        return [found[i] for i in range(len(batch))]

    return _awaitable(run)


def padded(model: Any, batch: list[list[int]], *, size: int, by_length: bool) -> Scoring:
    """Plain transformers: right-padded batches with an attention mask, in the given order or by length."""
    order = sorted(range(len(batch)), key=lambda i: len(batch[i])) if by_length else list(range(len(batch)))

    @torch.no_grad()
    def run() -> Values:
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(order), size):
            own = order[start : start + size]
            rows = [torch.tensor(batch[i]) for i in own]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            options = {} if size == 1 else {"attention_mask": mask}
            logits = model(input_ids=ids, **options).logits[..., 0]
            found |= {i: logits[j, : len(batch[i])].numpy() for j, i in enumerate(own)}
        return [found[i] for i in range(len(batch))]

    return _awaitable(run)


def _awaitable(run: Callable[[], Values]) -> Scoring:
    async def call() -> Values:
        return run()

    return call


# ---------------------------------------------------------------------------------------------------------------------
# Over HTTP


@contextlib.contextmanager
def started(argv: list[str], log: Path, *, env: dict[str, str], is_ready: Callable[[], str | None]) -> Iterator[str]:
    """A server in a process group of its own, once `is_ready` says its address; ended by SIGINT afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until = time.monotonic() + 180
        while (url := is_ready()) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(argv)} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def our_service(folder: Path, base: Path, critic: Path, *, num_ranks: int) -> contextlib.AbstractContextManager[str]:
    """`counterpoint serve-value` on the exported critic."""
    config, log = folder / "critic.toml", folder / f"service{num_ranks}.log"
    config.write_text(
        f'[model]\npath = "{base}"\n[value]\ninit_from = "{critic}"\n[value.model]\nseq_len = {SEQ_LEN}\n'
        f"[deployment]\nnum_value_gpus = {num_ranks}\n"
    )
    argv = [sys.executable, "-m", "services.launch", "serve-value", str(config)]
    argv += ["--run.dir", str(folder / f"service{num_ranks}")]

    def is_ready() -> str | None:
        text = log.read_text()
        return text.split("listening on ")[1].split()[0] if "listening on " in text else None

    return started(argv, log, env={"PYTHONPATH": str(ROOT)}, is_ready=is_ready)


@contextlib.contextmanager
def vllm_service(folder: Path, critic: Path, python: Path, *, num_threads: int) -> Iterator[str]:
    """The server that vLLM brings, on the same folder; no prefix cache, for the same sequences come again."""
    with PortReservation(["port"]) as ports:
        port = ports.ports["port"]
    url, log = f"http://127.0.0.1:{port}", folder / f"vllm{num_threads}.log"
    argv = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(critic)),
        *("--served-model-name", "critic", "--runner", "pooling", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(SEQ_LEN), "--max-num-seqs", "128"),
        *("--max-num-batched-tokens", str(2 * SEQ_LEN), "--kv-cache-memory-bytes", str(2**28)),
        *("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    names = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    names |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def is_ready() -> str | None:
        return url if "Application startup complete" in log.read_text() else None

    env = names | {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": ""}
    with started(argv, log, env=env, is_ready=is_ready) as address:
        yield address


def in_requests(batch: list[list[int]], num: int, ask: Asking) -> Scoring:
    """All sequences in `num` requests at once; an answer is a list in the request's order."""

    async def call() -> Values:
        answers = await asyncio.gather(*(ask(batch[i::num]) for i in range(num)))
        return [answers[i % num][i // num] for i in range(len(batch))]

    return call


def our_packed(client: AsyncValueClient) -> Asking:
    """`value_service.client`: MessagePack, checked, to lists."""

    async def ask(batch: list[list[int]]) -> Values:
        reply = await client.score(batch)
        pairs = zip(reply.values, reply.bootstrap_values, strict=True)
        return [np.array([*values[1:], bootstrap], dtype=np.float32) for values, bootstrap in pairs]

    return ask


def our_json(session: aiohttp.ClientSession, url: str) -> Asking:
    """The same route in JSON, by msgspec."""

    async def ask(batch: list[list[int]]) -> Values:
        body = msgspec.json.encode({"batched_token_ids": batch})
        async with session.post(f"{url}/v1/score", data=body, headers={"Content-Type": JSON}) as response:
            response.raise_for_status()
            reply = msgspec.json.decode(await response.read())
        pairs = zip(reply["values"], reply["bootstrap_values"], strict=True)
        return [np.array([*values[1:], bootstrap], dtype=np.float32) for values, bootstrap in pairs]

    return ask


def vllm_pooling(session: aiohttp.ClientSession, url: str) -> Asking:
    """`POST /pooling`, JSON there and base64 of float32 back; without `use_activation` values would be squashed."""
    form = {"model": "critic", "task": "token_classify", "use_activation": False, "encoding_format": "base64"}

    async def ask(batch: list[list[int]]) -> Values:
        body = msgspec.json.encode({**form, "input": batch})
        async with session.post(f"{url}/pooling", data=body, headers={"Content-Type": JSON}) as response:
            response.raise_for_status()
            reply = msgspec.json.decode(await response.read())
        return [np.frombuffer(base64.b64decode(item["data"]), dtype="<f4") for item in reply["data"]]

    return ask
