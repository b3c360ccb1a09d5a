"""A plan as a person reads it: who starts where and how full it gets, what must fit what, and what to look at."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.config.schema import Config
from services.launch.disk import readable
from services.launch.plan_facts import PlanFacts, memory_of
from services.launch.planner import Plan, ProcessPlan
from services.packing.memory import MemoryEstimate

_UNKNOWN = "unknown: the model's config.json does not say its sizes"


def print_tables(console: Console, config: Config, layout: Plan, facts: PlanFacts) -> None:
    """Print a plan.

    Args:
        console: Where.
        config: The resolved configuration.
        layout: Its plan.
        facts: What `facts_of` found.
    """
    console.print(_process_table(config, layout, facts))
    if facts.gpus:
        console.print(_gpu_table(facts))
    console.print(_length_table(facts.lengths))
    console.print(_memory_table(facts.memory))
    console.print(_disk_table(facts))
    for name, text in (*_told(config, layout), *_sleeping(facts.backups)):
        console.print(f"{name:>14}  {text}", markup=False, soft_wrap=True)
    for note in facts.notes:
        console.print(Text.assemble((f"{'note':>14}  ", "bold yellow"), note), soft_wrap=True)
    for process in layout.processes:
        command = "as inference-0" if _is_further_engine(process) else shlex.join(process.argv)
        console.print(f"{process.name:>14}  {command}", markup=False, soft_wrap=True, style="dim")


def _is_further_engine(process: ProcessPlan) -> bool:
    return process.name.startswith("inference-") and process.name != "inference-0"


def ranges_of(numbers: Iterable[int]) -> str:
    """Numbers as a person lists them: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _told(config: Config, layout: Plan) -> Iterator[tuple[str, str]]:
    deployment, orchestrator = config.deployment, config.orchestrator
    yield "run directory", layout.context.dir
    yield "model", f"{config.model.path} ({layout.context.model_dir})"
    groups = f"batch {orchestrator.batch_size} in groups of {orchestrator.group_size}"
    yield "algorithm", f"{config.algorithm.type}, {groups}, {orchestrator.max_steps} steps"
    yield "environments", ", ".join(env.type for env in config.env)
    turns = {"none": "", "time": ", all roles in turns", "time_train": ", policy and critic in turns"}
    nodes = f" on {len(layout.hosts)} nodes" if len(layout.hosts) > 1 else ""
    yield "device", f"{deployment.device}{nodes}{turns[deployment.sharing]}"
    if deployment.kind == "slurm":
        num = len(layout.hosts)
        yield "job", f"SLURM, {num} node{'s' if num > 1 else ''}; --write DIR renders the script without submitting it"
    if layout.context.token_file is not None:
        yield "token", f"asked for by every listener, in {layout.context.token_file} (made at the start)"
    if not layout.model.is_complete:
        yield "first", f"make the model: {shlex.join(layout.model.argv or [])}"


def _sleeping(backups: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Host memory of those that take turns: one line for nodes alike."""
    for size in sorted(set(backups.values()), reverse=True):
        nodes = ", ".join(host for host, own in backups.items() if own == size)
        yield "host memory", f"{readable(size)} for who sleeps (estimated; {nodes})"


def _process_table(config: Config, layout: Plan, facts: PlanFacts) -> Table:
    has_nodes = len(layout.hosts) > 1
    has_gpus = any(process.gpus for process in layout.processes)
    loading = "all start at once" if config.deployment.sharing == "none" else "who takes turns loads one after another"
    table = Table(title=f"processes ({loading}; the orchestrator waits for the others)", title_justify="left")
    columns = ["process", *(["node"] if has_nodes else []), "ranks", *(["GPUs"] if has_gpus else [])]
    for column in (*columns, "rank holds", "ports", "ready when it answers"):
        table.add_column(column, overflow="fold", justify="right" if column in ("ranks", "rank holds") else "left")
    for process in layout.processes:
        ports = "\n".join(f"{name} {port}" for name, port in process.ports.items())
        size = memory_of(process, facts)
        cells = [process.name]
        cells += ["\n".join(layout.hosts[node].name for node in process.nodes)] if has_nodes else []
        cells.append(str(process.num_ranks))
        cells += [ranges_of(process.gpus) + (" of each" if len(process.nodes) > 1 else "")] if has_gpus else []
        table.add_row(*cells, "" if size is None else readable(size), ports, process.ready_url)
    return table


def _gpu_table(facts: PlanFacts) -> Table:
    """One line for neighbours that hold the same; of roles that take turns the largest counts."""
    table = Table(title="what each GPU holds (estimated)", title_justify="left")
    for column in ("node", "GPUs", "used by", "each"):
        table.add_column(column, justify="right" if column == "each" else "left")
    alike: dict[tuple[str, tuple[str, ...], int | None], list[int]] = {}
    for use in facts.gpus:
        alike.setdefault((use.host, use.processes, use.estimated_bytes), []).append(use.gpu)
    for (host, processes, size), gpus in alike.items():
        text = "unknown" if size is None else readable(size)
        has_cache = facts.takes_rest and any(name.startswith("inference") for name in processes)
        table.add_row(host, ranges_of(gpus), ", ".join(processes), f"{text} + cache" if has_cache else text)
    return table


def _length_table(lengths: dict[str, int]) -> Table:
    table = Table(title="lengths (tokens)", title_justify="left")
    table.add_column("key")
    table.add_column("limit", justify="right")
    for key, limit in lengths.items():
        table.add_row(key, str(limit))
    return table


def _memory_table(memory: dict[str, MemoryEstimate]) -> Table:
    table = Table(title="memory of one rank (estimated; full bins of seq_len tokens)", title_justify="left")
    table.add_column("role")
    for column in ("parameters", "gradients", "moments", "activations", "other", "total", "in host memory"):
        table.add_column(column, justify="right")
    for role, own in memory.items():
        other = own.reference + own.gathered + own.workspace
        counts = (own.parameters, own.gradients, own.moments, own.activations, other, own.total, own.host_moments)
        table.add_row(role, *(readable(count) for count in counts))
    if not memory:
        table.add_row(_UNKNOWN, *[""] * 7)
    return table


def _disk_table(facts: PlanFacts) -> Table:
    table = Table(title=f"disk (estimated; {readable(facts.free_bytes)} are free)", title_justify="left")
    for column in ("what", "each", "kept at most", "together"):
        table.add_column(column, justify="left" if column == "what" else "right")
    disk = facts.disk
    if disk is None:
        table.add_row(_UNKNOWN, "", "", "")
        return table
    for name, size, number in (
        ("commits", disk.commit, disk.num_commits),
        ("weight snapshots", disk.snapshot, disk.num_snapshots),
    ):
        table.add_row(name, readable(size), str(number), readable(size * number))
    table.add_row("record of rollouts", "", "", f"up to {readable(disk.record)}" if disk.record else "none")
    return table
