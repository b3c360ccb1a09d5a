"""Heads of bytes on disk: a digested MessagePack header behind its length, as files of rollouts have them.

    u32 bytes of the head | head: MessagePack {header: Raw, digest: sha256 of header and body} | body

Notable:
- The header stays encoded until its digest was compared; sizes are compared with the bytes that are there before
  anything is read.
- Errors about foreign bytes never repeat those bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from services.wire.errors import CodecError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Decoded = TypeVar("_Decoded")

MAX_HEAD_BYTES = 2**24
"""A hundred bytes or so a rollout."""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    header: msgspec.Raw
    digest: str


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


def make_head(header: msgspec.Struct, body: bytes = b"") -> bytes:
    """The length and the head; the body is to follow.

    Args:
        header: what the reader must know first.
        body: what the digest covers besides it.

    Raises:
        CodecError: a header of more than MAX_HEAD_BYTES.
    """
    raw = _encode(header)
    head = _encode(_Head(msgspec.Raw(raw), _digest(raw, body)))
    if len(head) > MAX_HEAD_BYTES:
        raise CodecError(f"a head of {len(head)} bytes, more than {MAX_HEAD_BYTES}")
    return struct.pack("<I", len(head)) + head


def split_head(view: memoryview, *, start: int = 0) -> tuple[memoryview, memoryview]:
    """The head that begins with its length at `start`, and all that follows it.

    Raises:
        CodecError: it is not there.
    """
    if view.nbytes < start + 4:
        raise CodecError(f"{view.nbytes} bytes are too few")
    (num_bytes,) = struct.unpack_from("<I", view, start)
    end = start + 4 + num_bytes
    if num_bytes > MAX_HEAD_BYTES or end > view.nbytes:
        raise CodecError(f"a head of {num_bytes} bytes, which is not there")
    return view[start + 4 : end], view[end:]


def read_head(head: memoryview, body: Buffer, decode: Callable[[Buffer], _Decoded], what: str) -> _Decoded:
    """The header of a head, once its digest was found right.

    Raises:
        CodecError: naming `what`.
    """
    parsed = _parse(_decode_head, head, what)
    if _digest(parsed.header, body) != parsed.digest:
        raise CodecError(f"{what} does not match its digest")
    return _parse(decode, parsed.header, f"{what}'s header")


def _digest(header: Buffer, body: Buffer) -> str:
    sha = hashlib.sha256(header)
    sha.update(body)
    return sha.hexdigest()


def _parse(decode: Callable[[Buffer], _Decoded], data: Buffer, what: str) -> _Decoded:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        # the message of an error about foreign bytes may hold those bytes: only its class is repeated
        raise CodecError(f"{what} does not decode ({type(error).__name__})") from None
