"""What both ends of a grid link share: control messages, socket options, and where a link may listen.

    sender (ROUTER, binds)                               receiver (DEALER, one per data rank, connects)
        <-- Hello: where I stand, what I have, how many more I take ---
        --- the frames of one grid item ------------------------------>
        <-- Ack: I have it, with this digest    or    Nack: why not ----

Notable:
- Every control message says where its receiver stands: the next step it accepts, and its credit. Steps below
  `expected_step + credit` may be sent: a window, so that a lost or repeated message changes nothing.
- Steps of one stream are consecutive from the receiver's `first_step`.
- Control messages are MessagePack structs with a strict schema. Nothing on these sockets is ever unpickled.
- On loopback a link may be plain; beyond it, and there too where the run has a token, it speaks CURVE
  (`services.transport.curve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec
import zmq

from services.runtime.auth import check_listener, is_loopback
from services.wire.errors import CodecError, ConfigError
from services.wire.grids import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

NackReason = Literal["late", "early", "no_credit", "conflict", "old_epoch", "foreign"]

MAX_CONTROL_BYTES = 64 * 1024
CONNECT_INTERVAL_MS = 100
MAX_CONNECT_INTERVAL_MS = 1000
HANDSHAKE_MS = 5000
PULSE_MS = 1000
PULSE_TIMEOUT_MS = 5000
"""A peer whose machine or link is gone is disconnected after this; libzmq answers pulses without our threads."""
LINGER_MS = 500
"""How long closing may wait to hand over a last acknowledgement."""


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which receiver speaks, and where it stands."""

    run_id: str
    epoch: int
    stream: Stream
    data_rank: int
    num_data_ranks: int
    expected_step: int
    """the next step this receiver accepts"""
    credit: int
    """how many steps from there on it has room for"""


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello"):
    """Sent every half second, on every new connection, and when room was made."""

    position: Position
    instance: str
    """differs between receivers that held the same rank"""
    connection: int
    """number of this receiver's connection; a new one means that what was under way is lost"""
    have: dict[int, str]
    """digests of the last accepted items by step: acknowledges again what may have been lost"""


class Ack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ack"):
    """The item of `step` is here and whole."""

    position: Position
    step: int
    digest: str


class Nack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nack"):
    """The item of `step` was dropped."""

    position: Position
    step: int
    reason: NackReason


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Hello | Ack | Nack).decode


def encode_control(message: Hello | Ack | Nack) -> bytes:
    """Encode one control message."""
    return _encode(message)


def decode_control(frames: Sequence[Buffer]) -> Hello | Ack | Nack:
    """Decode one control message.

    Raises:
        CodecError: anything but one valid frame.
    """
    if len(frames) != 1:
        raise CodecError(f"a control message has one frame, not {len(frames)}")
    try:
        return _decode(frames[0])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"not a control message ({type(error).__name__})") from None


def identity(stream: str, data_rank: int) -> bytes:
    """Return the DEALER identity of one data rank."""
    return f"{stream}-{data_rank}".encode()


def check_address(address: str, *, listens: bool, is_secured: bool) -> None:
    """Refuse an address that other machines could reach, unless the link proves both ends.

    Args:
        address: tcp://HOST:PORT.
        listens: Bind there (an IP address of one interface), or connect.
        is_secured: The link has keys.

    Raises:
        ConfigError: not such an address, or beyond loopback without keys.
    """
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme != "tcp" or not host:
        raise ConfigError([f"grid address {address!r} is not tcp://HOST:PORT"])
    if listens:
        check_listener(host, f"grid link at {address}", is_guarded=is_secured)
    elif not is_secured and not is_loopback(host):
        raise ConfigError([f"grid address {address!r} is not on loopback, and the link has no keys"])


def set_options(socket: zmq.Socket, address: str, *, max_message_bytes: int) -> None:
    """Set what both ends have in common: bounded queues, bounded closing, bounded messages, a pulse."""
    if "[" in address:
        socket.set(zmq.IPV6, 1)
    socket.set(zmq.LINGER, LINGER_MS)
    items_hwm, control_hwm = 4, 1000  # items are large and few, control messages small
    sends_items = socket.type == zmq.ROUTER
    socket.set(zmq.SNDHWM, items_hwm if sends_items else control_hwm)
    socket.set(zmq.RCVHWM, control_hwm if sends_items else items_hwm)
    socket.set(zmq.MAXMSGSIZE, max_message_bytes)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, PULSE_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, PULSE_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, PULSE_TIMEOUT_MS)
