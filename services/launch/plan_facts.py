"""What `counterpoint plan` knows beyond the processes: memory of every GPU, lengths, disk, commits, and warnings.

Notable:
- Estimates are there where the model's files say its sizes. An engine's is its weights and, for the local one and on
  CPU, its cache; vLLM on a GPU takes a share of the whole device whatever it needs.
- Of roles that take turns on a GPU the largest counts: the others sleep in host memory, which is counted by node.
  Each keeps its room there when it wakes.
- Everything here is only looked at. The same facts are printed and given as JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config.model_path import max_positions
from services.config.schema import Config
from services.inference.vllm_command import kv_cache_bytes
from services.launch.disk import DiskEstimate, commit_problem, earlier_commits, estimate_disk, free_bytes, readable
from services.launch.placement import place
from services.launch.planner import Plan, ProcessPlan
from services.launch.rundir import MARKS
from services.packing.memory import COMPUTE_BYTES, MemoryEstimate, estimate_memory
from services.packing.shapes import ModelShapes, model_shapes

VLLM_SHARE = 0.92
"""Of a GPU, unless `inference.vllm_args` says --gpu-memory-utilization: vLLM's own default."""


@dataclass(frozen=True)
class GpuUse:
    """One GPU of a plan."""

    host: str
    gpu: int
    processes: tuple[str, ...]
    estimated_bytes: int | None
    """None where the model does not say its sizes"""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "host": self.host,
            "gpu": self.gpu,
            "processes": list(self.processes),
            "estimated_bytes": self.estimated_bytes,
        }


@dataclass(frozen=True)
class PlanFacts:
    """All that is shown beside the processes."""

    lengths: dict[str, int]
    memory: dict[str, MemoryEstimate]
    """of one rank of each role"""
    engine_bytes: int | None
    """of one GPU of an engine"""
    takes_rest: bool
    """whether engines take what is left of their GPUs for their cache"""
    gpus: list[GpuUse]
    disk: DiskEstimate | None
    free_bytes: int
    commits: list[int]
    """steps, newest first"""
    notes: list[str]
    backups: dict[str, int]
    """host memory of those that sleep, by node; empty where nobody takes turns, or the model does not say its sizes"""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "lengths": self.lengths,
            "memory": {role: estimate.to_json() for role, estimate in self.memory.items()},
            "engine_bytes": self.engine_bytes,
            "gpus": [use.to_json() for use in self.gpus],
            "backup_bytes": self.backups,
            "disk": (self.disk.to_json() if self.disk is not None else {}) | {"free_bytes": self.free_bytes},
            "commits": self.commits,
            "notes": self.notes,
        }


def facts_of(config: Config, layout: Plan) -> PlanFacts:
    """Look at everything that a plan is shown with.

    Args:
        config: The resolved configuration.
        layout: Its plan.
    """
    shapes = model_shapes(layout.model.dir if layout.model.is_complete else None)
    memory = _memory(config, shapes)
    engine = _engine_bytes(config, shapes, layout.model.dir)
    run_dir = layout.context.run_dir
    disk = estimate_disk(config, shapes) if shapes is not None else None
    free, commits = free_bytes(run_dir), earlier_commits(run_dir)
    backups = _backups(config, layout, shapes, memory)
    notes = [
        *_notes_on_gpus(config, layout),
        *_notes_on_host_memory(config, backups, memory),
        *_notes_on_disk(disk, free, run_dir),
        *_notes_on_run(run_dir, commits),
    ]
    gpus = _gpus(config, layout, memory, engine)
    takes_rest = config.deployment.device == "cuda" and config.inference.engine == "vllm"
    lengths = lengths_of(config)
    return PlanFacts(lengths, memory, engine, takes_rest, gpus, disk, free, commits, notes, backups)


def lengths_of(config: Config) -> dict[str, int]:
    """Every length that must fit the others."""
    lengths = {f"env[{i}].max_trace_tokens ({env.type})": env.max_trace_tokens for i, env in enumerate(config.env)}
    lengths["inference.max_model_len"] = config.inference.max_model_len
    lengths["policy.model.seq_len"] = config.policy.model.seq_len
    if config.value is not None:
        lengths["value.model.seq_len"] = config.value.model.seq_len
    positions = max_positions(config.model.path)
    if positions is not None:
        lengths["positions of the model"] = positions
    return lengths


def memory_of(process: ProcessPlan, facts: PlanFacts) -> int | None:
    """Estimated bytes of a process on each of its GPUs, or of each rank on CPU; None where nothing is known."""
    if process.name in facts.memory:
        return facts.memory[process.name].total
    return facts.engine_bytes if process.name.startswith("inference") else None


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def _memory(config: Config, shapes: ModelShapes | None) -> dict[str, MemoryEstimate]:
    """What a rank of each role takes; empty where the model's sizes are not written down."""
    if shapes is None:
        return {}
    policy = estimate_memory(shapes, config.policy, num_ranks=config.deployment.num_policy_gpus)
    if config.value is None:
        return {"policy": policy}
    return {"policy": policy, "value": estimate_memory(shapes, config.value, num_ranks=config.num_value_gpus)}


def _engine_bytes(config: Config, shapes: ModelShapes | None, model_dir: Path) -> int | None:
    """Weights of an engine's GPU, and its cache where that is ours to choose."""
    if shapes is None:
        return None
    inference, num_bytes = config.inference, COMPUTE_BYTES[config.model.dtype]
    weights = _weight_bytes(config, shapes)
    if inference.engine == "local":
        sizes = shapes.sizes
        token_bytes = 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * num_bytes
        return weights + token_bytes * inference.max_model_len * inference.max_num_seqs
    return weights + (kv_cache_bytes(config, model_dir) if config.deployment.device == "cpu" else 0)


def _weight_bytes(config: Config, shapes: ModelShapes) -> int:
    """Of one GPU of an engine."""
    whole = COMPUTE_BYTES[config.model.dtype] * sum(parameter.size for parameter in shapes.parameters)
    return whole // config.inference.tp


def _backups(
    config: Config, layout: Plan, shapes: ModelShapes | None, memory: dict[str, MemoryEstimate]
) -> dict[str, int]:
    """Host memory of those that take turns, by node: all but gradients and activations; of engines the weights."""
    sharing, where = config.deployment.sharing, place(config)
    if sharing == "none" or shapes is None:
        return {}
    roles = [("policy", where.policy), *([("value", where.value)] if where.value is not None else [])]
    sizes = {name: own.parameters + own.moments + own.reference for name, own in memory.items()}
    sleeping = [(at, sizes[name]) for name, at in roles]
    is_only_paused = config.inference.engine == "vllm" and config.deployment.device == "cpu"
    if sharing == "time" and not is_only_paused:
        sleeping += [(at, _weight_bytes(config, shapes)) for at in where.engines]
    found: dict[str, int] = {}
    for at, rank_bytes in sleeping:
        for node in at.nodes:
            host = layout.hosts[node].name
            found[host] = found.get(host, 0) + len(at.gpus) * rank_bytes
    return found


def _gpus(config: Config, layout: Plan, memory: dict[str, MemoryEstimate], engine: int | None) -> list[GpuUse]:
    """Every GPU that somebody has, by node and number."""
    users: dict[tuple[int, int], list[str]] = {}
    for process in sorted(layout.processes, key=lambda process: process.name.startswith("inference")):
        for node in process.nodes:
            for gpu in process.gpus:
                users.setdefault((node, gpu), []).append(process.name)
    uses = []
    for (node, gpu), names in sorted(users.items()):
        sizes = [memory[name].total if name in memory else engine for name in names]
        known = [size for size in sizes if size is not None]
        largest = max(known) if len(known) == len(names) else None
        uses.append(GpuUse(layout.hosts[node].name, gpu, tuple(names), largest))
    return uses


# ---------------------------------------------------------------------------------------------------------------------
# What a person should look at


def _notes_on_gpus(config: Config, layout: Plan) -> Iterator[str]:
    deployment, where = config.deployment, place(config)
    for name, role, at in (("policy", config.policy, where.policy), ("value", config.value, where.value)):
        if role is not None and at is not None and len(at.nodes) > 1 and len(at.gpus) % role.model.cp:
            num = len(at.gpus)
            yield f"{name}.model.cp = {role.model.cp} does not divide its {num} GPUs of a node: bins cross nodes"
    if deployment.device == "cuda" and config.inference.engine == "vllm":
        yield f"vLLM takes {_vllm_share(config):.0%} of each of its GPUs: weights first, the rest is cache"
    if deployment.device == "cuda" and deployment.kind == "slurm":
        used = [{gpu for p in layout.processes if node in p.nodes for gpu in p.gpus} for node in range(where.num_nodes)]
        for host, gpus in zip(layout.hosts, used, strict=True):
            if len(gpus) < deployment.gpus_per_node:
                yield f"{host.name}: {deployment.gpus_per_node - len(gpus)} of {deployment.gpus_per_node} GPUs are idle"
    if deployment.kind == "slurm":
        yield "hosts and ports are stand-ins: the job's nodes choose theirs when it starts"


def _notes_on_host_memory(config: Config, backups: dict[str, int], memory: dict[str, MemoryEstimate]) -> Iterator[str]:
    """Of this machine: the nodes of a job are not known."""
    if not backups or config.deployment.kind != "local":
        return
    (needed,), there = backups.values(), host_bytes()
    ranks = {"policy": config.deployment.num_policy_gpus, "value": config.num_value_gpus}
    needed += sum(ranks[name] * own.host_moments for name, own in memory.items())
    if needed > there:
        yield f"{readable(needed)} of host memory hold who sleeps and offloaded moments, {readable(there)} are here"


def host_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _vllm_share(config: Config) -> float:
    words = " ".join(config.inference.vllm_args)
    found = re.search(r"--gpu-memory-utilization[= ](0?\.\d+|1(\.0+)?)\b", words)
    return float(found[1]) if found else VLLM_SHARE


def _notes_on_disk(disk: DiskEstimate | None, free: int, run_dir: Path) -> Iterator[str]:
    if disk is None:
        return
    problem = commit_problem(disk.commit, free, run_dir)
    if problem is not None:
        yield problem.partition("; fix: ")[0]
    elif disk.total > free:
        yield f"the disk may fill up: {readable(disk.total)} by the last step, {readable(free)} are free at {run_dir}"


def _notes_on_run(run_dir: Path, commits: list[int]) -> Iterator[str]:
    if commits:
        listed = ", ".join(str(step) for step in sorted(commits))
        yield f"{run_dir} has commits of step {listed}: --resume goes on after {commits[0]}, --overwrite starts anew"
    elif any((run_dir / mark).is_file() for mark in MARKS):
        yield f"{run_dir} holds an earlier run without a commit: --overwrite starts anew"
    elif run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        yield f"{run_dir} is there and no run of ours: choose another with --run.dir DIR"
