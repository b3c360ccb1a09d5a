"""The ranks of one train group and the few collectives they use, over gloo.

Notable:
- Commands and arrays travel as bytes in u8 tensors; nothing is ever pickled (`dist.*_object` is not used).
- Every collective has the group's deadline. A peer that died or froze surfaces here as `PeerLost`, also where it was
  missed by a collective that is not ours (`during`): gloo raises plain RuntimeErrors, told apart by their text.
- gloo cannot say whom it waited for. Peers of the same machine are looked up by pid: gone, stopped, or running.
- With one rank every call is the identity, through the same code path.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from services.wire.errors import PeerLost

T = TypeVar("T")
_LOST_IN_GLOO = ("gloo/transport/", "Application timeout caused pair closure")
_BUG_IN_GLOO = "enforce fail"
"""Of gloo's own checks, such as two ranks with different sizes: nobody was lost."""
_LOST_IN_NCCL = ("ncclRemoteError", "ncclSystemError", "timeout", "aborted")


class Ranks:
    """This process's place in its group; a group of one needs no process group."""

    def __init__(self, rank: int = 0, size: int = 1, *, deadline_s: float = 60.0) -> None:
        self.rank = rank
        self.size = size
        self._deadline_s = deadline_s
        self._phase = ""
        self._pids: dict[int, int] = {}

    @staticmethod
    def join(*, deadline_s: float, device: str = "cpu") -> Ranks:
        """Join the group that torchrun's environment describes; gradients on CUDA travel by NCCL, all else by gloo."""
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=deadline_s))
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), deadline_s=deadline_s)
        machine = _machine()
        rows = enumerate(ranks.gather_ints([machine, os.getpid()]))
        ranks.know_peers({rank: pid for rank, (other, pid) in rows if other == machine and rank != ranks.rank})
        return ranks

    def know_peers(self, pids: dict[int, int]) -> None:
        """Remember the other ranks of this machine, by rank, to say what became of them."""
        self._pids = pids

    def set_deadline(self, deadline_s: float, groups: Iterable[dist.ProcessGroup]) -> None:
        """Give every collective from here on another deadline.

        Args:
            deadline_s: Of one collective.
            groups: Those besides the default one; torch makes them with a deadline of half an hour.
        """
        self._deadline_s = deadline_s
        for group in (None, *groups):
            _set_pg_timeout(datetime.timedelta(seconds=deadline_s), group)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    @contextmanager
    def during(self, phase: str, *, collective: str) -> Iterator[None]:
        """Name what is going on to whoever is told that a peer was lost.

        Args:
            phase: Such as "step 3".
            collective: What the collectives within the block are that this class does not make, such as FSDP's.

        Raises:
            PeerLost: In place of the RuntimeErrors that torch raises for a lost peer; all others pass.
        """
        before, self._phase = self._phase, phase
        try:
            yield
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise self._lost(collective, error) from error
        finally:
            self._phase = before

    def _collective(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> PeerLost:
        where = f"{what} of {self._phase}" if self._phase else what
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        states = {rank: _state_of(pid) for rank, pid in self._pids.items()}
        suspects = [f"rank {rank} (pid {self._pids[rank]}) is {state}" for rank, state in states.items() if state]
        told = f"{', '.join(suspects)}; " if suspects else ""
        return PeerLost(f"rank {self.rank} lost its peers in {where} (deadline {self._deadline_s:g} s): {told}{reason}")

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Give rank 0's bytes to every rank; the other ranks pass None."""
        if self.size == 1:
            assert payload is not None
            return payload

        def call() -> bytes:
            length = torch.tensor([len(payload) if payload is not None else 0])
            dist.broadcast(length, src=0)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if payload is not None:
                buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else buffer
            if len(buffer):
                dist.broadcast(buffer, src=0)
            return buffer.numpy().tobytes()

        return self._collective("a command broadcast", call)

    def share_bytes(self, payload: bytes | None, *, first: int, last: int) -> bytes:
        """Give rank `first`'s bytes to the ranks after it up to `last`; each of them calls it, the others pass None."""
        if first == last:
            assert payload is not None
            return payload

        def call() -> bytes:
            if self.rank == first:
                assert payload is not None
                for peer in range(first + 1, last + 1):
                    self._wait(dist.isend(torch.tensor([len(payload)]), dst=peer))
                    if payload:
                        self._wait(dist.isend(torch.frombuffer(bytearray(payload), dtype=torch.uint8), dst=peer))
                return payload
            length = torch.zeros(1, dtype=torch.int64)
            self._wait(dist.irecv(length, src=first))
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if len(buffer):
                self._wait(dist.irecv(buffer, src=first))
            return buffer.numpy().tobytes()

        return self._collective("the sharing of a grid item", call)

    def _wait(self, work: dist.Work | None) -> None:
        """For one message; torch gives those the deadline that the group was made with."""
        assert work is not None, "this rank is of the group"
        work.wait(datetime.timedelta(seconds=self._deadline_s))

    def gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """All ranks' rows of equally many integers, in rank order, on every rank."""
        return [
            [int(x) for x in other]
            for other in self._gather(torch.tensor(list(row), dtype=torch.int64), "an agreement")
        ]

    def gather_f32(self, local: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """All ranks' f32 vectors, whose `sizes` every rank knows, on every rank."""
        padded = torch.zeros(max(sizes, default=0), dtype=torch.float32)
        padded[: len(local)] = local
        return [other[:size] for other, size in zip(self._gather(padded, "a gather of values"), sizes, strict=True)]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """All ranks' byte strings, in rank order, on every rank."""
        sizes = [int(size) for size in self._gather(torch.tensor([len(payload)]), "a gather of metrics")]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else padded[:0]
        gathered = self._gather(padded, "a gather of metrics")
        return [other[:size].numpy().tobytes() for other, size in zip(gathered, sizes, strict=True)]

    def gather_f64(self, row: Sequence[float]) -> list[list[float]]:
        """All ranks' rows of equally many f64 numbers, in rank order, on every rank."""
        return [
            other.tolist()
            for other in self._gather(torch.tensor(list(row), dtype=torch.float64), "a gather of metrics")
        ]

    def _gather(self, local: torch.Tensor, what: str) -> list[torch.Tensor]:
        if self.size == 1:
            return [local]
        out = [torch.empty_like(local) for _ in range(self.size)]
        if local.numel():
            self._collective(what, lambda: dist.all_gather(out, local))
        return out

    def all_true(self, ok: bool) -> bool:
        """True where every rank said true."""
        return all(row[0] for row in self.gather_ints([int(ok)]))

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks; a missing one counts as zero (law 5: unconditional)."""
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.size == 1:
            return
        flat = torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None])
        self._collective("the gradient sum", lambda: dist.all_reduce(flat))
        offset = 0
        for parameter in parameters:
            count = parameter.numel()
            parameter.grad = flat[offset : offset + count].view_as(parameter).to(parameter.dtype)
            offset += count


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether torch raised `error` because another rank died, froze or cannot be reached."""
    text = str(error)
    if isinstance(error, dist.DistBackendError):
        return any(mark in text for mark in _LOST_IN_NCCL)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return _BUG_IN_GLOO not in text and any(mark in text for mark in _LOST_IN_GLOO)


def _machine() -> int:
    """The same number in all processes that see each other by pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())


def _state_of(pid: int) -> str:
    """What is wrong with a process of this machine; empty where it runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "")
