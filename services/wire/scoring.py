"""Scoring as MessagePack: lengths and token ids there, lengths and values back, arrays raw and little-endian.

    request    {lengths: bin u32 [S], token_ids: bin u32 [T]}
    reply      {lengths: bin u32 [S], values: bin f32 [T], bootstrap_values: bin f32 [S], critic_step: int}

Notable:
- Branches lie one after the other: `lengths` cuts both `token_ids` and `values`.
- Decoding copies no array and checks that every size fits; what the numbers are is for the reader to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from services.wire.errors import CodecError, ScoreContractError
from services.wire.messages import ScoreReply

MEDIA_TYPE = "application/msgpack"
LARGEST_ID = 2**32 - 1
_U32, _F32 = np.dtype("<u4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Branches to score."""

    lengths: np.ndarray  # [S] u32
    token_ids: np.ndarray  # [T] u32

    @staticmethod
    def of(branches: Sequence[Sequence[int]]) -> TokenBatch:
        """From one list of ids a branch.

        Raises:
            ScoreContractError: an id that no u32 holds, naming the branch.
        """
        arrays = [_ids(number, branch) for number, branch in enumerate(branches)]
        lengths = np.array([len(array) for array in arrays], dtype=_U32)
        return TokenBatch(lengths, np.concatenate(arrays) if arrays else np.zeros(0, dtype=_U32))

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        return self.lengths.nbytes + self.token_ids.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """Their values, by one state of the critic."""

    lengths: np.ndarray  # [S] u32
    values: np.ndarray  # [T] f32
    bootstrap_values: np.ndarray  # [S] f32
    critic_step: int

    def branches(self) -> Iterator[np.ndarray]:
        """Values of each branch."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for start, end in zip(ends - self.lengths, ends, strict=True):
            yield self.values[start:end]

    def to_reply(self) -> ScoreReply:
        """The same as lists."""
        values = [branch.tolist() for branch in self.branches()]
        return ScoreReply(values, self.bootstrap_values.tolist(), self.critic_step)


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    lengths: memoryview
    token_ids: memoryview


class _Reply(msgspec.Struct):
    lengths: memoryview
    values: memoryview
    bootstrap_values: memoryview
    critic_step: int


_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


def encode_request(batch: TokenBatch) -> bytes:
    """The body of a scoring request."""
    return msgspec.msgpack.encode(_Request(_raw(batch.lengths, _U32), _raw(batch.token_ids, _U32)))


def decode_request(body: bytes | bytearray) -> TokenBatch:
    """Read a request's body; its arrays share the body's memory.

    Raises:
        CodecError: the body is not one; one line that holds nothing of it.
    """
    try:
        parts = _decode_request(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(_why(error)) from None
    lengths, token_ids = _array("lengths", parts.lengths, _U32), _array("token_ids", parts.token_ids, _U32)
    total = int(lengths.sum(dtype=np.uint64))
    if total != len(token_ids):
        raise CodecError(f"lengths: they sum to {total}, but token_ids holds {len(token_ids)}")
    return TokenBatch(lengths, token_ids)


def encode_reply(scored: ScoredBatch) -> bytes:
    """The body of a reply."""
    parts = (_raw(scored.lengths, _U32), _raw(scored.values, _F32), _raw(scored.bootstrap_values, _F32))
    return msgspec.msgpack.encode(_Reply(*parts, scored.critic_step))


def decode_reply(body: bytes) -> ScoredBatch:
    """Read a reply's body; its arrays share the body's memory.

    Raises:
        CodecError: the body is not one.
    """
    try:
        parts = _decode_reply(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(_why(error)) from None
    arrays = (
        _array("lengths", parts.lengths, _U32),
        _array("values", parts.values, _F32),
        _array("bootstrap_values", parts.bootstrap_values, _F32),
    )
    return ScoredBatch(*arrays, parts.critic_step)


def _ids(number: int, branch: Sequence[int]) -> np.ndarray:
    ids = np.asarray(branch)
    if ids.size == 0:
        return np.zeros(0, dtype=_U32)
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or ids.min() < 0 or ids.max() > LARGEST_ID:
        raise ScoreContractError(f"branch {number}: token ids are integers from 0 to {LARGEST_ID}")
    return ids.astype(_U32)


def _raw(array: np.ndarray, dtype: np.dtype) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).data.cast("B") if array.size else memoryview(b"")


def _array(name: str, data: memoryview, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise CodecError(f"{name}: {len(data)} bytes are not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _why(error: Exception) -> str:
    """What is wrong, without the names that a stranger chose."""
    if isinstance(error, msgspec.ValidationError):
        return "body: an unknown field" if "unknown field" in str(error) else str(error)
    return "body: not valid MessagePack"
