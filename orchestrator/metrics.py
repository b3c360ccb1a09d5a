"""`metrics.jsonl` and `traces.jsonl`: one object a step and stream, written by the orchestrator alone.

Notable:
- Means are f64 sums over traces divided once; never means of means.
- Logs and metrics never stop a run: a full disk is warned about once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from loguru import logger

from orchestrator.producer import Group
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
        self.latest[stream] = full
        if stream == "rollout":
            self.rewards.append(full["reward/mean"])


def rollout_row(finished: list[Trace], admitted: list[Group], version: int) -> dict[str, float]:
    """What happened in the rollouts of one batch.

    Args:
        finished: valid traces that ended for this batch, stale ones included.
        admitted: the groups that train.
        version: the policy version about to be trained.
    """
    traces = [trace for group in admitted for trace in group.traces]
    staleness = [version - trace.oldest_version for trace in traces]
    row = {
        "reward/mean": _mean([t.reward for t in finished]),
        "reward/mean_admitted": _mean([t.reward for t in traces]),
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
