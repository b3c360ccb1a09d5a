"""`counterpoint plan`: what would start, as tables, as JSON, or written into a folder.

Notable:
- Free ports are looked for and given back at once: `run` may choose others. Nothing is started, and nothing is written
  but what `--write DIR` names.
- Of a job the hosts are node0, node1, ...: which nodes those are, and which ports are free there, is known in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from services.config.context import Host
from services.config.ports import fixed_ports, port_names
from services.config.resolve import Resolved
from services.config.schema import Config, to_toml
from services.launch.models import MODELS_DIR, model_source
from services.launch.placement import place
from services.launch.plan_facts import facts_of
from services.launch.plan_tables import print_tables
from services.launch.planner import LOCAL, Plan, plan
from services.launch.supervisor import run_dir_of, site_here
from services.runtime.durable import write_atomic
from services.runtime.ports import PortReservation
from services.wire.errors import CannotWrite

PLAN_FILE, CONFIG_FILE = "plan.json", "config.resolved.toml"


def dry_plan(config: Config) -> Plan:
    """Plan a run without reserving anything."""
    site = site_here()
    fixed = fixed_ports(config)
    free = [name for name in port_names(config) if name not in fixed]
    with PortReservation(free, avoid=fixed.values()) as reservation:
        ports = fixed | reservation.ports
    num_nodes = place(config).num_nodes
    hosts = [LOCAL] if num_nodes == 1 else [Host(f"node{index}", f"node{index}") for index in range(num_nodes)]
    model = model_source(config.model.path, root=site.root, models_dir=MODELS_DIR, python=site.python)
    return plan(
        config,
        ports,
        hosts=hosts,
        run_dir=run_dir_of(config),
        run_id=f"{config.run.name}-plan",
        epoch=1,
        model=model,
        site=site,
    )


def print_plan(config: Config, *, as_json: bool, write: str | None = None, quiet: bool = False) -> None:
    """Print the plan of a run.

    Args:
        config: The resolved configuration.
        as_json: For programs: every port's key ends in `port`.
        write: A folder for the plan, the resolved configuration and, of a job, its script.
        quiet: Only write.

    Raises:
        CannotWrite: The folder cannot be made.
    """
    layout = dry_plan(config)
    facts = facts_of(config, layout)
    plain = layout.to_json() | facts.to_json()
    if as_json and not quiet:
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
    elif not quiet:
        console = Console(file=sys.stdout, highlight=False)
        if not console.is_terminal:
            console.width = 120
        print_tables(console, config, layout, facts)
    if write is not None:
        written = write_plan(config, plain, Path(write))
        sys.stderr.write("".join(f"wrote {path}\n" for path in written))


def write_plan(config: Config, plain: dict[str, Any], folder: Path) -> list[Path]:
    """Write the plan, the resolved configuration and, of a job, its script into a folder.

    Args:
        config: The resolved configuration.
        plain: The plan as JSON.
        folder: Made where it is missing.

    Returns:
        The files.

    Raises:
        CannotWrite: The folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"cannot make {folder}: {error.strerror}") from error
    names = [PLAN_FILE, CONFIG_FILE]
    if config.deployment.kind == "slurm":
        from services.launch.slurm import SCRIPT, run_on_slurm

        run_on_slurm(config, say=lambda line: None, render_only=str(folder))
        names.append(SCRIPT)
    else:
        write_atomic(folder / CONFIG_FILE, to_toml(config))
    write_atomic(folder / PLAN_FILE, json.dumps(plain, indent=1) + "\n")
    return [folder / name for name in names]


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
