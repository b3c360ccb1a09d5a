"""Data ranks that were given grid items which do not belong together: named on all of them, before anything trains."""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from services.config.system import RuntimeConfig
from services.config.train import ValueConfig
from services.model.head import Critic
from services.model.mesh import Mesh
from services.model.shard import whole_tensor
from services.training.board import StatusBoard
from services.training.farewell import Farewell
from services.training.group import TrainGroup
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks
from services.transport.grid_receiver import GridReceiver
from services.wire.codec import digest_arrays
from services.wire.errors import PeerLost, PreflightError
from services.wire.grids import STREAM_ARRAYS, GridItem
from tests.faults.broken_sender import BrokenSender
from tests.grids import make_item
from tests.processes.cases import case, layouts
from tests.processes.cases.layouts import critic_in, write_model
from value_service.updater import Updater

DEADLINE_S = 8.0
"""Of the collectives: half of it is what a rank waits for its item."""


class Untouched:
    """A role that must not be asked for anything."""

    @property
    def optimizer(self) -> Optimizer:
        raise AssertionError("asked for its optimizer")

    def train(self, item: GridItem) -> dict[str, Any]:
        raise AssertionError("trained on grids at odds")

    def after_step(self, step: int) -> None:
        raise AssertionError("published a step that was not taken")


class Quiet:
    """No command besides training."""

    kind = "checkpoint"

    def pending(self) -> bool:
        return False

    def next_command(self) -> dict[str, Any]:
        raise AssertionError("nothing is pending")

    def execute(self, command: dict[str, Any]) -> None:
        raise AssertionError(f"not a command of this group: {command}")

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


def told_about(ranks: Ranks, folder: Path, items: dict[int, GridItem]) -> str:
    """What the command loop of this rank ends with when these items are all that comes."""
    sender = BrokenSender() if ranks.rank == 0 else None
    (address, *_) = ranks.gather_bytes(sender.address.encode() if sender is not None else b"")
    receiver = GridReceiver(
        address.decode(), stream="critic", run_id="run", epoch=1, data_rank=ranks.rank, num_data_ranks=ranks.size
    )
    group = TrainGroup(
        Untouched(),
        ranks,
        Mesh(ranks.rank, ranks.size),
        receiver,
        StatusBoard("critic"),
        runtime=RuntimeConfig(collective_deadline_s=DEADLINE_S, heartbeat_s=0.5),
        farewell=Farewell(threading.Event(), StatusBoard("critic"), "http://127.0.0.1:1", grace_s=1.0),
        ledger=folder / "ledger.jsonl",
        saver=Quiet(),
    )
    if sender is not None:
        sender.deliver("critic", items, deadline_s=20)
    try:
        group.run()
    except PreflightError as error:
        return str(error)
    finally:
        receiver.close()
        if sender is not None:
            sender.__exit__(None, None, None)
    return "nothing"


def item_of(data_rank: int, *, num_micro_batches: int) -> GridItem:
    """A valid item of so many micro-batches; those beyond the first are dummies."""
    item = make_item(stream="critic", data_rank=data_rank, num_data_ranks=2)
    (mini_batch,) = item.header.mini_batches
    counts = np.zeros(num_micro_batches, dtype=STREAM_ARRAYS["critic"]["sample_counts"])
    counts[0] = len(item.arrays["lengths"])
    arrays = item.arrays | {"sample_counts": counts}
    header = msgspec.structs.replace(
        item.header,
        mini_batches=[msgspec.structs.replace(mini_batch, num_micro_batches=num_micro_batches)],
        digest=digest_arrays(arrays),
    )
    return GridItem(header, arrays)


@case(2)
def another_count_of_micro_batches_is_named_with_both_counts_on_both_ranks(ranks: Ranks, folder: Path) -> None:
    items = {0: item_of(0, num_micro_batches=2), 1: item_of(1, num_micro_batches=3)}
    began = time.monotonic()
    told = told_about(ranks, folder, items)
    assert told == "step 0: ranks disagree about num_micro_batches: [2, 3]", told
    assert time.monotonic() - began < DEADLINE_S
    assert not (folder / "ledger.jsonl").exists(), "nothing was taken"


@case(2)
def a_rank_without_its_item_is_named_on_both_ranks(ranks: Ranks, folder: Path) -> None:
    told = told_about(ranks, folder, {0: item_of(0, num_micro_batches=2)})
    assert told == "step 0: rank(s) [1] received no grid item in time", told


@case(2)
def a_peer_that_misses_a_collective_of_torch_is_named_like_one_that_misses_ours(ranks: Ranks, folder: Path) -> None:
    """Rank 1 stays away from FSDP's gathering of weights, in a group whose deadline is a second."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    module = nn.Linear(8, 8)
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    if ranks.rank == 0:
        began = time.monotonic()
        try:
            with ranks.during("step 3", collective="a forward or backward pass"):
                module(torch.ones(1, 8))
        except PeerLost as error:
            assert "rank 0 lost its peers in a forward or backward pass of step 3" in str(error), error
            assert isinstance(error.__cause__, RuntimeError)
        else:
            raise AssertionError("nobody was missed")
        assert time.monotonic() - began < 20
    ranks.gather_ints([0])


@case(2)
def an_error_of_one_rank_alone_is_not_taken_for_a_lost_peer(ranks: Ranks, folder: Path) -> None:
    try:
        with ranks.during("step 3", collective="a forward or backward pass"):
            torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        assert "size" in str(error)
    else:
        raise AssertionError("no error at all")


@case(2, 4)
def bytes_are_shared_within_a_row_of_context_ranks(ranks: Ranks, folder: Path) -> None:
    first = ranks.rank // 2 * 2
    for payload in (b"", b"x" * 100_000):
        own = bytes([first]) + payload if payload else b""
        assert ranks.share_bytes(own if ranks.rank == first else None, first=first, last=first + 1) == own


@case(4)
def a_refused_update_names_the_sample_on_the_ranks_that_hold_it(ranks: Ranks, folder: Path) -> None:
    """Scenario: two data ranks of two context ranks; one target of 3e38 on data rank 0, at a sample's last token.

    Result: every rank joins the forward that finds the sample, and none but data rank 0's last context rank accuses it.
    """
    write_model(folder, "gemma2", ranks)
    mesh = Mesh.join(cp=2, ep=1, device=torch.device("cpu"))
    config = ValueConfig.model_validate({"optim": {"lr": 1e-2}, "model": {"cp": 2}})
    _, critic = critic_in(folder, mesh, config.model)
    before = {name: tensor.clone() for name, tensor in whole_state(critic).items()}
    item = layouts.grid("critic", mesh.num_data_ranks)[mesh.data_rank]
    lengths, returns = item.arrays["lengths"], item.arrays["returns"]
    (_, micro_batches), *_ = item.mini_batches()
    in_first_row = len(micro_batches[0].lengths)
    last = int(lengths[:in_first_row].sum()) - 1  # of the first row, held by its last context rank
    assert item.arrays["loss_mask"][last]
    if mesh.data_rank == 0:
        returns[last] = 3e38
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    row = Updater(critic, ranks, mesh, config).train(item)
    logger.remove(sink)
    assert row["value/nonfinite"] == 1
    after = whole_state(critic)
    assert all(torch.equal(before[name], after[name]) for name in before)
    told = ranks.gather_bytes("".join(lines).encode())[0].decode()
    size = int(ranks.gather_ints([int(lengths[in_first_row - 1])])[0][0])
    number = int(ranks.gather_ints([in_first_row - 1])[0][0])
    assert (
        f"rank 1: loss is inf at micro-batch 0 (step 0: sample {number} of {size} tokens, returns up to 3e+38" in told
    )
    assert told.count("sample") == 1 and "rank 0: loss" not in told and "rank 2: loss" not in told, told


def whole_state(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(parameter) for name, parameter in critic.named_parameters()}


@case(4)
def every_group_of_a_layout_gets_the_deadline(ranks: Ranks, folder: Path) -> None:
    """torch gives half an hour to the groups of a mesh, and a frozen peer that long to be missed."""
    mesh = Mesh.join(cp=2, ep=2, device=torch.device("cpu"))
    assert len(mesh.groups) == 3
    ranks.set_deadline(7, mesh.groups)
    try:
        for group in (dist.group.WORLD, *mesh.groups):
            assert group is not None
            deadline = group._get_backend(torch.device("cpu")).options._timeout
            assert deadline == datetime.timedelta(seconds=7), deadline
    finally:
        ranks.set_deadline(60, mesh.groups)
