"""`metrics.jsonl` and `traces.jsonl`: one object a step and stream, written by the orchestrator alone.

Notable:
- Means are f64 sums over traces divided once; never means of means.
- Logs and metrics never stop a run: a full disk is warned about once.
- A resumed run cuts both where its commit was, and its clock goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from loguru import logger

from orchestrator.producer import Group
from services.runtime.durable import write_atomic
from services.wire.samples import StopReason, Trace, TrainingSample


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

    def cut(
        self, num_bytes: int, *, also: Callable[[dict[str, Any]], bool] = lambda row: False
    ) -> list[dict[str, Any]]:
        """Go on after so many bytes: what follows them is removed.

        Args:
            num_bytes: Whole rows; a shorter file (its end was lost in a crash) loses its last row if that is not whole.
            also: Rows after them that stay.

        Returns:
            The rows that stay.
        """
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        kept = data[: data.rfind(b"\n", 0, num_bytes) + 1]
        rows = [msgspec.json.decode(line, type=dict[str, Any]) for line in kept.splitlines()]
        for line in data[len(kept) : data.rfind(b"\n") + 1].splitlines():
            row = msgspec.json.decode(line, type=dict[str, Any])
            if also(row):
                rows.append(row)
                kept += line + b"\n"
        write_atomic(self._path, kept)
        return rows


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
        rows = self._rows.cut(num_bytes, also=lambda row: row["stream"] == "commit" and row["step"] == step)
        for row in rows:
            self._remember(row)
        self._started = time.monotonic() - max((row["time_s"] for row in rows), default=0.0)

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
