"""The ranks of one train group and the few collectives they use, over gloo.

Notable:
- Commands and arrays travel as bytes in u8 tensors; nothing is ever pickled (`dist.*_object` is not used).
- Every collective has the group's deadline. A peer that died or froze surfaces here as `PeerLost`.
- With one rank every call is the identity, through the same code path.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from services.wire.errors import PeerLost

T = TypeVar("T")


class Ranks:
    """This process's place in its group; a group of one needs no process group."""

    def __init__(self, rank: int = 0, size: int = 1, *, deadline_s: float = 60.0) -> None:
        self.rank = rank
        self.size = size
        self._deadline_s = deadline_s

    @staticmethod
    def join(*, deadline_s: float, device: str = "cpu") -> Ranks:
        """Join the group that torchrun's environment describes; gradients on CUDA travel by NCCL, all else by gloo."""
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=deadline_s))
        return Ranks(dist.get_rank(), dist.get_world_size(), deadline_s=deadline_s)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _collective(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise PeerLost(
                f"rank {self.rank} lost its peers in {what} (deadline {self._deadline_s:g} s): {reason}"
            ) from error

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
        sizes = [row[0] for row in self.gather_ints([len(payload)])]
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
