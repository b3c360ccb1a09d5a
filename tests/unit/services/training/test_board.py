"""The status board: what a train group tells the world about itself."""

from __future__ import annotations

import threading
import time

import pytest

from services.training.board import ROWS_KEPT, StatusBoard


def test_a_new_board_is_loading_and_says_what_it_waits_for() -> None:
    status = StatusBoard("critic").snapshot()
    assert (status.role, status.state, status.steps_done, status.waiting_for) == ("critic", "loading", 0, "its model")


def test_a_state_and_what_is_waited_for_change_together() -> None:
    board = StatusBoard("policy")
    board.enter("idle", "a grid or a request")
    assert (board.snapshot().state, board.snapshot().waiting_for) == ("idle", "a grid or a request")
    board.enter("training")
    assert (board.snapshot().state, board.snapshot().waiting_for) == ("training", "")


@pytest.mark.parametrize(
    ("state", "busy"), [("scoring", True), ("training", True), ("publishing", True), ("idle", False)]
)
def test_only_work_counts_as_busy(state: str, busy: bool) -> None:
    board = StatusBoard("critic")
    board.enter(state)
    time.sleep(0.02)
    board.enter("idle")
    assert (board.snapshot().busy_s >= 0.02) == busy
    assert busy or board.snapshot().busy_s == 0


def test_progress_is_what_was_finished_and_not_the_change_of_a_state() -> None:
    board = StatusBoard("critic")
    time.sleep(0.02)
    board.enter("training")
    assert board.snapshot().last_progress_s >= 0.02
    board.progress(steps_done=1, updates_done=2)
    status = board.snapshot()
    assert status.last_progress_s < 0.02 and (status.steps_done, status.updates_done) == (1, 2)
    assert board.steps_done == 1


def test_the_rows_of_the_last_few_steps_are_kept_by_number_and_not_by_spelling() -> None:
    board = StatusBoard("critic")
    for step in range(ROWS_KEPT + 4):
        board.add_row(step, {"value/loss": float(step)})
    rows = board.snapshot().rows
    assert list(rows) == [str(step) for step in range(4, ROWS_KEPT + 4)]
    assert rows["11"] == {"value/loss": 11.0}


def test_a_snapshot_does_not_change_afterwards() -> None:
    board = StatusBoard("critic")
    board.add_row(0, {})
    before = board.snapshot()
    board.add_row(1, {})
    board.add(num_forwards=3)
    board.progress(pids=[1, 2])
    assert list(before.rows) == ["0"] and before.num_forwards == 0 and before.pids == []


def test_counters_survive_writers_and_readers_at_once() -> None:
    board = StatusBoard("critic")

    def write() -> None:
        for _ in range(500):
            board.add(num_forwards=1, num_scored_tokens=2)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        board.snapshot()
    status = board.snapshot()
    assert (status.num_forwards, status.num_scored_tokens) == (2000, 4000)


def test_a_snapshot_has_every_field_of_the_message() -> None:
    board = StatusBoard("policy")
    board.progress(published={"version": 1, "path": "x"}, pids=[7])
    status = board.snapshot()
    assert status.published == {"version": 1, "path": "x"} and status.pids == [7]
