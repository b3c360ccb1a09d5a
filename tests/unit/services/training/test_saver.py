"""Checkpoints on request, in a group of one: one after another, of the step that is done, before a grid that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from services.config.system import RuntimeConfig
from services.model.mesh import Mesh
from services.runtime.manifests import survey
from services.runtime.ports import PortReservation
from services.training.board import StatusBoard
from services.training.checkpoint import load
from services.training.farewell import Farewell
from services.training.group import TrainGroup
from services.training.parts import Part
from services.training.ranks import Ranks
from services.training.saver import Saver
from services.transport.grid_receiver import GridReceiver
from services.transport.grid_sender import GridSender
from services.wire.grids import GridItem
from tests.grids import make_item
from tests.runs import wait_until
from tests.unit.services.training.test_optimizer import linear, micro_batch, model_of, optimizer_of

DEADLINE_S = 20.0


class Adder:
    """A real optimizer on a real model; every grid is one update."""

    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = optimizer_of(self.model)
        self.trained: list[int] = []

    def train(self, item: GridItem) -> dict[str, float]:
        self.optimizer.update([micro_batch()], linear(self.model))
        self.trained.append(item.header.step)
        return {}

    def after_step(self, step: int) -> None:
        pass

    def part(self) -> Part:
        return Part("critic", self.model, self.optimizer, Mesh(), Ranks())


def part_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f".step_{step:06d}.part" / "critic"


def drive(saver: Saver) -> None:
    """What a group's loop does with it."""
    wait_until(saver.pending, deadline_s=DEADLINE_S, what="the saver")
    saver.execute(saver.next_command())


def test_an_answer_comes_when_the_manifest_is_there(tmp_path: Path) -> None:
    adder, board = Adder(), StatusBoard("critic")
    saver = Saver(adder.part(), board, tmp_path)
    assert not saver.pending()
    answer = saver.submit(0)
    drive(saver)
    status, body = (answer.result(DEADLINE_S).status, answer.result().body)
    manifest, _ = survey(part_dir(tmp_path, 0), None, exact=True)
    assert manifest.meta == {"role": "critic", "step": 0, "steps_done": 0}
    manifest_bytes = (part_dir(tmp_path, 0) / "manifest.json").stat().st_size
    num_bytes = sum(entry.size for entry in manifest.files.values()) + manifest_bytes
    assert (status, body) == (200, {"step": 0, "role": "critic", "num_bytes": num_bytes})


def test_steps_without_a_grid_of_its_own_are_not_counted(tmp_path: Path) -> None:
    """Scenario: 3 steps of the run come before the role's first. Result: steps 0 to 3 are its step 0, 5 its step 2."""
    board = StatusBoard("critic")
    saver = Saver(Adder().part(), board, tmp_path, steps_before=3)

    def ask(step: int) -> int:
        answer = saver.submit(step)
        drive(saver)
        return answer.result(DEADLINE_S).status

    assert [ask(step) for step in (0, 3, 4)] == [200, 200, 409]
    board.progress(steps_done=2)
    assert [ask(step) for step in (5, 3, 6)] == [200, 409, 409]
    assert not part_dir(tmp_path, 6).exists()


def test_two_requests_of_one_step_are_written_one_after_the_other(tmp_path: Path) -> None:
    """A client that asks again must not have two writers in one folder."""
    adder, board = Adder(), StatusBoard("critic")
    saver = Saver(adder.part(), board, tmp_path)
    answers = [saver.submit(0) for _ in range(3)]
    for _ in answers:
        drive(saver)
    assert [answer.result(DEADLINE_S).status for answer in answers] == [200, 200, 200]
    fresh = Adder()
    load(part_dir(tmp_path, 0), fresh.part(), seed=0)


def test_an_asker_that_went_away_disturbs_nobody(tmp_path: Path) -> None:
    saver = Saver(Adder().part(), StatusBoard("critic"), tmp_path)
    gone, answer = saver.submit(9), saver.submit(0)
    assert gone.cancel()
    for _ in range(2):
        drive(saver)
    assert answer.result(DEADLINE_S).status == 200


async def test_a_checkpoint_goes_before_a_grid_that_waits(tmp_path: Path) -> None:
    """Scenario: grid 0 and a request for step 0 wait together. Result: the weights before grid 0 are saved, then it
    trains, and the next request gets step 1."""
    adder, board, stop = Adder(), StatusBoard("critic"), threading.Event()
    before = [parameter.detach().clone() for parameter in adder.model.parameters()]
    saver = Saver(adder.part(), board, tmp_path)
    with PortReservation(["grid"]) as reserved:
        url = f"tcp://127.0.0.1:{reserved.ports['grid']}"
    sender = GridSender(url, stream="critic", run_id="run", epoch=1, num_data_ranks=1)
    receiver = GridReceiver(url, stream="critic", run_id="run", epoch=1, data_rank=0, num_data_ranks=1)
    try:
        await sender.send([make_item(stream="critic")], deadline_s=DEADLINE_S)
        await until(lambda: receiver.waiting_step() == 0)
        first = saver.submit(0)
        ledger = tmp_path / "ledger.jsonl"
        board.progress(pids=[1])
        farewell = Farewell(stop, board, "http://127.0.0.1:1", grace_s=1.0)
        settings = {"runtime": RuntimeConfig(), "farewell": farewell, "ledger": ledger, "saver": saver}
        group = TrainGroup(adder, Ranks(), Mesh(), receiver, board, **settings)
        loop = threading.Thread(target=group.run, daemon=True)
        loop.start()
        assert (await asyncio.wrap_future(first)).status == 200
        await until(lambda: board.steps_done == 1)
        assert (await asyncio.wrap_future(saver.submit(1))).status == 200
    finally:
        stop.set()
        receiver.close()
        await sender.close()
    loop.join(timeout=DEADLINE_S)
    assert adder.trained == [0]
    for step, expected in ((0, before), (1, [parameter.detach() for parameter in adder.model.parameters()])):
        fresh = Adder()
        load(part_dir(tmp_path, step), fresh.part(), seed=0)
        assert all(torch.equal(a, b) for a, b in zip(fresh.model.parameters(), expected, strict=True))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)
