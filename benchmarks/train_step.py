r"""One training step of either role: tokens/s, share of the matrix rate, peak memory; beside plain transformers.

    python -m benchmarks.train_step CONFIG [--role policy|critic] [--samples N] [--steps N] [--cuda] [--section.key X]
    python -m benchmarks.train_step configs/demo/dummy.toml --model.path dummy:DIR --cuda \
        --policy.model.dtype bfloat16 --policy.model.activation_checkpointing true

Random weights and random samples of log-normal lengths, packed and trained by the code that trains a run, in the
configured layout. The matrix rate is measured in the same process in the role's compute type; FLOPs are those of
`services.packing.cost` times three, recomputation not counted. With one rank the same samples are trained once more by
what one would write oneself: transformers' sdpa attention, padded batches, whole logits (policy), AdamW.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from policy_trainer.build import build_policy
from policy_trainer.trainer import PolicyTrainer
from services.config.context import RunContext
from services.config.model_path import model_sizes
from services.config.resolve import resolve
from services.config.schema import Config
from services.model.mesh import Mesh
from services.packing.cost import flop_cost
from services.packing.grid import build_grid
from services.runtime.lifecycle import leave
from services.training.assemble import join_group
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from services.wire.grids import GridItem
from services.wire.samples import Branch, StopReason, TrainingSample, VersionSpan
from value_service.build import build_critic
from value_service.updater import Updater

ROOT = Path(__file__).resolve().parents[1]
URL = "http://127.0.0.1:1"


def samples(num: int, longest: int, vocab_size: int) -> list[TrainingSample]:
    """Half prompt, half answer; lengths log-normal about a quarter of the longest."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(num):
        length = int(np.clip(rng.lognormal(np.log(longest / 4), 0.6), 8, longest))
        mask = np.arange(length) >= length // 2
        branch = Branch(
            rng.integers(3, vocab_size, length).astype(np.uint32),
            mask,
            mask.copy(),
            np.where(mask, -1.0, 0.0).astype(np.float32),
            [VersionSpan(length // 2, length, 0)],
        )
        sample = TrainingSample(f"t{i}", f"g{i}", branch, 1.0, StopReason.TERMINATED)
        sample.values = np.where(mask, 0.5, 0.0)
        sample.advantages = np.where(mask, rng.normal(size=length), 0.0)
        sample.returns = np.where(mask, 1.0, 0.0)
        out.append(sample)
    return out


def context_of(config: Config) -> RunContext:
    kind, _, folder = config.model.path.partition(":")
    assert kind == "dummy", "give --model.path dummy:DIR: the benchmark needs an architecture, not weights"
    return RunContext(
        run_id="benchmark",
        epoch=1,
        dir="none",
        model_dir=folder,
        model_init="random",
        inference_urls=[URL],
        policy_url=URL,
        orchestrator_url=URL,
        policy_grid_url=URL,
    )


def trainer_of(config: Config, role: str, mesh: Mesh, ranks: Ranks) -> tuple[Any, nn.Module]:
    context = context_of(config)
    if role == "critic":
        assert config.value is not None
        _, critic = build_critic(config, context, mesh)
        return Updater(critic, ranks, mesh, config.value), critic
    backbone, policy = build_policy(config, context, mesh)
    reference = build_policy(config, context, mesh)[1] if config.policy.kl.coef > 0 else None
    trainer = PolicyTrainer(
        policy,
        backbone,
        ranks,
        StatusBoard("policy"),
        config.policy,
        weights_dir=Path("none"),
        tokenizer_from=Path("none"),
        reference=reference,
    )
    return trainer, policy


def grid(config: Config, role: str, rows: list[TrainingSample]) -> list[GridItem]:
    identity = {"run_id": "run", "epoch": 1, "step": 0, "policy_version": 0, "temperature": 1.0}
    if role == "critic":
        assert config.value is not None
        loss = {"loss_name": config.value.loss.type, "loss_constants": config.value.loss.loss_constants()}
        seq_len, num = config.value.model.seq_len, config.num_value_data_ranks
        return build_grid(rows, stream="critic", seq_len=seq_len, num_data_ranks=num, **loss, **identity)
    loss = {"loss_name": config.algorithm.policy_loss, "loss_constants": config.algorithm.loss_constants()}
    seq_len, num = config.policy.model.seq_len, config.num_policy_data_ranks
    return build_grid(rows, stream="policy", seq_len=seq_len, num_data_ranks=num, **loss, **identity)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = min(_seconds(lambda: a @ b, device) for _ in range(8))
    return 2 * size**3 / best


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def plain_step(config: Config, role: str, rows: list[TrainingSample], device: torch.device) -> Callable[[], None]:
    """The same samples by transformers alone: sdpa, padded batches of one bin's tokens, everything at once."""
    layout = config.policy.model if role == "policy" or config.value is None else config.value.model
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    model_config = AutoConfig.from_pretrained(context_of(config).model_dir)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa", dtype=torch.float32).to(device)
    if layout.activation_checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    head = nn.Linear(model_config.hidden_size, 1).to(device)
    adam = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-6)
    batches = _padded(rows, layout.seq_len, device)

    def step() -> None:
        adam.zero_grad()
        for ids, attend, mask, wanted in batches:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                if role == "critic":
                    hidden = model.base_model(input_ids=ids, attention_mask=attend).last_hidden_state
                    loss = (0.5 * (head(hidden[:, :-1]).float()[..., 0] - wanted[:, 1:]) ** 2 * mask[:, 1:]).sum()
                else:
                    logits = model(input_ids=ids, attention_mask=attend).logits[:, :-1].float()
                    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
                    ratio = (logprobs + 1.0).exp()
                    loss = -(ratio.clamp(0.8, 1.2) * wanted[:, 1:] * mask[:, 1:]).sum()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return step


def _padded(rows: list[TrainingSample], num_tokens: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Batches of similar lengths, each of at most one bin's tokens, padding included."""
    batches, batch = [], []
    for row in sorted(rows, key=lambda row: row.num_tokens):
        if batch and row.num_tokens * (len(batch) + 1) > num_tokens:
            batches.append(batch)
            batch = []
        batch.append(row)
    out = []
    for members in [*batches, batch]:
        width = max(row.num_tokens for row in members)
        arrays = []
        for of in (
            lambda row: row.branch.token_ids.astype(np.int64),
            lambda row: np.ones(row.num_tokens, dtype=np.int64),
            lambda row: row.branch.loss_mask.astype(np.float32),
            lambda row: np.asarray(row.advantages, dtype=np.float32),
        ):
            arrays.append(np.stack([np.pad(of(row), (0, width - row.num_tokens)) for row in members]))
        out.append(tuple(torch.from_numpy(array).to(device) for array in arrays))
    return out


def measure(config: Config, args: argparse.Namespace) -> None:
    section = config.policy if args.role == "policy" else config.value
    assert section is not None, "no [value] table"
    ranks, mesh, _ = join_group(args.role, config, section.model)
    sizes = model_sizes(Path(context_of(config).model_dir))
    rows = samples(args.samples, section.model.seq_len, sizes["vocab_size"])
    cost = flop_cost(**(sizes if args.role == "policy" else sizes | {"vocab_size": 0}))
    updates = 1 if args.role == "policy" else section.updates_per_batch  # pyright: ignore[reportAttributeAccessIssue]
    num_tokens = sum(row.num_tokens for row in rows) * updates
    flops = 3 * updates * sum(float(cost(row.num_tokens)) for row in rows)
    dtype = torch.bfloat16 if section.model.dtype == "bfloat16" else torch.float32
    rate = matrix_rate(mesh.device, dtype) * ranks.size

    trainer, model = trainer_of(config, args.role, mesh, ranks)
    item = grid(config, args.role, rows)[mesh.data_rank]
    num_micro_batches = sum(m.num_micro_batches for m in item.header.mini_batches)
    if ranks.rank == 0:
        num_parameters = sum(p.numel() for p in model.parameters()) / 1e6
        batch = f"{len(rows)} samples, {num_tokens:,} tokens a step, {num_micro_batches} micro-batches a rank"
        print(f"{num_parameters:,.1f} M parameters, {batch}, matrix rate {rate / 1e12:.2f} TFLOP/s on {ranks.size}\n")
    report = Report(args.role, ranks, mesh, num_tokens, flops, rate)
    report.line("counterpoint", lambda: trainer.train(item), args.steps)
    if ranks.size == 1 and updates == 1:
        del trainer, model
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        report.line("transformers, padded, sdpa", plain_step(config, args.role, rows, mesh.device), args.steps)
    ranks.close()
    leave()


class Report:
    """A Markdown table, written by rank 0."""

    def __init__(self, role: str, ranks: Ranks, mesh: Mesh, num_tokens: int, flops: float, rate: float) -> None:
        self._ranks, self._mesh = ranks, mesh
        self._num_tokens, self._flops, self._rate = num_tokens, flops, rate
        self._first: float | None = None
        if ranks.rank == 0:
            layout = f"{role}, CP {mesh.cp} x DP {mesh.num_data_ranks}, EP {mesh.ep}"
            print(f"{layout}; {date.today()}, torch {torch.__version__}, {_device_name(mesh.device)}\n")
            print("| step by | s | tokens/s | MFU | peak memory a rank | tokens/s, ratio |\n|---|---|---|---|---|---|")

    def line(self, name: str, step: Callable[[], Any], num_steps: int) -> None:
        """Time the best of some steps after one that does not count."""
        device = self._mesh.device
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        best = min(_seconds(step, device) for _ in range(num_steps))
        best = max(row[0] for row in self._ranks.gather_f64([best]))
        peak = f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB" if device.type == "cuda" else "not measured"
        self._first = self._first or best
        if self._ranks.rank == 0:
            speed, share = self._num_tokens / best, self._flops / best / self._rate
            ratio = self._first / best
            print(f"| {name} | {best:.3f} | {speed:,.0f} | {share:.2f} | {peak} | {ratio:.2f} |", flush=True)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread a rank"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--role", choices=["policy", "critic"], default="policy")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cuda", action="store_true", help="on GPUs, as many as the role has")
    args, settings = parser.parse_known_args()
    pairs = [(key.removeprefix("--"), value) for key, value in zip(settings[::2], settings[1::2], strict=True)]
    config = resolve([args.config], pairs).config
    config = config.on_cuda() if args.cuda else config
    if "RANK" in os.environ:
        measure(config, args)
        return
    num = config.deployment.num_policy_gpus if args.role == "policy" else config.num_value_gpus
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "benchmarks.train_step", *sys.argv[1:]),
    ]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if config.deployment.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run(argv, env=env, check=False).returncode)


if __name__ == "__main__":
    main()
