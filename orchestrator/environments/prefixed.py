"""Recorded traces as tasks: each episode begins where a recorded one was cut.

    {"task_id": "guess/5", "token_ids": [...], "action_mask": [0, 0, 1, ...], "logprobs": [...]}

Notable:
- One row of the file is one task; its name ends with the row's line, so that baselines per prompt are per prefix.
- The environment hears the recorded turns again, and what it says must be what is recorded, token by token: else the
  rollout is no continuation, and is dropped as `prefix_mismatch`.
- To the driver the prefix is a prompt like any other: no action token, no log-probability, nothing that trains.
- Rows are read and checked when the run starts; every problem names its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from orchestrator.environments.protocol import (
    Environment,
    Episode,
    PrefixMismatch,
    Reply,
    RestorableEnvironment,
)
from orchestrator.prefix_replay import check_prefix, cut_at, cut_by_entropy, segments_of, turn_boundaries
from services.config.orchestrator import EnvConfig
from services.wire.errors import ConfigError, ContractError

MAX_PROBLEMS = 20
"""Further bad lines of a file are counted only."""


class PrefixRow(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a prefix file; a line of another shape is refused."""

    task_id: str
    """name of the task within the environment"""
    token_ids: list[int]
    """[T] the recorded branch, or as much of it as reaches beyond the cut"""
    action_mask: list[Literal[0, 1]]
    """[T]"""
    logprobs: list[float] | None = None
    """[T], read on action tokens"""
    entropies: list[float] | None = None
    """[T] nats, read on action tokens; wins over `logprobs`"""
    cut: int | None = None
    """length of the prefix, for `prefix_cut = "index"`"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A recorded trace up to its cut."""

    line: int
    index: int
    """of the task"""
    token_ids: np.ndarray
    """[T] up to the cut"""
    action_mask: np.ndarray
    """[T] bool"""

    @property
    def num_turns(self) -> int:
        """Model turns up to the cut."""
        return len(segments_of(self.token_ids.tolist(), self.action_mask)) // 2


@dataclass(slots=True)
class ContinuedEpisode:
    """An episode that was restored: what has been said is its prompt."""

    episode: Episode
    prompt_ids: list[int]
    num_turns: int
    """model turns within the prompt"""

    def step(self, action_ids: list[int]) -> Reply:
        """Take one model turn."""
        return self.episode.step(action_ids)

    def cut(self) -> float:
        """Return what the whole episode is worth where the driver ended it."""
        return self.episode.cut()


class PrefixedEnvironment:
    """The rows of a prefix file as numbered tasks."""

    def __init__(self, environment: Environment, config: EnvConfig) -> None:
        """Read the file.

        Args:
            environment: plays the whole episodes.
            config: its `[[env]]`, with a `prefix_file`.

        Raises:
            ConfigError: an environment that cannot be restored, a file that cannot be read or is empty, or bad rows,
                each with its line.
        """
        if not hasattr(environment, "restore"):
            raise ConfigError([f"env.prefix_file: {config.type} has no `restore`: it cannot continue recorded traces"])
        self._environment: RestorableEnvironment = environment  # pyright: ignore[reportAttributeAccessIssue]
        self._prefixes = _read(config, environment)
        self.num_tasks = len(self._prefixes)

    def task_id(self, index: int) -> str:
        """Return for example "guess/5 from line 3"."""
        prefix = self._prefixes[index]
        return f"{self._environment.task_id(prefix.index)} from line {prefix.line}"

    def start(self, index: int, seed: int) -> Episode:
        """Restore the episode of a row.

        Raises:
            PrefixMismatch: it did not get to where the recorded one was.
        """
        return continue_from(self._environment, self._prefixes[index], seed, name=self.task_id(index))


def continue_from(environment: RestorableEnvironment, prefix: Prefix, seed: int, *, name: str) -> ContinuedEpisode:
    """Bring an environment to where a recorded trace was cut.

    Args:
        environment: Of the recorded trace.
        prefix: The trace up to its cut.
        seed: For an environment with a chance of its own.
        name: Of the prefix, for the error.

    Raises:
        PrefixMismatch: it did not get there.
    """
    recorded = prefix.token_ids.tolist()
    turns = segments_of(recorded, prefix.action_mask)[1::2]
    restored = environment.restore(prefix.index, seed, turns)
    said = list(restored.episode.prompt_ids)
    for turn, observation in zip(turns, restored.observations, strict=True):
        said += [*turn, *observation]
    try:
        check_prefix(said, recorded)
    except ContractError as error:
        raise PrefixMismatch(f"{name}: {error}") from error
    return ContinuedEpisode(restored.episode, recorded, len(turns))


def _read(config: EnvConfig, environment: Environment) -> list[Prefix]:
    path = Path(str(config.prefix_file))
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError([f"env.prefix_file: {path} cannot be read: {error.strerror}"]) from error
    index_of = {environment.task_id(index): index for index in range(environment.num_tasks)}
    prefixes: list[Prefix] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prefixes.append(_prefix(number, line, config, index_of))
            except (msgspec.MsgspecError, ContractError) as error:
                problems.append(f"env.prefix_file: {path}:{number}: {error}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"env.prefix_file: {path}: {len(problems) - MAX_PROBLEMS} more bad lines"]
    if not prefixes and not problems:
        problems = [f"env.prefix_file: {path} holds no trace"]
    if problems:
        raise ConfigError(problems)
    return prefixes


def _prefix(number: int, line: bytes, config: EnvConfig, index_of: dict[str, int]) -> Prefix:
    """Decode and cut one row."""
    row = msgspec.json.decode(line, type=PrefixRow)
    problem = next(_problems_of(row, index_of), None)
    if problem is not None:
        raise ContractError(problem)
    mask = np.array(row.action_mask, dtype=bool)
    if config.prefix_cut == "index":
        if row.cut is None:
            raise ContractError('no cut, which prefix_cut = "index" needs')
        cut = cut_at(mask, row.cut)
    elif row.entropies is not None:
        cut = cut_by_entropy(mask, np.array(row.entropies))
    elif row.logprobs is not None:
        cut = cut_by_entropy(mask, -np.array(row.logprobs))
    else:
        raise ContractError('neither entropies nor logprobs, and prefix_cut = "entropy" needs either')
    prefix = Prefix(number, index_of[row.task_id], np.array(row.token_ids[:cut], dtype=np.uint32), mask[:cut])
    if cut >= config.max_trace_tokens:
        raise ContractError(f"a prefix of {cut} tokens leaves no room in max_trace_tokens = {config.max_trace_tokens}")
    if prefix.num_turns >= config.max_turns:
        raise ContractError(f"a prefix of {prefix.num_turns} turns leaves none of max_turns = {config.max_turns}")
    return prefix


def _problems_of(row: PrefixRow, index_of: dict[str, int]) -> Iterator[str]:
    if row.task_id not in index_of:
        yield f"the environment has no task {row.task_id!r}"
    for name in ("action_mask", "logprobs", "entropies"):
        array = getattr(row, name)
        if array is not None and len(array) != len(row.token_ids):
            yield f"{name} has {len(array)} entries for {len(row.token_ids)} tokens"
    if row.token_ids and not 0 <= min(row.token_ids) <= max(row.token_ids) < 2**32:
        yield f"token_ids holds no token ids: {min(row.token_ids)} to {max(row.token_ids)}"
    if row.action_mask[:1] == [1]:
        yield "action_mask begins with an action: there is no prompt before it"
    elif not len(turn_boundaries(np.array(row.action_mask, dtype=bool))):
        yield "there is no second turn to cut before"
