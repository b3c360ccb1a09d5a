"""Batched token scoring: requests that wait together are packed together and run once, on all data ranks.

Notable:
- Rank 0 owns the queue. One `score` command takes as many waiting requests as the token budget allows (at least one),
  so a burst needs far fewer forwards than requests; every rank runs the same number of forwards.
- All requests of a command are scored by one state of the critic, between two grids, and say so by `critic_step`.
- A non-finite value is never returned: the request fails with its cause.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

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
"""Token budget of one command, in bins of seq_len per data rank: a waiting grid never waits for more."""


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
        self._running: list[ScoreJob] = []

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
        """Take the requests of the next command and plan their bins."""
        budget = FORWARDS_PER_COMMAND * self._seq_len * self._mesh.num_data_ranks
        with self._condition:
            self._running = [self._queue.popleft()]
            tokens = self._running[0].num_tokens
            while self._queue and tokens + self._queue[0].num_tokens <= budget:
                job = self._queue.popleft()
                tokens += job.num_tokens
                self._running.append(job)
        lengths = np.concatenate([job.batch.lengths for job in self._running])
        token_ids = np.concatenate([job.batch.token_ids for job in self._running])
        bins = pack(lengths.tolist(), seq_len=self._seq_len, num_data_ranks=self._mesh.num_data_ranks)
        return {"kind": self.kind, "lengths": lengths.tobytes(), "token_ids": token_ids.tobytes(), "bins": bins}

    def execute(self, command: dict[str, Any]) -> None:
        """Run this rank's bins; rank 0 collects all values and answers the requests."""
        self._board.enter("scoring")
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
        ends = np.cumsum(lengths)
        values = np.zeros(int(ends[-1]), dtype="<f4")  # [T]
        bootstraps = np.zeros(len(lengths), dtype="<f4")  # [S]
        for flat, rank_bins in zip(gathered, bins, strict=True):
            numbers, offset = flat.numpy(), 0
            for i in (i for own in rank_bins for i in own):
                end = offset + int(lengths[i])
                values[ends[i] - lengths[i] : ends[i]] = numbers[offset:end]
                bootstraps[i], offset = numbers[end], end + 1
        critic_step, first, first_token = self._board.steps_done, 0, 0
        for job in self._running:
            last, last_token = first + len(job.batch.lengths), first_token + job.num_tokens
            own = slice(first, last)
            scored = ScoredBatch(job.batch.lengths, values[first_token:last_token], bootstraps[own], critic_step)
            job.resolve(scored if _finite(scored) else NonFiniteError(_culprit(scored)))
            first, first_token = last, last_token
        self._running = []


def _finite(scored: ScoredBatch) -> bool:
    return bool(np.isfinite(scored.bootstrap_values).all() and np.isfinite(scored.values).all())


def _culprit(scored: ScoredBatch) -> str:
    """Which branch cannot be answered."""
    pairs = zip(scored.branches(), scored.bootstrap_values, strict=True)
    bad = [not (np.isfinite(values).all() and np.isfinite(bootstrap)) for values, bootstrap in pairs]
    return f"the critic produced a non-finite value in branch {bad.index(True)} ({sum(bad)} of {len(bad)})"
