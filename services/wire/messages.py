"""Small messages: what the scoring route and the control routes say.

Notable:
- `critic_step` counts critic grids fully applied (all K updates); `critic_updates` counts optimizer steps.
- A trainer's `/status` carries the metrics row of each finished step, because the orchestrator alone writes metrics.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

ROWS_KEPT = 8
"""Finished steps whose metrics rows a trainer's `/status` still carries."""


class ScoreReply(msgspec.Struct, frozen=True):
    """Reply to `POST /v1/score` with `batched_token_ids`; branches in the request's order."""

    values: list[list[float]]
    bootstrap_values: list[float]
    critic_step: int


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /load` to the value service."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """folder of an exported critic, below one of `value.load_roots`"""


class LoadReply(msgspec.Struct, frozen=True):
    """Its reply: the critic's weights are those of the folder."""

    critic_step: int
    """as before: the critic goes on from here"""
    num_loads: int
    """weights replaced since start"""
    run: str
    """name of the run that the critic was exported from"""
    source: str
    """where in that run's directory it was"""


class CheckpointRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /checkpoint` to a train group; the reply names `step`, `role` and `num_bytes`, or an `error`."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    """finished steps of the run, as in `checkpoints/step_000012`"""


class SleepReply(msgspec.Struct, frozen=True):
    """Reply to `POST /sleep` and `POST /wake_up` of a train group; the figures are rank 0's."""

    role: str
    """"policy" or "critic" """
    state: str
    """asleep | idle"""
    num_bytes: int
    """that moved; 0 where the group was so already"""
    seconds: float
    device_bytes: int
    """that torch holds on the GPU now; 0 on CPU"""


class TrainStatus(msgspec.Struct):
    """`GET /status` of a train group."""

    role: str
    """"policy" or "critic" """
    state: str
    """loading | idle | scoring | training | publishing | saving | falling asleep | asleep | waking up | stopping"""
    steps_done: int
    """grids fully applied: the critic's `critic_step`, the policy's version"""
    updates_done: int
    """optimizer steps taken"""
    waiting_for: str
    """name of what the group waits for, "" when it works"""
    last_progress_s: float
    """seconds since something was finished"""
    num_forwards: int = 0
    """scoring forwards run by rank 0 since start"""
    num_scored_tokens: int = 0
    num_trained_tokens: int = 0
    busy_s: float = 0.0
    rows: dict[str, dict[str, Any]] = {}
    """metrics rows of the last few finished steps, by step"""
    pids: list[int] = []
    """process ids by rank"""
    num_loads: int = 0
    """critic only: weights replaced by `POST /load` since start"""
    stop_requested: bool = False
    """a signal asked the group to end; it waits for a commit first"""
    published: dict[str, Any] = {}
    """policy only: {"version": n, "path": folder} of the newest complete snapshot"""
