"""The body of a scoring request, JSON or MessagePack, held against every limit while it is read.

Notable:
- A valid JSON body is one field and its array, so it is read branch by branch: no call into the parser is longer than
  one branch may be, other threads run in between, and no more is ever held than the body and four bytes a token.
- Errors are one line naming the field, with numbers of ours and counts of theirs; never a byte of what was sent.
- Ids are integers: `true`, `"7"` and `7.0` are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn

import msgspec
import numpy as np

from services.config.train import ValueConfig
from services.wire.errors import CodecError
from services.wire.scoring import LARGEST_ID, MEDIA_TYPE, TokenBatch, decode_request

JSON = "application/json"
MOST_BYTES_A_TOKEN = 32
"""Of JSON: ten digits, a comma and ample space. A longer branch is too long without being read."""
SMALL_BYTES = 256 * 1024
"""A wrong body up to here is parsed as a whole, to say what is wrong with it."""

_SPACE = rb"[ \t\r\n]{0,64}"
_START = re.compile(_SPACE + rb"\{" + _SPACE + rb'"(batched_token_ids|token_ids)"' + _SPACE + b":" + _SPACE)
_OPEN = re.compile(rb"\[" + _SPACE)
_NEXT = re.compile(_SPACE + b"," + _SPACE)
_CLOSE = re.compile(_SPACE + rb"\]" + _SPACE)
_END = re.compile(_SPACE + rb"\}" + _SPACE + rb"\Z")
_decode_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]]).decode


class RequestRefused(Exception):
    """A request that is answered 4xx; `reason` is one line."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Limits:
    """What a request may be."""

    bytes: int
    branches: int
    branch_tokens: int
    tokens: int
    vocab_size: int

    @staticmethod
    def of(config: ValueConfig, vocab_size: int) -> Limits:
        """Those of a configuration."""
        return Limits(
            bytes=config.max_request_bytes,
            branches=config.max_request_branches,
            branch_tokens=config.model.seq_len,
            tokens=config.max_request_tokens,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True)
class Parsed:
    """A request within its limits."""

    batch: TokenBatch
    is_single: bool
    """whether it came as JSON `token_ids`, and wants the reply of that form"""


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    """To say what is wrong with a small body."""

    batched_token_ids: list[list[int]] | None = None
    token_ids: list[int] | None = None


def parse(body: bytes | bytearray, media_type: str, limits: Limits) -> Parsed:
    """Read a body.

    Args:
        body: No longer than the limit.
        media_type: Of `SUPPORTED`.
        limits: What it must keep.

    Raises:
        RequestRefused: naming the field.
    """
    if media_type == MEDIA_TYPE:
        try:
            batch = decode_request(body)
        except CodecError as error:
            raise RequestRefused(400 if "not valid" in str(error) else 422, str(error)) from None
        _check(batch, limits, lambda branch: f"token_ids: branch {branch}")
        return Parsed(batch, False)
    start = _START.match(body)
    if start is None:
        _explain(body)
    field = start[1].decode()
    is_single = field == "token_ids"
    arrays, position = _branches(body, start.end(), field, limits, is_single=is_single)
    if _END.match(body, position) is None:
        _explain(body)
    lengths = np.array([len(array) for array in arrays], dtype="<u4")
    batch = TokenBatch(lengths, np.concatenate(arrays) if arrays else np.zeros(0, dtype="<u4"))
    _check(batch, limits, lambda branch: field if is_single else f"{field}[{branch}]")
    return Parsed(batch, is_single)


def _branches(
    body: bytes | bytearray, position: int, field: str, limits: Limits, *, is_single: bool
) -> tuple[list[np.ndarray], int]:
    """The arrays of ids, and where the last one ends."""
    if is_single:
        array, position = _ids(body, position, field, limits)
        return [array], position
    opened = _OPEN.match(body, position)
    if opened is None:
        _explain(body)
    arrays: list[np.ndarray] = []
    position, num_tokens = opened.end(), 0
    is_more = _CLOSE.match(body, position) is None
    while is_more:
        if len(arrays) == limits.branches:
            raise RequestRefused(422, f"{field}: more than {limits.branches} branches")
        array, position = _ids(body, position, f"{field}[{len(arrays)}]", limits)
        arrays.append(array)
        num_tokens += len(array)
        if num_tokens > limits.tokens:
            raise RequestRefused(422, f"{field}: more than {limits.tokens} tokens in all")
        following = _NEXT.match(body, position)
        is_more = following is not None
        position = following.end() if following is not None else position
    closed = _CLOSE.match(body, position)
    if closed is None:
        _explain(body)
    return arrays, closed.end()


def _ids(body: bytes | bytearray, position: int, name: str, limits: Limits) -> tuple[np.ndarray, int]:
    """One array of ids, and where it ends."""
    end = body.find(b"]", position) + 1
    if body[position : position + 1] != b"[" or not end:
        _explain(body)
    if end - position > MOST_BYTES_A_TOKEN * limits.branch_tokens + 128:
        raise RequestRefused(422, f"{name}: too long, value.model.seq_len is {limits.branch_tokens}")
    try:
        ids = _decode_ids(body[position:end])
    except msgspec.ValidationError as error:
        raise RequestRefused(422, f"{name}: {str(error)[:200]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        _explain(body)
    return np.array(ids, dtype="<u4"), end


def _check(batch: TokenBatch, limits: Limits, name: Callable[[int], str]) -> None:
    """Counts, lengths and ids; `name` says how the request calls a branch."""
    lengths, ids = batch.lengths, batch.token_ids
    if len(lengths) == 0:
        raise RequestRefused(422, "batched_token_ids: no branch")
    if len(lengths) > limits.branches:
        raise RequestRefused(422, f"lengths: {len(lengths)} branches, the limit is {limits.branches}")
    if not lengths.all():
        raise RequestRefused(422, f"{name(int(np.argmin(lengths)))}: empty branch")
    longest = int(np.argmax(lengths))
    if lengths[longest] > limits.branch_tokens:
        what = f"{lengths[longest]} tokens, value.model.seq_len is {limits.branch_tokens}"
        raise RequestRefused(422, f"{name(longest)}: {what}")
    if len(ids) > limits.tokens:
        raise RequestRefused(422, f"token_ids: {len(ids)} tokens in all, the limit is {limits.tokens}")
    if int(ids.max()) >= limits.vocab_size:
        position = int(np.argmax(ids >= limits.vocab_size))
        branch = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), position, side="right"))
        raise RequestRefused(422, f"{name(branch)}: a token id outside the vocabulary of {limits.vocab_size}")


def _explain(body: bytes | bytearray) -> NoReturn:
    """Why a body that does not have the one form is refused."""
    both = RequestRefused(422, "body: exactly one of batched_token_ids and token_ids is needed")
    if len(body) > SMALL_BYTES:
        raise RequestRefused(400, f"body: not JSON with exactly one of batched_token_ids and token_ids ({len(body)} B)")
    try:
        form = msgspec.json.decode(body, type=_Form)
    except msgspec.ValidationError as error:
        unknown = "unknown field" in str(error)
        raise RequestRefused(422, "body: an unknown field" if unknown else f"body: {str(error)[:200]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestRefused(400, "body: not valid JSON") from None
    if (form.batched_token_ids is None) == (form.token_ids is None):
        raise both
    raise RequestRefused(400, "body: more than 64 spaces in a row, or a field twice or with escapes in its name")
