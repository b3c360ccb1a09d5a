"""Grid items as bytes and back: one MessagePack frame and one raw frame per array, on ZMQ and on disk alike.

    frame 0      msgspec MessagePack {header: GridHeader, arrays: [[name, entries], ...], digest: sha256 of both}
    frame 1...   the arrays of STREAM_ARRAYS[stream] in schema order, raw little-endian

Legend: M micro-batches, S samples, T tokens, N version spans of one item.

Notable:
- Decoding copies nothing: arrays are views into the frames they came in, which they keep alive; nobody writes to them.
- `decode_item` raises CodecError on any bytes that are not a valid item, and nothing else. Sizes are checked before
  anything is built from them, and no byte is ever unpickled.
- The digest in frame 0 covers the header and the array sizes; `header.digest` covers the arrays. Together they cover
  every byte, so `item_digest` identifies an item, its loss denominators included.
- What is refused here can reach no loss: non-finite numbers, a trainable first token, a loss mask outside the action
  mask, spans that do not cover exactly the action tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from services.wire.errors import CodecError
from services.wire.grids import SAMPLE_ARRAYS, STREAM_ARRAYS, TOKEN_ARRAYS, GridHeader, GridItem

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Decoded = TypeVar("_Decoded")

MAX_HEADER_BYTES = 2**20
"""Frame 0 of a real item takes about a kilobyte."""

_OFF = np.zeros(1, dtype="|u1")
"""What surrounds an item's action mask."""
_SCHEMA: dict[str, str] = {name: dtype for arrays in STREAM_ARRAYS.values() for name, dtype in arrays.items()}


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frame 0; header and arrays stay encoded until their digest was compared."""

    header: msgspec.Raw
    arrays: msgspec.Raw
    digest: str


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_header = msgspec.msgpack.Decoder(GridHeader).decode
_decode_sizes = msgspec.msgpack.Decoder(list[tuple[str, int]]).decode
_encode = msgspec.msgpack.Encoder().encode


def digest_arrays(arrays: dict[str, np.ndarray]) -> str:
    """Identify arrays by content, whatever the order of the dict.

    Returns:
        sha256 in hex over name, dtype, number of entries and bytes of each array, in schema order.

    Raises:
        CodecError: an array that no stream knows, or of a dtype other than the schema's.
    """
    unknown = sorted(set(arrays) - set(_SCHEMA))
    if unknown:
        raise CodecError(f"unknown array {unknown[0]!r}")
    sha = hashlib.sha256()
    for name, dtype in _SCHEMA.items():
        if name in arrays:
            array = arrays[name]
            _check_dtype(name, array, dtype)
            sha.update(f"{name} {dtype} {array.size}\n".encode())
            sha.update(_raw(array))
    return sha.hexdigest()


def encode_item(item: GridItem) -> list[bytes | memoryview]:
    """Encode one item; the arrays' frames are views, not copies.

    Raises:
        CodecError: the item is not one that `decode_item` would accept, or `header.digest` is not its arrays' digest.
    """
    schema = _schema_of(item.header)
    if set(item.arrays) != set(schema):
        raise CodecError(f"arrays {sorted(item.arrays)} are not those of a {item.header.stream} grid: {sorted(schema)}")
    for name, dtype in schema.items():
        _check_dtype(name, item.arrays[name], dtype)
    _check_header(item.header)
    _check_arrays(item.header, item.arrays)
    if digest_arrays(item.arrays) != item.header.digest:
        raise CodecError("header.digest is not the digest of the arrays")
    header = _encode(item.header)
    sizes = _encode([(name, item.arrays[name].size) for name in schema])
    envelope = _Envelope(msgspec.Raw(header), msgspec.Raw(sizes), _header_digest(header, sizes))
    return [_encode(envelope), *(_raw(item.arrays[name]) for name in schema)]


def decode_item(frames: Sequence[Buffer], *, max_bytes: int) -> GridItem:
    """Decode one item from bytes, memoryviews or ZMQ frames, without copying an array.

    Args:
        frames: the multipart, without an identity frame
        max_bytes: limit on the sum of all frames

    Raises:
        CodecError: anything but a complete, consistent, unaltered item.
    """
    views = [memoryview(frame) for frame in frames]
    if not views:
        raise CodecError("no frames")
    num_bytes = sum(view.nbytes for view in views)
    if num_bytes > max_bytes:
        raise CodecError(f"{num_bytes} bytes are more than the limit of {max_bytes}")
    header, sizes = _decode_frame_0(views[0])
    schema = _schema_of(header)
    if [name for name, _ in sizes] != list(schema):
        raise CodecError(f"the arrays are not those of a {header.stream} grid in schema order")
    if len(views) != 1 + len(schema):
        raise CodecError(f"{len(views) - 1} array frames where the header announces {len(schema)}")
    arrays: dict[str, np.ndarray] = {}
    for (name, num_entries), view in zip(sizes, views[1:], strict=True):
        dtype = np.dtype(schema[name])
        if num_entries < 0 or view.nbytes != num_entries * dtype.itemsize:
            raise CodecError(f"{name} has {view.nbytes} bytes where the header announces {num_entries} entries")
        arrays[name] = np.frombuffer(view, dtype=dtype) if num_entries else np.empty(0, dtype=dtype)
    _check_header(header)
    if digest_arrays(arrays) != header.digest:
        raise CodecError("the arrays do not match the header's digest")
    _check_arrays(header, arrays)
    return GridItem(header=header, arrays=arrays)


def item_digest(frame_0: Buffer) -> str:
    """Return the digest that identifies a whole item, from its (already accepted) frame 0.

    Raises:
        CodecError: the frame is not a frame 0.
    """
    return _parse(_decode_envelope, memoryview(frame_0), "frame 0").digest


def _decode_frame_0(view: memoryview) -> tuple[GridHeader, list[tuple[str, int]]]:
    if view.nbytes > MAX_HEADER_BYTES:
        raise CodecError(f"frame 0 has {view.nbytes} bytes, more than {MAX_HEADER_BYTES}")
    envelope = _parse(_decode_envelope, view, "frame 0")
    if _header_digest(envelope.header, envelope.arrays) != envelope.digest:
        raise CodecError("the header does not match its digest")
    return _parse(_decode_header, envelope.header, "the header"), _parse(_decode_sizes, envelope.arrays, "the sizes")


def _parse(decode: Callable[[Buffer], _Decoded], data: Buffer, what: str) -> _Decoded:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        # the message of an error about foreign bytes may hold those bytes: only its class is repeated
        raise CodecError(f"{what} does not decode ({type(error).__name__})") from None


def _header_digest(header: Buffer, sizes: Buffer) -> str:
    sha = hashlib.sha256(header)
    sha.update(sizes)
    return sha.hexdigest()


def _schema_of(header: GridHeader) -> dict[str, str]:
    if header.stream not in STREAM_ARRAYS:
        raise CodecError(f"unknown stream {header.stream!r}")
    return STREAM_ARRAYS[header.stream]


def _check_dtype(name: str, array: np.ndarray, dtype: str) -> None:
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise CodecError(f"{name} is {array.dtype}{list(array.shape)}, not one-dimensional {np.dtype(dtype)}")


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _check_header(header: GridHeader) -> None:
    for name in ("epoch", "step", "policy_version", "data_rank"):
        if getattr(header, name) < 0:
            raise CodecError(f"{name} is negative")
    if header.data_rank >= header.num_data_ranks:
        raise CodecError(f"data_rank {header.data_rank} of {header.num_data_ranks}")
    if not (math.isfinite(header.temperature) and header.temperature > 0):
        raise CodecError("temperature is not a positive number")
    if not all(math.isfinite(value) for value in header.loss_constants.values()):
        raise CodecError("a loss constant is not finite")
    if (header.denominator_tokens < 1) if header.denominator == "constant" else header.denominator_tokens:
        raise CodecError(f"denominator_tokens {header.denominator_tokens} does not fit {header.denominator}")
    if not header.mini_batches:
        raise CodecError("no mini-batches")
    for mini_batch in header.mini_batches:
        if mini_batch.num_micro_batches < 1 or mini_batch.tokens < 0 or mini_batch.samples < 0:
            raise CodecError("a mini-batch has no micro-batch or a negative count")


def _check_arrays(header: GridHeader, arrays: dict[str, np.ndarray]) -> None:
    lengths = arrays["lengths"]
    num_micro_batches = sum(mini_batch.num_micro_batches for mini_batch in header.mini_batches)
    if arrays["sample_counts"].size != num_micro_batches:
        raise CodecError(f"{arrays['sample_counts'].size} micro-batches where the header announces {num_micro_batches}")
    if _total(arrays["sample_counts"]) != lengths.size:
        raise CodecError("sample_counts do not add up to the number of lengths")
    if lengths.size and int(lengths.min()) == 0:
        raise CodecError("a sample has no tokens")
    num_tokens = _total(lengths)
    for name, array in arrays.items():
        if name in TOKEN_ARRAYS and array.size != num_tokens:
            raise CodecError(f"{name} has {array.size} entries for {num_tokens} tokens")
        if name in SAMPLE_ARRAYS and array.size != lengths.size:
            raise CodecError(f"{name} has {array.size} entries for {lengths.size} samples")
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise CodecError(f"{name} holds a non-finite number")
    action_mask, loss_mask = arrays["action_mask"], arrays["loss_mask"]
    for name in ("action_mask", "bootstrapped"):
        if name in arrays and int(arrays[name].max(initial=0)) > 1:
            raise CodecError(f"{name} holds something other than 0 and 1")
    if bool((loss_mask > action_mask).any()):
        raise CodecError("loss_mask is true off the action mask")
    ends = np.cumsum(lengths, dtype=np.int64)  # [S] end of each sample in the item's tokens
    if bool(action_mask[ends - lengths].any()):
        raise CodecError("the first token of a sample is in its action_mask")
    if "spans" in arrays:
        _check_spans(arrays["span_counts"], arrays["spans"], lengths, ends, action_mask)


def _check_spans(
    span_counts: np.ndarray, spans: np.ndarray, lengths: np.ndarray, ends: np.ndarray, action_mask: np.ndarray
) -> None:
    num_spans = _total(span_counts)
    if span_counts.size != lengths.size or spans.size != 3 * num_spans:
        raise CodecError("spans do not match span_counts, or span_counts the number of samples")
    owner = np.repeat(np.arange(lengths.size), span_counts)  # [N] sample of each span
    bounds = spans.reshape(-1, 3)[:, :2].astype(np.int64)  # [N, 2] start, end within the sample
    if bool(((bounds[:, 0] >= bounds[:, 1]) | (bounds[:, 1] > lengths[owner])).any()):
        raise CodecError("a version span is empty or outside its sample")
    bounds += (ends - lengths)[owner, None]  # within the item
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    gaps = bounds[1:, 0] - bounds[:-1, 1]
    outer = np.ones(2 * num_spans, dtype=bool)  # starts and ends, but for those where one span continues another
    outer[1:-1] = np.repeat(gaps != 0, 2)
    # No run of action tokens crosses samples, as the first token of none is one: runs and merged spans must be equal.
    edges = np.flatnonzero(np.diff(action_mask, prepend=_OFF, append=_OFF) != 0)  # ten times as fast on bool
    if bool((gaps < 0).any()) or not np.array_equal(bounds.reshape(-1)[outer], edges):
        raise CodecError("version spans do not cover exactly the action tokens")


def _total(counts: np.ndarray) -> int:
    return int(counts.sum(dtype=np.uint64))
