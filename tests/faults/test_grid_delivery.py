"""Grids over real sockets, cut, killed, repeated, forged: each (stream, step, rank) arrives once, in order, whole."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from services.transport.grid_receiver import GridReceiver
from services.transport.grid_sender import GridSender
from services.transport.link import Ack, Hello, Nack, decode_control
from services.wire.codec import encode_item
from services.wire.errors import ConfigError, ContractError, DeadlineExceeded, DependencyLost, GridConflict
from services.wire.grids import GridItem
from tests.faults.tcp_proxy import TcpProxy
from tests.grids import make_item

LARGE = (100_000, 80_000)  # tokens: an item of 2.5 MB
CHILD = Path(__file__).parent / "receiver_child.py"


@asynccontextmanager
async def open_sender(address: str = "tcp://127.0.0.1:0", **settings: Any) -> AsyncIterator[GridSender]:
    settings = {"stream": "policy", "run_id": "run", "epoch": 1, "num_data_ranks": 1} | settings
    sender = GridSender(address, **settings)
    try:
        yield sender
    finally:
        await sender.close()


@contextmanager
def open_receiver(address: str, **settings: Any):
    settings = {"stream": "policy", "run_id": "run", "epoch": 1, "data_rank": 0, "num_data_ranks": 1} | settings
    receiver = GridReceiver(address, **settings)
    try:
        yield receiver
    finally:
        started_s = time.monotonic()
        receiver.close()
        assert time.monotonic() - started_s < 3


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


async def take(receiver: GridReceiver, step: int, deadline_s: float = 10) -> GridItem:
    return await asyncio.to_thread(receiver.take, step, deadline_s=deadline_s)


async def until(condition: Callable[[], bool], deadline_s: float = 10) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# The calm case


async def test_every_rank_gets_its_own_item_of_every_step_in_order():
    async with open_sender(num_data_ranks=2) as sender:
        with (
            open_receiver(sender.address, data_rank=0, num_data_ranks=2) as first,
            open_receiver(sender.address, data_rank=1, num_data_ranks=2) as second,
        ):
            for step in range(4):
                items = [make_item(step=step, data_rank=r, num_data_ranks=2, seed=10 * step + r) for r in range(2)]
                await sender.send(items, deadline_s=10)
                assert first.waiting_step() == second.waiting_step() == step
                assert (await take(first, step)).header == items[0].header
                assert (await take(second, step)).header == items[1].header
                assert first.waiting_step() is None
            assert first.counters == second.counters == {"accepted": 4}
            status = sender.status()
            assert status["unacknowledged"] == []
            assert [rank["expected_step"] for rank in status["ranks"]] == [4, 4]


async def test_a_receiver_may_join_long_after_the_first_send():
    async with open_sender() as sender:
        sending = asyncio.create_task(sender.send([make_item()], deadline_s=10))
        await asyncio.sleep(0.5)
        assert not sending.done()
        with open_receiver(sender.address) as receiver:
            await sending
            assert (await take(receiver, 0)).header.step == 0


async def test_a_receiver_may_start_long_before_the_sender():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with open_receiver(address) as receiver:
        await asyncio.sleep(0.5)
        async with open_sender(address) as sender:
            await sender.send([make_item()], deadline_s=10)
            assert (await take(receiver, 0)).header.step == 0


async def test_nothing_is_sent_beyond_the_credit():
    """Scenario: credit 1, step 0 lies untaken. Result: step 1 waits at the sender until step 0 is taken."""
    async with open_sender() as sender:
        with open_receiver(sender.address) as receiver:
            await sender.send([make_item(step=0)], deadline_s=10)
            sending = asyncio.create_task(sender.send([make_item(step=1)], deadline_s=10))
            await asyncio.sleep(0.7)
            assert sender.status()["unacknowledged"][0]["num_sends"] == 0
            await take(receiver, 0)
            await sending
            await take(receiver, 1)
            assert receiver.counters == {"accepted": 2}


async def test_the_two_streams_are_independent():
    """Scenario: the policy's ranks are away. Result: the critic's grids flow all the same."""
    async with open_sender(stream="policy") as policy, open_sender(stream="critic") as critic:
        waiting = asyncio.create_task(policy.send([make_item(stream="policy")], deadline_s=20))
        with open_receiver(critic.address, stream="critic") as receiver:
            for step in range(3):
                await critic.send([make_item(stream="critic", step=step)], deadline_s=10)
                await take(receiver, step)
        assert not waiting.done()
        with open_receiver(policy.address) as receiver:
            await waiting
            await take(receiver, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Cuts and kills


async def test_a_link_cut_twice_in_the_middle_of_a_frame_loses_and_repeats_nothing():
    async with open_sender() as sender, TcpProxy(port_of(sender.address)) as proxy:
        proxy.cuts = [1_000_000, 2_000_000]
        with open_receiver(proxy.address) as receiver:
            started_s = time.monotonic()
            for step in range(3):
                item = make_item(step=step, lengths=LARGE, seed=step)
                await sender.send([item], deadline_s=30)
                assert (await take(receiver, step)).header == item.header
            assert time.monotonic() - started_s < 20
            assert proxy.num_cut == 2
            assert receiver.counters == {"accepted": 3}
            assert sender.status()["counters"]["sent_again"] >= 2


async def test_a_link_that_goes_silent_without_closing_is_replaced():
    """Scenario: bytes vanish both ways, no reset. Result: the missed pulse cuts it, the item goes again."""
    async with open_sender() as sender, TcpProxy(port_of(sender.address)) as proxy:
        with open_receiver(proxy.address) as receiver:
            await sender.send([make_item(step=0)], deadline_s=10)
            await take(receiver, 0)
            proxy.hold_all()
            await sender.send([make_item(step=1)], deadline_s=30)
            await take(receiver, 1)
            assert receiver.counters["accepted"] == 2


async def test_a_lost_acknowledgement_is_made_up_by_the_next_hello():
    """Scenario: the item arrives, its Ack is swallowed, the link is cut. Result: acknowledged, trained once."""
    async with open_sender(resend_after_s=30) as sender, TcpProxy(port_of(sender.address)) as proxy:
        proxy.swallow_up_after = 1_000_000
        with open_receiver(proxy.address) as receiver:
            sending = asyncio.create_task(sender.send([make_item(lengths=LARGE)], deadline_s=20))
            await asyncio.wait_for(proxy.swallowed.wait(), 10)
            await take(receiver, 0)
            assert not sending.done()
            proxy.swallow_up_after = None
            proxy.cut_all()
            await sending
            assert receiver.counters == {"accepted": 1}
            assert receiver.waiting_step() is None


@asynccontextmanager
async def open_child(address: str, ledger: Path, mode: str) -> AsyncIterator[asyncio.subprocess.Process]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), address, str(ledger), mode, stdout=asyncio.subprocess.PIPE, env=env
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def says(child: asyncio.subprocess.Process, line: str) -> None:
    assert child.stdout is not None
    async with asyncio.timeout(20):
        while (await child.stdout.readline()).decode().strip() != line:
            assert not child.stdout.at_eof()


@pytest.mark.parametrize(("mode", "done"), [("hold", "received"), ("train", "trained 0")])
async def test_a_receiver_killed_after_receipt_and_before_its_acknowledgement_trains_each_step_once(
    tmp_path: Path, mode: str, done: str
):
    """Scenario: the item is in the process, its Ack cannot pass, SIGKILL; a new process takes the rank over.

    Result: the ledger has every step once, whether the first process had trained it or not.
    """
    ledger = tmp_path / "ledger"
    ledger.touch()
    async with open_sender() as sender, TcpProxy(port_of(sender.address)) as proxy:
        proxy.swallow_up_after = 1_000_000
        items = [make_item(step=step, lengths=LARGE, seed=step) for step in range(3)]
        sending = asyncio.create_task(sender.send([items[0]], deadline_s=60))
        async with open_child(proxy.address, ledger, mode) as child:
            await says(child, done)
            await asyncio.wait_for(proxy.swallowed.wait(), 10)
            assert not sending.done()
            child.send_signal(signal.SIGKILL)
            await child.wait()
        proxy.swallow_up_after = None
        async with open_child(proxy.address, ledger, "train") as child:
            await sending
            for step in (1, 2):
                await sender.send([items[step]], deadline_s=30)
                await says(child, f"trained {step}")
        assert ledger.read_text().splitlines() == [f"policy {i.header.step} 0 {i.header.digest}" for i in items]


# ---------------------------------------------------------------------------------------------------------------------
# What a receiver does with items it must not train


class RawSender:
    """A hand-made sending end that says what no GridSender would."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.RCVTIMEO, 10_000)
        self.socket.set(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def __enter__(self) -> RawSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def hear(self) -> Hello | Ack | Nack:
        _, *frames = self.socket.recv_multipart()
        return decode_control(frames)

    def say(self, frames: list[bytes]) -> None:
        self.socket.send_multipart([b"policy-0", *frames])

    def send(self, item: GridItem) -> Ack | Nack:
        """Send an item; the answer to it."""
        self.say([bytes(frame) for frame in encode_item(item)])
        while True:
            answer = self.hear()
            if not isinstance(answer, Hello):
                return answer


@contextmanager
def raw_link(**settings: Any):
    with RawSender() as sender, open_receiver(sender.address, **settings) as receiver:
        sender.hear()
        yield sender, receiver


def test_a_duplicate_item_is_acknowledged_and_dropped():
    with raw_link() as (sender, receiver):
        first, second = sender.send(make_item()), sender.send(make_item())
        assert isinstance(first, Ack) and isinstance(second, Ack)
        assert first.digest == second.digest
        receiver.take(0, deadline_s=5)
        assert isinstance(sender.send(make_item()), Ack)
        assert receiver.waiting_step() is None
        assert receiver.counters == {"accepted": 1, "duplicate": 2}


@pytest.mark.parametrize("taken", [False, True])
def test_the_same_step_with_other_content_is_a_conflict_and_ends_the_receiver(taken: bool):
    with raw_link() as (sender, receiver):
        sender.send(make_item(seed=1))
        if taken:
            receiver.take(0, deadline_s=5)
        answer = sender.send(make_item(seed=2))
        assert isinstance(answer, Nack) and answer.reason == "conflict"
        assert isinstance(receiver.failure, GridConflict)
        with pytest.raises(GridConflict):
            receiver.take(1, deadline_s=5)
        answer = sender.send(make_item(step=1))
        assert isinstance(answer, Nack) and answer.reason == "no_credit"


def test_a_late_item_is_dropped_and_counted():
    with raw_link(first_step=5) as (sender, receiver):
        answer = sender.send(make_item(step=4))
        assert isinstance(answer, Nack)
        assert (answer.reason, answer.position.expected_step) == ("late", 5)
        assert receiver.waiting_step() is None
        assert receiver.counters == {"late": 1}


def test_an_item_of_an_old_epoch_is_dropped_and_counted():
    with raw_link(epoch=2) as (sender, receiver):
        answer = sender.send(make_item(epoch=1))
        assert isinstance(answer, Nack) and answer.reason == "old_epoch"
        assert receiver.waiting_step() is None
        assert receiver.counters == {"old_epoch": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "other"},
        {"epoch": 2},
        {"stream": "critic"},
        {"data_rank": 1, "num_data_ranks": 2},
        {"num_data_ranks": 2},
    ],
)
def test_an_item_for_somebody_else_is_dropped_and_counted(changes: dict):
    with raw_link() as (sender, receiver):
        answer = sender.send(make_item(**changes))
        assert isinstance(answer, Nack) and answer.reason == "foreign"
        assert receiver.waiting_step() is None
        assert receiver.counters == {"foreign": 1}


def test_a_skipped_step_is_refused_naming_the_expected_one():
    with raw_link(credit=2) as (sender, receiver):
        answer = sender.send(make_item(step=1))
        assert isinstance(answer, Nack)
        assert (answer.reason, answer.position.expected_step) == ("early", 0)
        assert isinstance(sender.send(make_item(step=0)), Ack)
        assert isinstance(sender.send(make_item(step=1)), Ack)
        assert [receiver.take(step, deadline_s=5).header.step for step in (0, 1)] == [0, 1]


def test_an_item_beyond_the_credit_is_refused():
    with raw_link() as (sender, receiver):
        sender.send(make_item(step=0))
        answer = sender.send(make_item(step=1))
        assert isinstance(answer, Nack) and answer.reason == "no_credit"
        receiver.take(0, deadline_s=5)
        assert isinstance(sender.send(make_item(step=1)), Ack)


class Bomb:
    def __reduce__(self):
        return (os._exit, (99,))


def test_garbage_and_pickles_to_a_receiver_are_dropped_and_counted():
    item = [bytes(frame) for frame in encode_item(make_item())]
    messages = [
        [b""],
        [os.urandom(500)],
        [pickle.dumps(Bomb())],
        [item[0], pickle.dumps(Bomb()), *item[2:]],
        item[:-1],
        [*item[:3], item[3][:-1] + b"?", *item[4:]],
    ]
    with raw_link() as (sender, receiver):
        for message in messages:
            sender.say(message)
        sender.say([b"x"] * 40)  # more frames than any item has
        assert isinstance(sender.send(make_item()), Ack)
        assert receiver.failure is None
        assert receiver.counters == {"undecodable": len(messages), "oversized": 1, "accepted": 1}


def test_an_oversized_frame_is_not_taken_into_memory_and_the_link_recovers():
    with raw_link(max_item_bytes=200_000) as (sender, receiver):
        sender.say([bytes(2_000_000)])
        while True:  # libzmq drops the connection, the receiver makes a new one
            message = sender.hear()
            if isinstance(message, Hello) and message.connection == 2:
                break
        assert isinstance(sender.send(make_item()), Ack)
        sender.say([bytes(150_000), bytes(150_000)])  # each fits, together they do not
        sender.say([b"x"])
        deadline_s = time.monotonic() + 10
        while "undecodable" not in receiver.counters:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert receiver.counters == {"accepted": 1, "oversized": 1, "undecodable": 1}


def test_an_item_too_large_for_the_receiver_ends_in_a_named_deadline():
    async def scenario() -> None:
        async with open_sender() as sender:
            with open_receiver(sender.address, max_item_bytes=100_000) as receiver:
                with pytest.raises(DeadlineExceeded, match="data rank 0 to acknowledge policy step 0"):
                    await sender.send([make_item(lengths=LARGE)], deadline_s=2)
                assert receiver.waiting_step() is None

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------------------------
# What a sender does with peers that are wrong or away


async def test_garbage_to_a_sender_is_dropped_and_counted():
    async with open_sender() as sender:
        with socket.create_connection(("127.0.0.1", port_of(sender.address))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 1000)
            stranger.set(zmq.IDENTITY, b"policy-7")
            stranger.connect(sender.address)
            for frames in ([b""], [os.urandom(100)], [pickle.dumps(Bomb())], [b"a", b"b"]):
                stranger.send_multipart(frames)
            await until(lambda: sender.status()["counters"].get("garbage", 0) >= 4)
        with open_receiver(sender.address) as receiver:
            await sender.send([make_item()], deadline_s=10)
            await take(receiver, 0)


@pytest.mark.parametrize(
    "settings",
    [{"epoch": 0}, {"epoch": 2}, {"run_id": "other"}, {"data_rank": 1, "num_data_ranks": 2}, {"stream": "critic"}],
)
async def test_a_receiver_of_another_run_epoch_or_layout_gets_nothing(settings: dict):
    async with open_sender() as sender:
        with open_receiver(sender.address, **settings) as receiver:
            with pytest.raises(DeadlineExceeded, match="which never connected"):
                await sender.send([make_item()], deadline_s=1)
            assert receiver.counters == {}
            assert sender.status()["counters"]["foreign"] >= 1


async def test_a_silent_rank_is_named_with_stream_and_step_at_the_deadline():
    async with open_sender(stream="critic", num_data_ranks=2) as sender:
        items = [make_item(stream="critic", data_rank=r, num_data_ranks=2) for r in range(2)]
        with open_receiver(sender.address, stream="critic", data_rank=0, num_data_ranks=2) as receiver:
            started_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="data rank 1 to acknowledge critic step 0, which never"):
                await sender.send(items, deadline_s=1)
            assert time.monotonic() - started_s < 3
            assert receiver.waiting_step() == 0
            assert sender.status()["unacknowledged"] == []


async def test_a_rank_that_went_away_is_named_with_the_step_it_expects():
    async with open_sender() as sender:
        with open_receiver(sender.address) as receiver:
            await sender.send([make_item(step=0)], deadline_s=10)
            await take(receiver, 0)
            await until(lambda: sender.status()["ranks"][0]["credit"] == 1)
        with pytest.raises(DeadlineExceeded, match="policy step 1, which expects step 1, last heard"):
            await sender.send([make_item(step=1)], deadline_s=1)


async def test_a_step_out_of_order_is_never_sent_and_ends_in_a_named_deadline():
    async with open_sender() as sender:
        with open_receiver(sender.address, credit=2) as receiver:
            with pytest.raises(DeadlineExceeded, match="policy step 2, which expects step 0"):
                await sender.send([make_item(step=2)], deadline_s=1)
            assert receiver.counters == {}


async def test_other_content_for_a_delivered_step_raises_grid_conflict():
    async with open_sender() as sender:
        with open_receiver(sender.address) as receiver:
            await sender.send([make_item(seed=1)], deadline_s=10)
            await take(receiver, 0)
            with pytest.raises(GridConflict, match="policy step 0"):
                await sender.send([make_item(seed=2)], deadline_s=10)


async def test_a_step_that_a_restarted_receiver_has_behind_it_counts_as_delivered():
    async with open_sender() as sender:
        with open_receiver(sender.address, first_step=3) as receiver:
            await sender.send([make_item(step=2)], deadline_s=10)
            assert receiver.counters == {"late": 1}
            assert sender.status()["counters"]["refused_late"] == 1


@pytest.mark.parametrize(
    "items",
    [
        [],
        [make_item(num_data_ranks=2)],
        [make_item(run_id="other")],
        [make_item(epoch=2)],
        [make_item(stream="critic")],
        [make_item(), make_item()],
    ],
)
async def test_a_sender_refuses_what_is_not_one_of_its_grids(items: list[GridItem]):
    async with open_sender() as sender:
        with pytest.raises(ContractError):
            await sender.send(items, deadline_s=1)
        assert sender.status()["unacknowledged"] == []


async def test_items_of_two_steps_are_refused():
    async with open_sender(num_data_ranks=2) as sender:
        items = [make_item(data_rank=r, num_data_ranks=2, step=r) for r in range(2)]
        with pytest.raises(ContractError, match="different grids"):
            await sender.send(items, deadline_s=1)


async def test_a_step_under_way_cannot_be_sent_twice_and_closing_ends_its_wait():
    sender = GridSender("tcp://127.0.0.1:0", stream="policy", run_id="run", epoch=1, num_data_ranks=1)
    sending = asyncio.create_task(sender.send([make_item()], deadline_s=60))
    await asyncio.sleep(0.1)
    with pytest.raises(ContractError, match="being sent already"):
        await sender.send([make_item()], deadline_s=1)
    started_s = time.monotonic()
    await sender.close()
    with pytest.raises(DependencyLost, match="closed"):
        await sending
    assert time.monotonic() - started_s < 3


async def test_a_taken_port_is_named():
    async with open_sender() as sender:
        with pytest.raises(DependencyLost, match=str(port_of(sender.address))):
            GridSender(sender.address, stream="policy", run_id="run", epoch=1, num_data_ranks=1)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://10.0.0.1:5000", "tcp://*:0", "ipc:///tmp/x", "5000"])
async def test_without_a_key_only_loopback_addresses_are_taken(address: str):
    with pytest.raises(ConfigError, match=r"is every interface|no token|not tcp://|no IP address"):
        GridSender(address, stream="policy", run_id="run", epoch=1, num_data_ranks=1)
    with pytest.raises(ConfigError, match=r"loopback|not tcp://"):
        GridReceiver(address, stream="policy", run_id="run", epoch=1, data_rank=0, num_data_ranks=1)


# ---------------------------------------------------------------------------------------------------------------------
# Taking


def test_taking_ends_at_its_deadline_naming_stream_step_and_rank():
    with raw_link() as (_, receiver):
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="policy grid of step 0 for data rank 0"):
            receiver.take(0, deadline_s=0.3)
        assert 0.3 <= time.monotonic() - started_s < 2


def test_taking_another_step_than_the_oldest_is_an_error_at_once():
    with raw_link() as (sender, receiver):
        sender.send(make_item())
        with pytest.raises(ContractError, match="step 1 was asked for, the oldest item is of step 0"):
            receiver.take(1, deadline_s=60)


async def test_closing_a_receiver_ends_a_wait_for_an_item():
    with raw_link() as (_, receiver):
        waiting = asyncio.create_task(take(receiver, 0, deadline_s=60))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(receiver.close)
        with pytest.raises(DependencyLost, match="closed"):
            await waiting


def test_closing_without_a_sender_is_quick_and_may_be_repeated():
    receiver = GridReceiver("tcp://127.0.0.1:9", stream="policy", run_id="run", epoch=1, data_rank=0, num_data_ranks=1)
    started_s = time.monotonic()
    receiver.close()
    receiver.close()
    assert time.monotonic() - started_s < 2
