"""`metrics.jsonl` and `traces.jsonl`: one object a step and stream, written by the orchestrator alone.

Notable:
- Means are f64 sums over traces divided once; never means of means.
- Logs and metrics never stop a run: a full disk is warned about once.
- A resumed run cuts both where its commit was, and its clock goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from loguru import logger

from orchestrator.producer import Group
from services.wire.samples import StopReason, Trace, TrainingSample

_CHUNK_BYTES = 2**16


class JsonLines:
    """An append-only file of JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False

    def write(self, row: dict[str, Any]) -> None:
        """Append one object."""
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            if not self._warned:
                logger.warning("cannot write {}: {}", self._path, error.strerror)
                self._warned = True

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._path.stat().st_size if self._path.exists() else 0

    def cut(self, num_bytes: int, *, also: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """Go on after so many bytes: what follows them is removed.

        Args:
            num_bytes: Whole rows; a shorter file (its end was lost in a crash) loses its last row if that is not whole.
            also: Rows after them that stay.
        """
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            end = _end_of_rows(file, min(num_bytes, self.num_bytes))
            stay: list[bytes] = []
            if also is not None:
                file.seek(end)
                rest = file.read()
                whole = rest[: rest.rfind(b"\n") + 1].splitlines(keepends=True)
                stay = [line for line in whole if also(msgspec.json.decode(line))]
            file.seek(end)
            file.truncate()
            file.writelines(stay)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All of them."""
        if self._path.exists():
            with self._path.open("rb") as file:
                for line in file:
                    yield msgspec.json.decode(line)


def _end_of_rows(file: BinaryIO, end: int) -> int:
    """Where the last whole row before `end` ends; a file of traces is too large to be read for that."""
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class Metrics:
    """The run's rows, and the last values for the status page."""

    def __init__(self, run_dir: Path) -> None:
        self._rows = JsonLines(run_dir / "metrics.jsonl")
        self._started = time.monotonic()
        self.latest: dict[str, dict[str, Any]] = {}
        self.rewards: list[float] = []

    def add(self, stream: str, step: int, row: dict[str, Any]) -> None:
        """Write one row; floats are rounded to nine digits."""
        full = {"step": step, "stream": stream, "time_s": round(time.monotonic() - self._started, 3)} | {
            name: (float(f"{value:.9g}") if isinstance(value, float) else value) for name, value in row.items()
        }
        self._rows.write(full)
        self._remember(full)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._rows.num_bytes

    def go_on_from(self, step: int, num_bytes: int) -> None:
        """Take up a file that an earlier start wrote.

        Args:
            step: Finished steps of the commit.
            num_bytes: Size of the file at that time. The commit's own row, which came later, stays as well.
        """
        self._rows.cut(num_bytes, also=lambda row: row["stream"] == "commit" and row["step"] == step)
        time_s, has_own = 0.0, False
        for row in self._rows.rows():
            self._remember(row)
            time_s, has_own = row["time_s"], row["stream"] == "commit" and row["step"] == step
        self._started = time.monotonic() - time_s
        if not has_own:  # the earlier start ended before it could write it
            self.add("commit", step, {})

    def _remember(self, row: dict[str, Any]) -> None:
        self.latest[row["stream"]] = row
        if row["stream"] == "rollout":
            self.rewards.append(row["reward/mean"])


def rollout_row(finished: list[Trace], admitted: list[Group], version: int) -> dict[str, float]:
    """What happened in the rollouts of one batch.

    Args:
        finished: valid traces that ended for this batch, stale ones included.
        admitted: the groups that train.
        version: the policy version about to be trained.
    """
    traces = [trace for group in admitted for trace in group.traces]
    shaped = {sample.trace_id: sample.reward for group in admitted for sample in group.samples}
    staleness = [version - trace.oldest_version for trace in traces]
    row = {
        "reward/mean": _mean([t.reward for t in finished]),
        "reward/mean_admitted": _mean([t.reward for t in traces]),
        "reward/shaped_mean": _mean(list(shaped.values())),
        "rollout/length": _mean([t.num_action_tokens for t in traces]),
        "rollout/turns": _mean([t.num_turns for t in traces]),
        "rollout/duration_s": _mean([t.duration_s for t in traces]),
        "rollout/staleness": _mean(staleness),
        "rollout/staleness_max": float(max(staleness, default=0)),
        "rollout/mixed_version_traces": float(sum(len(versions_of(t)) > 1 for t in traces)),
        "rollout/num_traces": float(len(traces)),
    }
    for reason in StopReason:
        row[f"rollout/stop/{reason}"] = float(sum(t.stop_reason is reason for t in traces))
    return row


def scoring_row(step: int, samples: list[TrainingSample]) -> dict[str, float]:
    """How many steps the critic that scored a batch was behind the critic that a step before it left; {} without one.

    Args:
        step: the step that the batch trains: so many critic grids come before its own.
        samples: the batch.
    """
    behind = [step - sample.critic_step for sample in samples if sample.critic_step >= 0]
    return {"credit/critic_steps_behind": _mean(behind)} if behind else {}


def versions_of(trace: Trace) -> set[int]:
    """Policy versions that sampled tokens of this trace."""
    return {span.version for branch in trace.branches for span in branch.version_spans}


def trace_row(step: int, trace: Trace, sample: TrainingSample) -> dict[str, Any]:
    """One trained branch as `traces.jsonl` keeps it."""
    branch = sample.branch
    return {
        "step": step,
        "trace_id": trace.trace_id,
        "task_id": trace.task_id,
        "reward": trace.reward,
        "shaped_reward": sample.reward,
        "stop_reason": str(trace.stop_reason),
        "num_turns": trace.num_turns,
        "token_ids": branch.token_ids.tolist(),
        "action_mask": branch.action_mask.astype(int).tolist(),
        "logprobs": [float(x) for x in branch.logprobs],
        "version_spans": [list(span) for span in branch.version_spans],
        "values": _floats(sample.values),
        "bootstrap_value": sample.bootstrap_value,
        "critic_step": sample.critic_step,
        "advantages": _floats(sample.advantages),
        "returns": _floats(sample.returns),
    }


def _floats(array: np.ndarray | None) -> list[float] | None:
    return None if array is None else [float(f"{x:.9g}") for x in array]


def _mean(numbers: list[Any]) -> float:
    return float(np.mean(np.array(numbers, dtype=np.float64))) if numbers else 0.0
