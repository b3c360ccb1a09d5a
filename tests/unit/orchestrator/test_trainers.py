"""A train group's metrics rows: each is handed out once, also those that its status no longer carries."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from orchestrator.trainers import TrainClient
from services.training.board import StatusBoard
from services.training.control import control_app
from services.wire.errors import DeadlineExceeded
from services.wire.messages import ROWS_KEPT
from tests.stand_ins import Server


def finish(board: StatusBoard, *steps: int) -> None:
    for step in steps:
        board.add_row(step, {"value/loss": float(step)})
        board.progress(steps_done=step + 1)


async def test_a_row_that_was_seen_once_is_there_until_it_is_taken(server: Server) -> None:
    """Scenario: somebody asks after step 1, then so many steps follow that the status forgets steps 0 and 1."""
    board = StatusBoard("critic")
    server.mount(critic=control_app(board, title="critic"))
    async with aiohttp.ClientSession() as session:
        client = TrainClient(session, "critic", f"{server.url}/critic")
        finish(board, 0, 1)
        await client.status()
        finish(board, *range(2, ROWS_KEPT + 2))
        assert list(board.snapshot().rows) == [str(step) for step in range(2, ROWS_KEPT + 2)]
        for step in range(ROWS_KEPT + 2):
            assert await client.wait_step(step, deadline_s=5) == {"value/loss": float(step)}


async def test_a_row_is_taken_once_and_those_before_it_are_let_go(server: Server) -> None:
    board = StatusBoard("critic")
    server.mount(critic=control_app(board, title="critic"))
    async with aiohttp.ClientSession() as session:
        client = TrainClient(session, "critic", f"{server.url}/critic")
        finish(board, 0, 1, 2)
        await client.status()
        assert client.take_row(1) == {"value/loss": 1.0}
        await client.status()  # still carries all three
        assert client.take_row(1) == {} and client.take_row(0) == {}
        assert client.take_row(2) == {"value/loss": 2.0}


async def test_a_step_that_does_not_come_is_named(server: Server) -> None:
    board = StatusBoard("critic")
    server.mount(critic=control_app(board, title="critic"))
    async with aiohttp.ClientSession() as session:
        client = TrainClient(session, "critic", f"{server.url}/critic")
        finish(board, 0)
        waiting = asyncio.create_task(client.wait_step(1, deadline_s=0.3))
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.3 s for critic to finish step 1"):
            await waiting
