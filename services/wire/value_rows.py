"""Rows that a critic is pretrained on: JSON lines with a `manifest.json` beside them, and what makes a row a bad one.

    {"id": "3/0", "prompt_id": "guess:guess/5", "policy_id": "sft", "token_ids": [...], "action_mask": [0, 0, 1, ...],
     "return": 1.0, "stop_reason": "terminated"}

Legend: T tokens of a row, P tokens of its prefix.

Notable:
- A row is one branch. `return` is its outcome, on every action token discounted to it by the manifest's gamma;
  `returns` says the return of each token instead.
- A suffix: `suffix_of` names its prefix, `prefix_tokens` = P says where that ends. All suffixes of a prefix begin with
  the same tokens. The prefix is prompt: nothing in it trains. Its last state, which is the state before token P, trains
  on the mean over the suffixes; every later state of a suffix on that suffix's own return.
- Whatever is wrong with a row is a `BadRow`; who reads the file puts `file:line` before it.
- Arrays are strict: T entries each, finite, masks of 0 and 1, no field that is not known.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from services.wire.errors import ConfigError
from services.wire.samples import StopReason

MANIFEST = "manifest.json"
SCHEMA = 1
OBJECTIVE = "monte_carlo"
"""Returns are sums of what came after, of whole rollouts: no value of any critic is in them."""
TOLERANCE = 1e-6
"""By so much a return may leave the manifest's range: decimal fractions are not exact."""
_CHUNK_BYTES = 2**20


class BadRow(ValueError):
    """What is wrong with a row, without its place."""


class ValueRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One line; a line of another shape is refused."""

    id: str
    """unique within its file"""
    prompt_id: str
    """rows of one prompt are never divided between training and held-out rows; a run's is "<env>:<task>" """
    policy_id: str
    """who sampled; explained variance is reported for each"""
    token_ids: list[int]
    """[T]"""
    action_mask: list[Literal[0, 1]]
    """[T]"""
    outcome: float | None = msgspec.field(name="return", default=None)
    """on the last action token"""
    returns: list[float] | None = None
    """[T] of the state before each token, read on action tokens"""
    stop_reason: StopReason
    prefix_tokens: int | None = None
    """P, of a suffix"""
    suffix_of: str | None = None
    """name of the prefix, of a suffix"""


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of one file."""

    sha256: str
    rows: int


class RowsManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`manifest.json` beside the files."""

    schema: Literal[1] = SCHEMA
    files: dict[str, FileFacts]
    """by name within the folder"""
    tokenizer_sha256: str
    """of what `tokenizer.json` means (`services.config.exported.tokenizer_sha256`)"""
    gamma: float
    reward_range: list[float]
    """[low, high] of outcomes; returns lie there too, or between there and 0 where gamma is below 1"""
    objective: Literal["monte_carlo"] = OBJECTIVE
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """"terminal": a cut trace is worth its reward. "bootstrap": there is no cut trace, for nobody knows its return"""

    @property
    def return_range(self) -> tuple[float, float]:
        """Where returns of single tokens lie."""
        low, high = self.reward_range
        return (low, high) if self.gamma == 1.0 else (min(low, 0.0), max(high, 0.0))


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row in arrays; its prefix is prompt already."""

    row: ValueRow
    token_ids: np.ndarray
    """[T] u32"""
    action_mask: np.ndarray
    """[T] bool, false within the prefix"""
    returns: np.ndarray
    """[T] f64, zero off the action mask; of a suffix its own at P too, not yet the mean"""

    @property
    def first_action(self) -> int:
        """Position of the first token that trains; P of a suffix."""
        return int(np.argmax(self.action_mask))


def read_manifest(path: Path) -> tuple[RowsManifest, FileFacts]:
    """The manifest beside a file of rows, and what it says of the file.

    Args:
        path: Of the file of rows.

    Raises:
        ConfigError: no manifest, a bad one, or one that does not name the file.
    """
    beside = path.with_name(MANIFEST)
    try:
        manifest = msgspec.json.decode(beside.read_bytes(), type=RowsManifest)
    except OSError as error:
        raise ConfigError([f"{path}: no {MANIFEST} beside it: {error.strerror}; fix: `counterpoint record`"]) from error
    except msgspec.MsgspecError as error:
        raise ConfigError([f"{beside}: {error}; fix: record the rows anew"]) from error
    problem = _range_problem(manifest)
    if problem:
        raise ConfigError([f"{beside}: {problem}"])
    if path.name not in manifest.files:
        raise ConfigError([f"{path}: {beside} does not name it; fix: name one of {', '.join(manifest.files)}"])
    return manifest, manifest.files[path.name]


def _range_problem(manifest: RowsManifest) -> str:
    if not 0.0 < manifest.gamma <= 1.0:
        return f"gamma {manifest.gamma:g} is not within (0, 1]"
    if len(manifest.reward_range) != 2 or not manifest.reward_range[0] <= manifest.reward_range[1]:
        return f"reward_range {manifest.reward_range} is not [low, high]"
    return ""


def write_manifest(folder: Path, manifest: RowsManifest) -> bytes:
    """The bytes of `folder / manifest.json`, ordered for people; whoever calls puts them there.

    Raises:
        ValueError: a manifest that `read_manifest` would refuse.
    """
    problem = _range_problem(manifest)
    if problem:
        raise ValueError(f"{folder / MANIFEST}: {problem}")
    return json.dumps({"schema": SCHEMA} | msgspec.to_builtins(manifest), indent=1).encode() + b"\n"


def name_hash(name: str) -> int:
    """64 bits of a name, the same everywhere: prompts are compared by these."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def sha256_of(path: Path) -> str:
    """Of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def encode_row(row: ValueRow) -> bytes:
    """One line, its end included."""
    return msgspec.json.encode(row) + b"\n"


def decode_row(line: bytes, manifest: RowsManifest, *, vocab_size: int, max_tokens: int) -> CheckedRow:
    """Read one line strictly.

    Args:
        line: With or without its end.
        manifest: Of its file.
        vocab_size: Ids the model knows.
        max_tokens: Tokens of the longest row that can train.

    Raises:
        BadRow: naming the first thing that is wrong.
    """
    try:
        row = msgspec.json.decode(line, type=ValueRow)
    except msgspec.MsgspecError as error:
        if b"NaN" in line or b"Infinity" in line:
            raise BadRow(f"a number that is not finite ({error})") from error
        raise BadRow(str(error)) from error
    _check_shape(row, vocab_size, max_tokens)
    mask = np.array(row.action_mask, dtype=bool)
    if row.prefix_tokens is not None:
        mask[: row.prefix_tokens] = False
    if not mask.any():
        raise BadRow("no action token" + (" after the prefix" if row.prefix_tokens is not None else ""))
    returns = _returns_of(row, mask, manifest.gamma)
    _check_returns(returns[mask], manifest)
    return CheckedRow(row, np.array(row.token_ids, dtype=np.uint32), mask, returns)


def _check_shape(row: ValueRow, vocab_size: int, max_tokens: int) -> None:
    num_tokens = len(row.token_ids)
    if num_tokens == 0:
        raise BadRow("token_ids is empty")
    for name in ("action_mask", "returns"):
        array = getattr(row, name)
        if array is not None and len(array) != num_tokens:
            raise BadRow(f"{name} has {len(array)} entries for {num_tokens} tokens")
    if num_tokens > max_tokens:
        raise BadRow(f"{num_tokens} tokens, and value.model.seq_len is {max_tokens}")
    least, most = min(row.token_ids), max(row.token_ids)
    if least < 0 or most >= vocab_size:
        raise BadRow(f"token id {least if least < 0 else most} is outside of the vocabulary of {vocab_size}")
    if row.action_mask[0]:
        raise BadRow("action_mask[0] is true: the first token has no state before it")
    if (row.outcome is None) == (row.returns is None):
        raise BadRow("give either return or returns")
    if row.stop_reason is StopReason.ABORTED:
        raise BadRow("an aborted rollout has no return")
    if (row.prefix_tokens is None) != (row.suffix_of is None):
        raise BadRow("prefix_tokens and suffix_of go together")
    prefix = row.prefix_tokens
    if prefix is not None and not (1 <= prefix < num_tokens and row.action_mask[prefix]):
        raise BadRow(f"prefix_tokens is {prefix}, and no action token stands there")


def _returns_of(row: ValueRow, mask: np.ndarray, gamma: float) -> np.ndarray:
    """[T] f64."""
    returns = np.zeros(len(mask))
    if row.outcome is not None:
        num_left = np.arange(int(mask.sum()))[::-1]  # action tokens after each one
        returns[mask] = row.outcome * gamma**num_left
    else:
        returns[mask] = np.array(row.returns, dtype=np.float64)[mask]
    return returns


def _check_returns(returns: np.ndarray, manifest: RowsManifest) -> None:
    if not np.isfinite(returns).all():
        raise BadRow("a return that is not finite")
    low, high = manifest.return_range
    outside = returns[(returns < low - TOLERANCE) | (returns > high + TOLERANCE)]
    if len(outside):
        raise BadRow(f"return {outside[0]:g} lies outside of the manifest's [{low:g}, {high:g}]")
