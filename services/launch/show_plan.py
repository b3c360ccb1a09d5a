"""`counterpoint plan`: what would start, as tables or as JSON.

Notable:
- Free ports are looked for and given back at once: `run` may choose others. Nothing is started, nothing is written.
"""

from __future__ import annotations

import json
import shlex
import sys

from rich.console import Console
from rich.table import Table

from services.config.checks import fixed_ports, port_names
from services.config.model_path import max_positions
from services.config.resolve import Resolved
from services.config.schema import Config
from services.launch.models import MODELS_DIR, model_source
from services.launch.planner import Plan, plan
from services.launch.supervisor import run_dir_of, site_here
from services.packing.memory import MemoryEstimate, estimate_memory
from services.packing.shapes import model_shapes
from services.runtime.ports import PortReservation


def dry_plan(config: Config) -> Plan:
    """Plan a run on this machine without reserving anything."""
    site = site_here()
    fixed = fixed_ports(config)
    free = [name for name in port_names(config) if name not in fixed]
    with PortReservation(free, avoid=fixed.values()) as reservation:
        ports = fixed | reservation.ports
    model = model_source(config.model.path, root=site.root, models_dir=MODELS_DIR, python=site.python)
    return plan(
        config, ports, run_dir=run_dir_of(config), run_id=f"{config.run.name}-plan", epoch=1, model=model, site=site
    )


def print_plan(config: Config, *, as_json: bool) -> None:
    """Print the plan of a run.

    Args:
        config: The resolved configuration.
        as_json: For programs: every port's key ends in `port`.
    """
    layout = dry_plan(config)
    if as_json:
        memory = {role: estimate.to_json() for role, estimate in _memory(config, layout).items()}
        plain = layout.to_json() | {"lengths": _lengths(config), "memory": memory}
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
        return
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(_process_table(layout))
    console.print(_length_table(config))
    console.print(_memory_table(_memory(config, layout)))
    facts = {
        "run directory": layout.context.dir,
        "model": f"{config.model.path} ({layout.context.model_dir})",
        "algorithm": f"{config.algorithm.type}, batch {config.orchestrator.batch_size} in groups of "
        f"{config.orchestrator.group_size}, {config.orchestrator.max_steps} steps",
        "environments": ", ".join(env.type for env in config.env),
        "device": config.deployment.device,
    }
    if not layout.model.is_complete:
        facts["first"] = f"make the model: {shlex.join(layout.model.argv or [])}"
    for name, text in facts.items():
        console.print(f"{name:>14}  {text}", markup=False, soft_wrap=True)
    for process in layout.processes:
        console.print(f"{process.name:>14}  {shlex.join(process.argv)}", markup=False, soft_wrap=True, style="dim")


def print_explanation(resolved: Resolved, *, as_json: bool) -> None:
    """Print every value of a configuration and where it came from."""
    rows = list(resolved.explain())
    if as_json:
        listed = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        sys.stdout.write(json.dumps(listed, indent=1) + "\n")
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        sys.stdout.write(f"{key:<{width}}  {json.dumps(value):<24}  {origin}\n")


def _process_table(layout: Plan) -> Table:
    table = Table(title="processes (all start at once; the orchestrator waits for the others)", title_justify="left")
    for column in ("process", "ranks", "ports", "ready when it answers"):
        table.add_column(column, overflow="fold")
    for process in layout.processes:
        ports = "\n".join(f"{name} {port}" for name, port in process.ports.items())
        table.add_row(process.name, str(process.num_ranks), ports, process.ready_url)
    return table


def _length_table(config: Config) -> Table:
    table = Table(title="lengths (tokens)", title_justify="left")
    table.add_column("key")
    table.add_column("limit", justify="right")
    for key, limit in _lengths(config).items():
        table.add_row(key, str(limit))
    return table


def _memory(config: Config, layout: Plan) -> dict[str, MemoryEstimate]:
    """What a rank of each role takes; empty where the model's sizes are not written down."""
    shapes = model_shapes(layout.model.dir if layout.model.is_complete else None)
    if shapes is None:
        return {}
    policy = estimate_memory(shapes, config.policy, num_ranks=config.deployment.num_policy_gpus)
    if config.value is None:
        return {"policy": policy}
    return {
        "policy": policy,
        "value": estimate_memory(shapes, config.value, num_ranks=config.deployment.num_value_gpus),
    }


def _memory_table(memory: dict[str, MemoryEstimate]) -> Table:
    table = Table(title="memory of one rank (estimated; full bins of seq_len tokens)", title_justify="left")
    table.add_column("role")
    for column in ("parameters", "gradients", "moments", "activations", "other", "total", "in host memory"):
        table.add_column(column, justify="right")
    for role, own in memory.items():
        other = own.reference + own.gathered + own.workspace
        counts = (own.parameters, own.gradients, own.moments, own.activations, other, own.total, own.host_moments)
        table.add_row(role, *(_readable(count) for count in counts))
    if not memory:
        table.add_row("unknown: the model's config.json does not say its sizes", *[""] * 7)
    return table


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _lengths(config: Config) -> dict[str, int]:
    lengths = {f"env[{i}].max_trace_tokens ({env.type})": env.max_trace_tokens for i, env in enumerate(config.env)}
    lengths["inference.max_model_len"] = config.inference.max_model_len
    lengths["policy.model.seq_len"] = config.policy.model.seq_len
    if config.value is not None:
        lengths["value.model.seq_len"] = config.value.model.seq_len
    positions = max_positions(config.model.path)
    if positions is not None:
        lengths["positions of the model"] = positions
    return lengths
