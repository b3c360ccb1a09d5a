"""Replays for tests: carried out by the command line, ended on the way, and compared bit by bit."""

from __future__ import annotations

import json
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from orchestrator import state
from services.runtime.commits import Commits
from services.runtime.faults import FAULT_VARIABLE
from tests.groups import as_data
from tests.runs import Finished, processes_of, read_lines, start_cli

CONFIG = "tests/processes/configs/replay.toml"
DEADLINE_S = 240
CRITICLESS = ("--value", "none")
SETTINGS: dict[str, tuple[str, ...]] = {
    "sao": (),
    "ppo": ("--algorithm.type", "ppo", "--policy.mini_batches", "2"),
    "evpo": ("--algorithm.type", "evpo"),
    "grpo": ("--algorithm.type", "grpo", *CRITICLESS),
    "running_mean": ("--algorithm.type", "running_mean", *CRITICLESS),
    "spo": ("--algorithm.type", "spo", *CRITICLESS),
}
"""What makes a replay of CONFIG's record one of each algorithm."""
_TIMES = ("time", "tokens_per_s", "checkpoint/bytes")
"""Metrics that are not the same twice; files of tensors hold padding and dates."""


def run_replay(source: Path, run_dir: Path, *words: str, fault: str | None = None) -> Finished:
    """Carry out a replay to its end."""
    process, log = start_replay(source, run_dir, *words, fault=fault)
    try:
        code = process.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(timeout=30)
        raise AssertionError(f"the replay did not end in {DEADLINE_S} s:\n{log.read_text()[-3000:]}") from None
    return Finished(code, log.read_text(), run_dir)


def start_replay(
    source: Path, run_dir: Path, *words: str, fault: str | None = None
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a replay, with a point at which one of its processes is to die."""
    log = run_dir.with_suffix(".out")
    env = {} if fault is None else {FAULT_VARIABLE: fault}
    return start_cli("replay", str(source), "--run.dir", str(run_dir), *words, log=log, env=env), log


def kill_launcher_after_commit(source: Path, run_dir: Path, step: int, *words: str) -> None:
    """Start a replay, and SIGKILL its launcher as soon as a commit is there."""
    process, log = start_replay(source, run_dir, *words)
    ends = time.monotonic() + DEADLINE_S
    while not (run_dir / "checkpoints" / f"step_{step:06d}" / "COMMIT.json").exists():
        assert process.poll() is None and time.monotonic() < ends, log.read_text()[-3000:]
        time.sleep(0.005)
    process.kill()
    process.wait()
    while processes_of(run_dir):
        assert time.monotonic() < ends, "something outlives its launcher"
        time.sleep(0.05)


def differences(run: Path, other: Path, *, step: int) -> Iterator[str]:
    """Where two finished replays differ, times aside: rows, traces, and everything of the commit of a step."""
    rows, others = rows_of(run), rows_of(other)
    yield from (f"row {key} of {stream}" for stream, key in sorted(rows.keys() ^ others.keys()))
    for key in sorted(rows.keys() & others.keys()):
        yield from (
            f"{name} of {key}: {rows[key].get(name)} and {others[key].get(name)}"
            for name in sorted(rows[key].keys() | others[key].keys())
            if rows[key].get(name) != others[key].get(name)
        )
    if (run / "traces.jsonl").read_bytes() != (other / "traces.jsonl").read_bytes():
        yield "traces.jsonl"
    weights = [
        {p.relative_to(each): p.read_bytes() for p in each.glob("weights/v*/*.safetensors")} for each in (run, other)
    ]
    if weights[0] != weights[1] or not weights[0]:
        yield "weights"
    commit, other_commit = (Commits(each / "checkpoints").load(step) for each in (run, other))
    for role in sorted({*commit.roles, *other_commit.roles} - {state.ROLE}):
        yield from tensor_differences(commit.role(role), other_commit.role(role))
    snapshots = [state.read(each.folder) for each in (commit, other_commit)]
    for name in ("step", "version", "evaluated_at", "source", "algorithm", "outcomes", "traces_bytes"):
        if getattr(snapshots[0].state, name) != getattr(snapshots[1].state, name):
            yield f"orchestrator: {name}"
    if as_data(snapshots[0].pending) != as_data(snapshots[1].pending):
        yield "orchestrator: pending groups"


def rows_of(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows by stream and step, each there once, without what is not the same twice."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in read_lines(run / "metrics.jsonl"):
        key = (row["stream"], row["step"])
        assert key not in rows, f"{key} twice"
        rows[key] = {name: value for name, value in row.items() if not name.startswith(_TIMES)}
    return rows


def tensor_differences(folder: Path, other: Path) -> Iterator[str]:
    """Weights, buffers and moments of two checkpoints of a role that are not equal to the last bit."""
    tensors, others = tensors_of(folder), tensors_of(other)
    kinds = {name.split("/")[0] for name in tensors}
    assert {"parameters", "exp_avg", "exp_avg_sq", "rng"} <= kinds, f"nothing of some kind to compare: {kinds}"
    yield from (f"{folder.name}: {name} is there once" for name in sorted(tensors.keys() ^ others.keys()))
    for name in sorted(tensors.keys() & others.keys()):
        if not torch.equal(tensors[name], others[name]):
            yield f"{folder.name}: {name}"
    if json.loads((folder / "state.json").read_text()) != json.loads((other / "state.json").read_text()):
        yield f"{folder.name}: state.json"


def random_state_differences(run: Path, early: int, late: int) -> Iterator[str]:
    """Random state that a start from the commit of step `early` did not take over. A trainer draws nothing while it
    trains, so that at step `late` it still is what it was."""
    commits = Commits(run / "checkpoints")
    for role in sorted({*commits.load(early).roles} - {state.ROLE}):
        before, after = (tensors_of(commits.load(step).role(role)) for step in (early, late))
        names = [name for name in before if name.startswith("rng")]
        assert names, f"no random state of {role}"
        yield from (f"{role}: {name}" for name in names if not torch.equal(before[name], after[name]))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a role's checkpoint, whole."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that nothing is coordinated: nothing need be
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
