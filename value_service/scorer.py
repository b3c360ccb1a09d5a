"""Batched token scoring: requests that wait together are packed together and run once, on all data ranks.

Notable:
- Rank 0 owns the queue. One `score` command takes as many waiting requests as the token budget allows, so a burst needs
  far fewer forwards than requests; every rank runs the same number of forwards.
- A request over the budget has a command of its own, which goes on part by part: a forward of it, then one of small
  requests that came meanwhile. A small one waits for a forward or two, never for the whole of a large one; the large
  one, and a grid behind it, for no more than a small forward to each of its own.
- All requests of a command are scored by one state of the critic, between two grids, and say so by `critic_step`.
- A non-finite value is never returned: the request fails with its cause.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.model.mesh import Mesh
from services.packing.plan import pack
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from services.wire.errors import NonFiniteError
from services.wire.scoring import ScoredBatch, TokenBatch

FORWARDS_PER_COMMAND = 4
"""Token budget of one command, in bins of seq_len per data rank: a waiting grid waits for no more, unless a single
request has more."""


@dataclass(slots=True)
class ScoreJob:
    """One HTTP request on its way through the queue."""

    batch: TokenBatch
    loop: asyncio.AbstractEventLoop
    reply: asyncio.Future[ScoredBatch]

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches."""
        return len(self.batch.token_ids)

    def resolve(self, reply: ScoredBatch | Exception) -> None:
        """Hand the outcome to the request's event loop, from any thread."""

        def deliver() -> None:
            if self.reply.done():  # the client went away
                return
            if isinstance(reply, Exception):
                self.reply.set_exception(reply)
            else:
                self.reply.set_result(reply)

        self.loop.call_soon_threadsafe(deliver)


@dataclass(slots=True, eq=False)
class _Started:
    """A request that is being scored, and what there is of its reply."""

    job: ScoreJob
    ends: np.ndarray  # [S] where branches end
    values: np.ndarray  # [T]
    bootstraps: np.ndarray  # [S]
    num_missing: int
    """branches"""
    columns: deque[list[list[int]]] = field(default_factory=deque)
    """of a request that goes on part by part: what each data rank runs in each of the forwards that are left"""

    @staticmethod
    def of(job: ScoreJob) -> _Started:
        """Nothing of it yet."""
        lengths = job.batch.lengths
        values, bootstraps = np.zeros(job.num_tokens, dtype="<f4"), np.zeros(len(lengths), dtype="<f4")
        return _Started(job, np.cumsum(lengths, dtype=np.int64), values, bootstraps, len(lengths))

    def span(self, branch: int) -> slice:
        """Where a branch lies among the tokens."""
        end = int(self.ends[branch])
        return slice(end - int(self.job.batch.lengths[branch]), end)


class Scorer:
    """The critic's own commands: a queue on rank 0, forwards on every rank."""

    kind = "score"

    def __init__(self, critic: Critic, ranks: Ranks, mesh: Mesh, board: StatusBoard, *, seq_len: int) -> None:
        self._critic = critic
        self._ranks = ranks
        self._mesh = mesh
        self._board = board
        self._seq_len = seq_len
        self._queue: deque[ScoreJob] = deque()
        self._condition = threading.Condition()
        self._large: _Started | None = None
        """The request that goes on part by part, while parts are left."""
        self._owes_small = False
        self._pieces: list[tuple[_Started, int]] = []
        """Request and branch of each sequence of the part that is being scored."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def submit(self, job: ScoreJob) -> None:
        """Queue a request (any thread)."""
        with self._condition:
            self._queue.append(job)
            self._condition.notify()

    def pending(self) -> bool:
        """Is a request waiting."""
        return bool(self._queue)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a request arrives or the time is up."""
        with self._condition:
            if not self._queue:
                self._condition.wait(timeout_s)

    def next_command(self) -> dict[str, Any]:
        """Take the requests of the next command and plan its bins, or those of its first part."""
        budget = FORWARDS_PER_COMMAND * self._column_tokens
        with self._condition:
            jobs = [self._queue.popleft()]
            tokens = jobs[0].num_tokens
            while self._queue and tokens + self._queue[0].num_tokens <= budget:
                jobs.append(self._queue.popleft())
                tokens += jobs[-1].num_tokens
        if tokens <= budget:
            return {"kind": self.kind, **self._whole(jobs)}
        self._large, self._owes_small = _Started.of(jobs[0]), False
        bins = self._pack(jobs[0].batch.lengths)
        self._large.columns.extend(list(column) for column in zip(*bins, strict=True))
        return {"kind": self.kind, **self._next_part()}

    def execute(self, command: dict[str, Any]) -> None:
        """Run this rank's bins, part by part; rank 0 collects all values and answers the requests."""
        self._board.enter("scoring")
        self._execute_part(command)
        while not command["is_last"]:
            payload = msgspec.msgpack.encode(self._next_part()) if self._ranks.rank == 0 else None
            command = msgspec.msgpack.decode(self._ranks.broadcast_bytes(payload))
            self._execute_part(command)

    @property
    def _column_tokens(self) -> int:
        """Of one forward of every data rank."""
        return self._seq_len * self._mesh.num_data_ranks

    def _pack(self, lengths: np.ndarray) -> list[list[list[int]]]:
        return pack(lengths.tolist(), seq_len=self._seq_len, num_data_ranks=self._mesh.num_data_ranks)

    def _next_part(self) -> dict[str, Any]:
        """A forward of the large request that is under way; after each, one of small requests that came meanwhile."""
        assert self._large is not None
        small = self._take_small() if self._owes_small else []
        self._owes_small = not small
        if small:
            return self._whole(small)
        pieces: list[tuple[_Started, int]] = []
        bins: list[list[list[int]]] = []
        for column in self._large.columns.popleft():
            bins.append([list(range(len(pieces), len(pieces) + len(column)))])
            pieces += [(self._large, branch) for branch in column]
        if not self._large.columns:
            self._large = None
        return self._part(pieces, bins)

    def _take_small(self) -> list[ScoreJob]:
        """Waiting requests that fit in one forward, the first of them first."""
        left, taken, others = self._column_tokens, [], deque[ScoreJob]()
        with self._condition:
            for job in self._queue:
                if job.num_tokens <= left:
                    taken.append(job)
                    left -= job.num_tokens
                else:
                    others.append(job)
            self._queue = others
        return taken

    def _whole(self, jobs: list[ScoreJob]) -> dict[str, Any]:
        """All of these requests."""
        pieces = [(own, branch) for own in map(_Started.of, jobs) for branch in range(own.num_missing)]
        return self._part(pieces, self._pack(np.concatenate([job.batch.lengths for job in jobs])))

    def _part(self, pieces: list[tuple[_Started, int]], bins: list[list[list[int]]]) -> dict[str, Any]:
        """What every rank needs to run these branches, and whether more of a large request follows."""
        self._pieces = pieces
        lengths = np.array([own.job.batch.lengths[branch] for own, branch in pieces], dtype="<u4")
        token_ids = np.concatenate([own.job.batch.token_ids[own.span(branch)] for own, branch in pieces])
        is_last = self._large is None
        return {"lengths": lengths.tobytes(), "token_ids": token_ids.tobytes(), "bins": bins, "is_last": is_last}

    def _execute_part(self, command: dict[str, Any]) -> None:
        lengths = np.frombuffer(command["lengths"], dtype="<u4").astype(np.int64)
        token_ids = np.frombuffer(command["token_ids"], dtype="<u4").astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        bins: list[list[list[int]]] = command["bins"]
        outputs = [self._run_bin(own, token_ids, lengths, starts) for own in bins[self._mesh.data_rank]]
        per_bins = [sum(int(lengths[i]) + 1 for own in rank_bins for i in own) for rank_bins in bins]
        # the context ranks of a data rank hold the same values: the first of them tells
        cp, size = self._mesh.cp, self._ranks.size
        sizes = [0 if rank % cp else per_bins[rank // cp] for rank in range(size)]
        own = torch.cat(outputs) if outputs and self._mesh.cp_rank == 0 else torch.zeros(0)
        gathered = self._ranks.gather_f32(own, sizes)
        if self._ranks.rank == 0:
            self._board.add(num_forwards=len(bins[0]), num_scored_tokens=len(token_ids))
            self._board.progress()
            self._answer(gathered[::cp], bins, lengths)

    @torch.no_grad()
    def _run_bin(self, own: list[int], token_ids: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Values then bootstrap value of each branch of a bin, flat; an empty bin runs a dummy of one token."""
        device = self._mesh.device
        if not own:
            self._critic(torch.zeros(1, dtype=torch.long, device=device), PackedLayout.of([1], device, self._mesh))
            return torch.zeros(0)
        row = np.concatenate([token_ids[starts[i] : starts[i + 1]] for i in own])
        layout = PackedLayout.of([int(lengths[i]) for i in own], device, self._mesh)
        output = layout.gather(self._critic(torch.from_numpy(row).to(device), layout))
        values, bootstraps = values_before_tokens(output, torch.tensor(layout.lengths, device=device))
        pieces = zip(values.split(list(layout.lengths)), bootstraps, strict=True)
        return torch.cat([part for v, b in pieces for part in (v, b[None])]).float().cpu()

    def _answer(self, gathered: list[torch.Tensor], bins: list[list[list[int]]], lengths: np.ndarray) -> None:
        """Put values where they belong, and reply to the requests that are complete."""
        for flat, rank_bins in zip(gathered, bins, strict=True):
            numbers, offset = flat.numpy(), 0
            for i in (i for own in rank_bins for i in own):
                end, (started, branch) = offset + int(lengths[i]), self._pieces[i]
                started.values[started.span(branch)] = numbers[offset:end]
                started.bootstraps[branch], offset = numbers[end], end + 1
        for started, _ in self._pieces:
            started.num_missing -= 1
            if not started.num_missing:
                job, step = started.job, self._board.steps_done
                scored = ScoredBatch(job.batch.lengths, started.values, started.bootstraps, step)
                job.resolve(scored if _finite(scored) else NonFiniteError(_culprit(scored)))
        self._pieces = []


def _finite(scored: ScoredBatch) -> bool:
    return bool(np.isfinite(scored.bootstrap_values).all() and np.isfinite(scored.values).all())


def _culprit(scored: ScoredBatch) -> str:
    """Which branch cannot be answered."""
    pairs = zip(scored.branches(), scored.bootstrap_values, strict=True)
    bad = [not (np.isfinite(values).all() and np.isfinite(bootstrap)) for values, bootstrap in pairs]
    return f"the critic produced a non-finite value in branch {bad.index(True)} ({sum(bad)} of {len(bad)})"
