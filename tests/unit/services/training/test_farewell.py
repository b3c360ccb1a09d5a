"""A group that was asked to end waits for the orchestrator's end, and no longer than it may."""

from __future__ import annotations

import socket
import threading
import time

from services.training.board import StatusBoard
from services.training.farewell import SHARE, Farewell


def farewell(url: str, grace_s: float = 60.0) -> tuple[Farewell, threading.Event, StatusBoard]:
    stop, board = threading.Event(), StatusBoard("critic")
    return Farewell(stop, board, url, grace_s=grace_s), stop, board


def test_nobody_asked() -> None:
    one, _, board = farewell("http://127.0.0.1:1")
    assert not one.is_due() and not one.is_requested
    assert not board.snapshot().stop_requested


def test_without_an_orchestrator_the_end_is_at_once() -> None:
    one, stop, _ = farewell("http://127.0.0.1:1")
    stop.set()
    assert one.is_due()


def test_a_living_orchestrator_is_told_and_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, stop, board = farewell(f"http://127.0.0.1:{server.getsockname()[1]}")
        stop.set()
        assert not one.is_due() and board.snapshot().stop_requested
    time.sleep(0.3)  # it looks four times a second
    assert one.is_due()


def test_the_wait_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, stop, _ = farewell(f"http://127.0.0.1:{server.getsockname()[1]}", grace_s=0.5)
        stop.set()
        started = time.monotonic()
        while not one.is_due():
            time.sleep(0.01)
        assert 0.9 * SHARE * 0.5 < time.monotonic() - started < 2


def test_a_request_to_another_rank_counts() -> None:
    one, _, _ = farewell("http://127.0.0.1:1")
    one.request()
    assert one.is_requested and one.is_due()
