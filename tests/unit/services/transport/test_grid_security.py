"""Grid links with keys: strangers of every kind are refused before our code hears them, and the two ends go on."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from services.runtime.auth import Token
from services.transport.curve import LinkKeys
from services.transport.grid_receiver import GridReceiver
from services.transport.grid_sender import GridSender
from services.transport.link import Hello, Position, encode_control
from services.wire.codec import encode_item
from services.wire.errors import ConfigError, DeadlineExceeded, DependencyLost
from tests.grids import make_item

KEY, OTHER = Token("k" * 43), Token("o" * 43)
LOOPBACK = "tcp://127.0.0.1:0"


class Bomb:
    def __reduce__(self):
        return (os._exit, (99,))


@asynccontextmanager
async def open_sender(key: Token | None = KEY, address: str = LOOPBACK, **settings: Any) -> AsyncIterator[GridSender]:
    sender = GridSender(address, stream="policy", run_id="run", epoch=1, num_data_ranks=1, key=key, **settings)
    try:
        yield sender
    finally:
        await sender.close()


@contextmanager
def open_receiver(address: str, key: Token | None = KEY) -> Iterator[GridReceiver]:
    receiver = GridReceiver(
        address, stream="policy", run_id="run", epoch=1, data_rank=0, num_data_ranks=1, key=key, credit=2
    )
    try:
        yield receiver
    finally:
        receiver.close()


async def until(condition: Callable[[], bool], deadline_s: float = 15) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def deliver(sender: GridSender, receiver: GridReceiver, step: int) -> None:
    await sender.send([make_item(step=step)], deadline_s=20)
    assert (await asyncio.to_thread(receiver.take, step, deadline_s=10)).header.step == step


def hello() -> bytes:
    position = Position(
        run_id="run", epoch=1, stream="policy", data_rank=0, num_data_ranks=1, expected_step=0, credit=8
    )
    return encode_control(Hello(position=position, instance="stranger", connection=1, have={}))


@contextmanager
def stranger(address: str, prepare: Callable[[zmq.Socket], None] = lambda _: None) -> Iterator[zmq.Socket]:
    """A raw peer that calls itself policy rank 0, and says a perfect Hello."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        peer.set(zmq.IDENTITY, b"policy-0")
        prepare(peer)
        peer.connect(address)
        for frames in ([hello()], [b"x"], [pickle.dumps(Bomb())]):
            peer.send_multipart(frames)
        yield peer


# ---------------------------------------------------------------------------------------------------------------------
# The two ends


async def test_with_the_same_key_grids_flow_and_nothing_is_refused() -> None:
    async with open_sender() as sender:
        with open_receiver(sender.address) as receiver:
            for step in range(3):
                await deliver(sender, receiver, step)
            assert receiver.counters == {"accepted": 3}
            assert sender.status()["counters"] == {"sent": 3, "acknowledged": 3}


@pytest.mark.parametrize(("theirs", "ours"), [(None, KEY), (OTHER, KEY), (KEY, None), (KEY, OTHER)])
async def test_ends_that_do_not_share_a_key_exchange_nothing_and_say_so(
    theirs: Token | None, ours: Token | None
) -> None:
    async with open_sender(ours) as sender:
        with open_receiver(sender.address, theirs) as receiver:
            with pytest.raises(DeadlineExceeded, match=r"data rank 0 .* which never connected"):
                await sender.send([make_item()], deadline_s=1.5)
            assert receiver.waiting_step() is None
            assert sender.status()["counters"].keys() == {"strangers"}
            assert receiver.counters.keys() <= {"refused_handshake"}


# ---------------------------------------------------------------------------------------------------------------------
# Strangers


def in_plain(_: zmq.Socket) -> None:
    pass


def with_a_key_of_its_own(peer: zmq.Socket) -> None:
    """It knows the sender's public key, as if that had leaked, but not the receivers' secret one."""
    sender_public = zmq.curve_public(z85.encode(KEY.derive("counterpoint grid sender")))
    public, secret = zmq.curve_keypair()
    peer.set(zmq.CURVE_SERVERKEY, sender_public)
    peer.set(zmq.CURVE_PUBLICKEY, public)
    peer.set(zmq.CURVE_SECRETKEY, secret)


@pytest.mark.parametrize(
    ("prepare", "counter"),
    [
        (in_plain, "strangers"),
        (LinkKeys(OTHER).secure_receiver, "strangers"),
        (with_a_key_of_its_own, "denied"),
    ],
)
async def test_a_stranger_receives_nothing_is_counted_and_does_not_disturb(prepare, counter: str) -> None:
    async with open_sender() as sender:
        with stranger(sender.address, prepare) as peer:
            await until(lambda: sender.status()["counters"].get(counter, 0) >= 1)
            sending = asyncio.create_task(sender.send([make_item()], deadline_s=20))
            await asyncio.sleep(0.5)
            assert not sending.done() and not peer.poll(0)
            assert sender.status()["ranks"][0]["silent_s"] is None  # its Hello was never heard
            with open_receiver(sender.address) as receiver:
                await sending
                assert receiver.take(0, deadline_s=5).header.step == 0
                await deliver(sender, receiver, 1)
        counters = sender.status()["counters"]
        assert "garbage" not in counters and "foreign" not in counters


async def test_bytes_that_are_no_zeromq_at_all_are_counted_and_do_not_disturb() -> None:
    async with open_sender() as sender:
        host, port = sender.address.removeprefix("tcp://").split(":")
        for raw in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", pickle.dumps(Bomb()) * 50, os.urandom(100_000), b""):
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(raw)
        await until(lambda: sender.status()["counters"].get("strangers", 0) == 4)
        with open_receiver(sender.address) as receiver:
            await deliver(sender, receiver, 0)


@pytest.mark.parametrize("keys", [None, LinkKeys(OTHER)])
async def test_a_sender_without_the_key_cannot_feed_a_receiver(keys: LinkKeys | None) -> None:
    """Scenario: somebody else binds the sender's port first. Result: his items are not even heard."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.set(zmq.LINGER, 0)
        if keys is not None:
            impostor.set(zmq.CURVE_SERVER, 1)
            impostor.set(zmq.CURVE_SECRETKEY, z85.encode(OTHER.derive("counterpoint grid sender")))
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        with open_receiver(f"tcp://127.0.0.1:{port}") as receiver:
            ends_s = time.monotonic() + 1.0
            while time.monotonic() < ends_s:
                impostor.send_multipart([b"policy-0", *encode_item(make_item())])
                assert not impostor.poll(50)
            assert receiver.failure is None and receiver.waiting_step() is None
            assert set(receiver.counters) == {"refused_handshake"}


async def test_frames_of_a_keyed_link_do_not_travel_in_the_clear() -> None:
    """A wiretap between the two ends sees neither the run's name nor the header's words."""
    seen = bytearray()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, up_writer), pipe(up_reader, writer))

    for key, is_clear in ((None, True), (KEY, False)):
        seen.clear()
        async with open_sender(key) as sender:
            port = int(sender.address.rsplit(":", 1)[1])
            server = await asyncio.start_server(relay, "127.0.0.1", 0)
            address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with open_receiver(address, key) as receiver:
                await deliver(sender, receiver, 0)
            server.close()
        assert len(seen) > 500
        assert (b"expected_step" in seen and b"loss_constants" in seen) == is_clear


# ---------------------------------------------------------------------------------------------------------------------
# Keys and addresses


def test_keys_follow_from_the_grid_key_alone_and_differ_by_purpose() -> None:
    same = Token("k" * 43)
    sender, receiver = (same.derive(f"counterpoint grid {end}") for end in ("sender", "receiver"))
    assert sender == KEY.derive("counterpoint grid sender") != receiver
    assert LinkKeys(KEY).admits(z85.decode(zmq.curve_public(z85.encode(receiver))))
    for other in (z85.decode(zmq.curve_public(z85.encode(sender))), bytes(32), receiver):
        assert not LinkKeys(KEY).admits(other)
    assert sender.hex() not in repr(vars(LinkKeys(KEY))) and "kkkk" not in repr(vars(LinkKeys(KEY)))


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://node7:0", "ipc:///tmp/x"])
async def test_even_with_a_key_a_sender_listens_on_one_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"every interface|no IP address|not tcp://"):
        GridSender(address, stream="policy", run_id="run", epoch=1, num_data_ranks=1, key=KEY)


def address_of_this_machine() -> str:
    """Its address beyond loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells which interface would
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


async def test_with_a_key_grids_flow_beyond_loopback_and_without_one_nobody_listens_there() -> None:
    elsewhere = "tcp://203.0.113.7:9"  # refused for what it is, before anything is bound
    with pytest.raises(ConfigError, match="can be reached from other machines, and there is no token"):
        GridSender(elsewhere, stream="policy", run_id="run", epoch=1, num_data_ranks=1)
    with pytest.raises(ConfigError, match="not on loopback, and the link has no keys"):
        GridReceiver(elsewhere, stream="policy", run_id="run", epoch=1, data_rank=0, num_data_ranks=1)
    host = address_of_this_machine()
    async with open_sender(address=f"tcp://{host}:0") as sender:
        assert sender.address.startswith(f"tcp://{host}:")
        with open_receiver(sender.address) as receiver:
            await deliver(sender, receiver, 0)


@pytest.mark.parametrize("key", [None, KEY])
async def test_grids_flow_between_addresses_of_ipv6_too(key: Token | None) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:  # a machine without IPv6: said, not hung
        with pytest.raises(DependencyLost, match="cannot listen"):
            GridSender("tcp://[::1]:0", stream="policy", run_id="run", epoch=1, num_data_ranks=1, key=key)
        return
    async with open_sender(key, "tcp://[::1]:0") as sender:
        assert sender.address.startswith("tcp://[::1]:")
        with open_receiver(sender.address, key) as receiver:
            await deliver(sender, receiver, 0)
