"""The rows of a pretraining run: checked and indexed once, then read from disk as they are needed.

Legend: N rows of all files.

Notable:
- What is kept of a row are its place in the file and a few numbers, 45 bytes; memory does not grow with its tokens.
- A first pass reads every file wholly: its sha256, each row, and what rows say of each other. Every bad row is told as
  `file:line`. A file that does not change between the passes is a promise of its sha256, checked in the same pass.
- The order of an epoch is a function of (seed, epoch). A batch is a function of (seed, epoch, number): so a position is
  two numbers, and a run that goes on from it trains on what it would have.
- A prompt is held out by a hash of its name and the seed: adding rows or files moves no other prompt.
- A suffix's target at its first token is the mean over all suffixes of its prefix (arXiv 2603.21383 rolls out from such
  states): the variance of an outcome p(1-p) over n of them is p(1-p)/n.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from services.config.exported import MAX_PROMPT_HASHES
from services.wire.errors import ConfigError
from services.wire.samples import Branch, TrainingSample
from services.wire.value_rows import BadRow, CheckedRow, RowsManifest, decode_row, name_hash, read_manifest

MAX_PROBLEMS = 20
"""Bad rows told one by one; further ones are counted."""
_COLUMN = "column_"
_ORDER = 17
"""Keeps the order of rows apart from other draws of the same seed."""
COLUMNS: dict[str, str] = {
    "file": "<i4",
    "line": "<i4",
    "offset": "<i8",
    "num_bytes": "<i4",
    "num_tokens": "<i4",
    "num_targets": "<i4",  # tokens that train
    "policy": "<i4",
    "prefix": "<i4",  # -1: no suffix
    "prompt": "<u8",  # hash
    "held_out": "|b1",
}


@dataclass(slots=True)
class RowIndex:
    """Where the rows of all files lie, and what a reader must know before it reads them."""

    files: list[str]
    policies: list[str]
    columns: dict[str, np.ndarray]
    """[N] by the names and types of COLUMNS"""
    prefix_means: np.ndarray
    """by number of the prefix: mean over its suffixes of the return at their first token"""

    def __len__(self) -> int:
        return len(self.columns["file"])

    @property
    def training(self) -> np.ndarray:
        """Rows that train, ascending."""
        return np.flatnonzero(~self.columns["held_out"])

    def held_out(self, policy: int) -> np.ndarray:
        """Held-out rows of a policy, ascending."""
        return np.flatnonzero(self.columns["held_out"] & (self.columns["policy"] == policy))

    def prompt_hashes(self) -> np.ndarray:
        """Of all prompts, those held out included: u64, ascending, the least `MAX_PROMPT_HASHES`."""
        return np.unique(self.columns["prompt"])[:MAX_PROMPT_HASHES]

    def to_bytes(self) -> bytes:
        """For the other ranks."""
        buffer = io.BytesIO()
        names = {"files": np.array(self.files), "policies": np.array(self.policies)}
        columns = {_COLUMN + name: column for name, column in self.columns.items()}
        arrays: dict[str, Any] = {"prefix_means": self.prefix_means} | names | columns
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> RowIndex:
        """Undo `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            columns = {name: arrays[_COLUMN + name] for name in COLUMNS}
            files, policies = ([str(name) for name in arrays[key]] for key in ("files", "policies"))
            return cls(files, policies, columns, arrays["prefix_means"])


def is_held_out(prompt_id: str, seed: int, fraction: float) -> bool:
    """Whether all rows of a prompt are held out."""
    return name_hash(f"{seed}:{prompt_id}") < fraction * 2**64


@dataclass(slots=True)
class _Prefix:
    tokens: int
    """hash"""
    prompt: int
    return_sum: float = 0.0
    num_suffixes: int = 0


@dataclass(slots=True)
class _Indexer:
    """The first pass."""

    seed: int
    held_out_fraction: float
    vocab_size: int
    max_tokens: int
    lists: dict[str, list[np.ndarray]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    policies: dict[str, int] = field(default_factory=dict)
    prefixes: dict[int, int] = field(default_factory=dict)
    prefix_facts: list[_Prefix] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0

    def problem(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def add_file(self, number: int, path: Path) -> None:
        manifest, facts = read_manifest(path)
        rows, ids = _Columns(), _Numbers("<u8")
        digest, offset, line_number, num_rows = hashlib.sha256(), 0, 0, 0
        with path.open("rb") as file:
            for line in file:
                line_number += 1
                digest.update(line)
                if line.strip():
                    num_rows += 1
                    self._add_row(number, path, manifest, rows, ids, line, line_number, offset)
                offset += len(line)
        for name, column in rows.arrays().items():
            self.lists[name].append(column)
        self._check_ids(path, ids.array(), self.lists["line"][-1])
        if digest.hexdigest() != facts.sha256:
            self.problem(f"{path}: its sha256 is {digest.hexdigest()[:12]}, its manifest says {facts.sha256[:12]}")
        elif num_rows != facts.rows:
            self.problem(f"{path}: {num_rows} rows, its manifest says {facts.rows}")

    def _add_row(
        self,
        number: int,
        path: Path,
        manifest: RowsManifest,
        rows: _Columns,
        ids: _Numbers,
        line: bytes,
        line_number: int,
        offset: int,
    ) -> None:
        try:
            checked = decode_row(line, manifest, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
            prefix = self._prefix_of(checked, number)
        except BadRow as error:
            self.problem(f"{path}:{line_number}: {error}")
            return
        row = checked.row
        rows.add(
            file=number,
            line=line_number,
            offset=offset,
            num_bytes=len(line),
            num_tokens=len(checked.token_ids),
            num_targets=int(checked.action_mask.sum()),
            policy=self.policies.setdefault(row.policy_id, len(self.policies)),
            prefix=prefix,
            prompt=name_hash(row.prompt_id),
            held_out=is_held_out(row.prompt_id, self.seed, self.held_out_fraction),
        )
        ids.add(name_hash(row.id))

    def _prefix_of(self, checked: CheckedRow, number: int) -> int:
        """The number of a suffix's prefix, to whose mean it adds its return; -1 for a whole rollout."""
        row = checked.row
        if row.suffix_of is None or row.prefix_tokens is None:
            return -1
        key = name_hash(f"{number}:{row.suffix_of}")
        tokens = hashlib.sha256(checked.token_ids[: row.prefix_tokens].tobytes()).digest()[:8]
        facts = _Prefix(int.from_bytes(tokens, "little"), name_hash(row.prompt_id))
        index = self.prefixes.setdefault(key, len(self.prefix_facts))
        if index == len(self.prefix_facts):
            self.prefix_facts.append(facts)
        known = self.prefix_facts[index]
        if known.tokens != facts.tokens:
            raise BadRow(f"another suffix of {row.suffix_of!r} begins with other tokens")
        if known.prompt != facts.prompt:
            raise BadRow(f"another suffix of {row.suffix_of!r} has another prompt_id")
        known.return_sum += float(checked.returns[row.prefix_tokens])
        known.num_suffixes += 1
        return index

    def _check_ids(self, path: Path, ids: np.ndarray, lines: np.ndarray) -> None:
        _, first, counts = np.unique(ids, return_index=True, return_counts=True)
        for where in np.sort(first[counts > 1]).tolist():
            again = np.flatnonzero(ids == ids[where])[1]
            self.problem(f"{path}:{lines[again]}: the id of line {lines[where]}")

    def index(self, files: Sequence[str]) -> RowIndex:
        if self.num_problems > len(self.problems):
            self.problems.append(f"{self.num_problems - len(self.problems)} more bad rows")
        if self.problems:
            raise ConfigError([f"value.pretrain.files: {problem}" for problem in self.problems])
        columns = {name: np.concatenate(self.lists[name]) for name in COLUMNS}
        means = np.array([prefix.return_sum / prefix.num_suffixes for prefix in self.prefix_facts])
        return RowIndex(list(files), list(self.policies), columns, means)


class _Numbers:
    """A growing array of one type: a list of Python's numbers would take several times as much."""

    def __init__(self, dtype: str) -> None:
        self._array = np.zeros(1024, dtype)
        self._length = 0

    def add(self, number: int) -> None:
        if self._length == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[self._length] = number
        self._length += 1

    def array(self) -> np.ndarray:
        return self._array[: self._length].copy()


class _Columns:
    """The index of one file as it grows."""

    def __init__(self) -> None:
        self._numbers = {name: _Numbers(dtype) for name, dtype in COLUMNS.items()}

    def add(self, **row: int) -> None:
        for name, number in row.items():
            self._numbers[name].add(number)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: numbers.array() for name, numbers in self._numbers.items()}


def build_index(
    files: Sequence[str], *, seed: int, held_out_fraction: float, vocab_size: int, max_tokens: int
) -> RowIndex:
    """Read and check all rows once.

    Args:
        files: Each with its manifest beside it.
        seed: Of the run; has a say in which prompts are held out.
        held_out_fraction: Share of the prompts.
        vocab_size: Ids that the model knows.
        max_tokens: The longest row that can train.

    Raises:
        ConfigError: every bad row with file and line, a file that is not what its manifest says, or nothing to train.
    """
    indexer = _Indexer(seed, held_out_fraction, vocab_size, max_tokens)
    for number, name in enumerate(files):
        try:
            indexer.add_file(number, Path(name))
        except OSError as error:
            indexer.problem(f"{name}: {error.strerror}")
        except ConfigError as error:
            for problem in error.problems:
                indexer.problem(problem)
    index = indexer.index(files)
    if not len(index.training):
        raise ConfigError(["value.pretrain.files: no row is left to train on; fix: hold out less, or record more"])
    return index


class RowReader:
    """Rows by number, as training samples; rows are not kept, and files are open only while they are read."""

    def __init__(self, index: RowIndex, *, vocab_size: int, max_tokens: int) -> None:
        """Read the manifests of an index's files; arguments as of `build_index`."""
        self._index = index
        self._limits = {"vocab_size": vocab_size, "max_tokens": max_tokens}
        self._manifests = [read_manifest(Path(name))[0] for name in index.files]

    def read(self, numbers: Iterable[int] | np.ndarray) -> list[TrainingSample]:
        """Samples in the order given, with targets and without values.

        Raises:
            ConfigError: a file has changed since it was indexed.
        """
        with ExitStack() as stack:
            files: dict[int, BinaryIO] = {}
            samples = []
            for number in map(int, numbers):
                which = int(self._index.columns["file"][number])
                if which not in files:
                    files[which] = stack.enter_context(Path(self._index.files[which]).open("rb"))
                samples.append(self._read(number, which, files[which]))
            return samples

    def _read(self, number: int, which: int, file: BinaryIO) -> TrainingSample:
        columns = self._index.columns
        file.seek(int(columns["offset"][number]))
        try:
            line = file.read(int(columns["num_bytes"][number]))
            checked = decode_row(line, self._manifests[which], **self._limits)
        except BadRow as error:
            where = f"{self._index.files[which]}:{columns['line'][number]}"
            raise ConfigError([f"value.pretrain.files: {where}: changed while it was read ({error})"]) from error
        prefix = int(columns["prefix"][number])
        if prefix >= 0:
            checked.returns[checked.first_action] = self._index.prefix_means[prefix]
        return _sample_of(checked)


def _sample_of(checked: CheckedRow) -> TrainingSample:
    row, num_tokens = checked.row, len(checked.token_ids)
    branch = Branch(
        token_ids=checked.token_ids,
        action_mask=checked.action_mask,
        loss_mask=checked.action_mask,
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        version_spans=[],
    )
    return TrainingSample(
        row.id,
        row.id,
        branch,
        reward=float(row.outcome or 0.0),
        stop_reason=row.stop_reason,
        values=np.zeros(num_tokens),  # nobody has scored it
        returns=checked.returns,
        prompt_id=row.prompt_id,
    )


def order_of(rows: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch takes its rows."""
    return rows[np.random.default_rng([seed, _ORDER, epoch]).permutation(len(rows))]


@dataclass(frozen=True)
class Position:
    """What has been trained: `batch` batches of epoch `epoch`, and all epochs before it."""

    epoch: int = 0
    batch: int = 0


class Batches:
    """The batches of a run, from any position on."""

    def __init__(self, rows: np.ndarray, *, seed: int, batch_size: int, epochs: int) -> None:
        """Say what trains.

        Args:
            rows: Numbers of the training rows, at least one.
            seed: Of the run.
            batch_size: Rows of a batch; the last one of an epoch may have fewer.
            epochs: Passes over the rows.
        """
        self._rows, self._seed, self._size, self._epochs = rows, seed, batch_size, epochs
        self.per_epoch = -(-len(rows) // batch_size)

    @property
    def num_updates(self) -> int:
        """Of the whole run."""
        return self.per_epoch * self._epochs

    def position(self, num_done: int) -> Position:
        """Where a run is after so many batches."""
        return Position(*divmod(num_done, self.per_epoch))

    def rest(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Each batch from `start` on, with the position after it."""
        for epoch in range(start.epoch, self._epochs):
            order = order_of(self._rows, seed=self._seed, epoch=epoch)
            for batch in range(start.batch if epoch == start.epoch else 0, self.per_epoch):
                done = epoch * self.per_epoch + batch + 1
                yield self.position(done), order[batch * self._size : (batch + 1) * self._size]
