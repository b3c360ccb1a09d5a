"""`counterpoint score --url URL FILE.jsonl`: values for the token sequences of a file, from a running value service.

    {"token_ids": [7, 8, 9], "id": "a"}  ->  the same row with "values", "bootstrap_value" and "critic_step"

Notable:
- Every row is checked before the first one is scored, against the limits that the service itself names: what cannot be
  scored is told as file:line, and nothing is written.
- Rows are read twice and never held: memory does not grow with the file. A few requests are under way at once; rows
  come out in the file's order, and the file of `--out` appears when it is complete.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec

from services.runtime.auth import Token
from services.transport.score_client import ScoreClient, ServiceFacts
from services.wire.errors import CannotWrite, UsageError
from services.wire.messages import ScoreReply

BATCH_TOKENS = 65_536
BATCH_ROWS = 256
NUM_UNDER_WAY = 4
PROBLEMS_TOLD = 20
PROGRESS_INTERVAL_S = 5.0
_decode_row = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True)
class Row:
    """A line of the file."""

    place: str
    """file:line"""
    content: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """What is scored."""
        return self.content["token_ids"]


def score_file(url: str, path: Path, out: Path | None, *, token: Token | None, deadline_s: float) -> int:
    """Score a file.

    Args:
        url: http://host:port of the service.
        path: JSON lines.
        out: File to write; None = standard output.
        token: What the service asks for, if it does.
        deadline_s: Of each request, all attempts included.

    Returns:
        Rows scored.

    Raises:
        UsageError: rows that cannot be scored, each as file:line; nothing has been written.
        ContractError, DeadlineExceeded, DependencyLost: as `ScoreClient.score`.
        CannotWrite: the output cannot be written.
    """
    return asyncio.run(_score_file(url, path, out, token, deadline_s))


async def _score_file(url: str, path: Path, out: Path | None, token: Token | None, deadline_s: float) -> int:
    client = ScoreClient(url, token=token)
    try:
        facts = await client.facts(deadline_s=deadline_s)
        num_rows = _check(path, facts)
        progress = _Progress(num_rows)
        with _output(out) as file:
            async for row, values, bootstrap, step in _scored(client, path, facts, deadline_s):
                extra = {"values": values, "bootstrap_value": bootstrap, "critic_step": step}
                file.write(msgspec.json.encode(row.content | extra).decode() + "\n")
                progress.add(len(row.token_ids))
        progress.end()
        return num_rows
    finally:
        await client.close()


async def _scored(
    client: ScoreClient, path: Path, facts: ServiceFacts, deadline_s: float
) -> AsyncIterator[tuple[Row, list[float], float, int]]:
    """Rows with their values, in order."""
    under_way: deque[tuple[list[Row], asyncio.Task[ScoreReply]]] = deque()
    batches = _batches(path, facts)
    try:
        while True:
            while len(under_way) < NUM_UNDER_WAY and (batch := next(batches, None)) is not None:
                ids = [row.token_ids for row in batch]
                under_way.append((batch, asyncio.create_task(client.score(ids, deadline_s=deadline_s))))
            if not under_way:
                return
            batch, task = under_way.popleft()
            reply = await task
            for row, values, bootstrap in zip(batch, reply.values, reply.bootstrap_values, strict=True):
                yield row, values, bootstrap, reply.critic_step
    finally:
        for _, task in under_way:
            task.cancel()
        await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)


def _batches(path: Path, facts: ServiceFacts) -> Iterator[list[Row]]:
    batch: list[Row] = []
    num_tokens, most_tokens = 0, min(BATCH_TOKENS, facts.max_tokens, facts.max_bytes // 8)
    for row in _rows(path):
        if batch and (
            len(batch) == min(BATCH_ROWS, facts.max_branches) or num_tokens + len(row.token_ids) > most_tokens
        ):
            yield batch
            batch, num_tokens = [], 0
        batch.append(row)
        num_tokens += len(row.token_ids)
    if batch:
        yield batch


def _rows(path: Path) -> Iterator[Row]:
    """Rows that have been checked."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Row(f"{path}:{number}", _decode_row(line))


def _check(path: Path, facts: ServiceFacts) -> int:
    """Check every row; how many there are."""
    problems: list[str] = []
    num_rows = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                num_rows += 1
                problem = problem_of(line, facts)
                if problem is not None:
                    problems.append(f"{path}:{number}: {problem}")
                if len(problems) == PROBLEMS_TOLD:
                    problems.append("... (the rest was not looked at)")
                    break
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if problems:
        raise UsageError("rows that cannot be scored; nothing was written\n" + "\n".join(problems))
    return num_rows


def problem_of(line: bytes, facts: ServiceFacts) -> str | None:
    """What is wrong with one line; None where it can be scored."""
    try:
        row = _decode_row(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "not a JSON object"
    ids = row.get("token_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        return "token_ids is not a list of integers"
    if not ids:
        return "token_ids is empty"
    if len(ids) > facts.max_model_len:
        return f"{len(ids)} tokens, the service takes {facts.max_model_len}"
    if min(ids) < 0 or max(ids) >= facts.vocab_size:
        return f"a token id outside the service's vocabulary of {facts.vocab_size}"
    taken = sorted({"values", "bootstrap_value", "critic_step"} & row.keys())
    return f"{taken[0]} is there already" if taken else None


@contextmanager
def _output(out: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that gets its name when it is complete."""
    if out is None:
        yield sys.stdout
        return
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with part.open("w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, out)
    except OSError as error:
        raise CannotWrite(f"cannot write {out}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


class _Progress:
    """A line on standard error now and then."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows = self._tokens = 0
        self._started = time.monotonic()
        self._next = self._started + PROGRESS_INTERVAL_S

    def add(self, num_tokens: int) -> None:
        """One more row is done."""
        self._rows += 1
        self._tokens += num_tokens
        if time.monotonic() >= self._next:
            self._next += PROGRESS_INTERVAL_S
            self._say()

    def end(self) -> None:
        """All rows are done."""
        self._say()

    def _say(self) -> None:
        seconds = time.monotonic() - self._started
        rate = self._tokens / max(seconds, 1e-9)
        sys.stderr.write(f"scored {self._rows} of {self._num_rows} rows, {rate:,.0f} tokens/s\n")
