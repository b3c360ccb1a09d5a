"""How a train group ends that was asked to: not before the run had its chance to commit.

Notable:
- A signal to any rank counts for all: ranks tell each other after every command.
- While the orchestrator lives, it learns of the request by `/status`, commits between two steps and ends; only then, or
  when the grace time is nearly over, does the group end. Where there is no orchestrator any more, it ends at once.
"""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import urlsplit

from services.training.board import StatusBoard

SHARE = 0.8
"""Of the grace time that a group waits for the orchestrator's end."""
LOOK_INTERVAL_S = 0.25


class Farewell:
    """One rank's view of whether its group is to end."""

    def __init__(self, stop: threading.Event, board: StatusBoard, orchestrator_url: str, *, grace_s: float) -> None:
        """Watch for a request.

        Args:
            stop: Set by a signal to this rank.
            board: Tells the orchestrator.
            orchestrator_url: Where its status page listens while it lives.
            grace_s: `runtime.shutdown_grace_s`.
        """
        self._stop = stop
        self._board = board
        self._url = orchestrator_url
        self._grace_s = grace_s
        self._until: float | None = None
        self._next_look = 0.0

    @property
    def is_requested(self) -> bool:
        """Was this rank, or one that told it, asked to end."""
        return self._stop.is_set()

    def request(self) -> None:
        """Another rank was asked to end."""
        self._stop.set()

    def is_due(self) -> bool:
        """Is the group to end now (rank 0 asks)."""
        if not self._stop.is_set():
            return False
        now = time.monotonic()
        if self._until is None:
            self._until = now + SHARE * self._grace_s
            self._board.progress(stop_requested=True)
        if now >= self._next_look:
            self._next_look = now + LOOK_INTERVAL_S
            if not _listens(self._url):
                return True
        return now >= self._until


def _listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 0), timeout=1.0).close()
    except OSError:
        return False
    return True
