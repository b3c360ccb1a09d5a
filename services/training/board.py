"""What a train group tells the world about itself: one status, written by the command loop, read by HTTP threads."""

from __future__ import annotations

import threading
import time
from typing import Any

from services.wire.messages import ROWS_KEPT, TrainStatus


class StatusBoard:
    """A `TrainStatus` behind a lock."""

    def __init__(self, role: str) -> None:
        self._lock = threading.Lock()
        self._status = TrainStatus(
            role=role, state="loading", steps_done=0, updates_done=0, waiting_for="its model", last_progress_s=0.0
        )
        self._progress_at = time.monotonic()
        self._busy_since: float | None = None

    def enter(self, state: str, waiting_for: str = "") -> None:
        """Change state; time spent in scoring, training and publishing counts as busy."""
        now = time.monotonic()
        with self._lock:
            if self._busy_since is not None:
                self._status.busy_s += now - self._busy_since
            self._busy_since = now if state in ("scoring", "training", "publishing") else None
            self._status.state, self._status.waiting_for = state, waiting_for

    def progress(self, **changes: Any) -> None:
        """Record that something was finished, and any fields that changed with it."""
        with self._lock:
            self._progress_at = time.monotonic()
            for name, value in changes.items():
                setattr(self._status, name, value)

    def add(self, **amounts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._status, name, getattr(self._status, name) + amount)

    def add_row(self, step: int, row: dict[str, Any]) -> None:
        """Keep the metrics row of a finished step; the oldest of more than ROWS_KEPT goes."""
        with self._lock:
            rows = {**self._status.rows, str(step): row}
            self._status.rows = dict(sorted(rows.items(), key=lambda kv: int(kv[0]))[-ROWS_KEPT:])

    @property
    def state(self) -> str:
        """What the group does now."""
        return self._status.state

    @property
    def steps_done(self) -> int:
        """Grids fully applied."""
        return self._status.steps_done

    def snapshot(self) -> TrainStatus:
        """A copy for a reader."""
        with self._lock:
            copy = TrainStatus(**{name: getattr(self._status, name) for name in TrainStatus.__struct_fields__})
            copy.last_progress_s = round(time.monotonic() - self._progress_at, 3)
            return copy
