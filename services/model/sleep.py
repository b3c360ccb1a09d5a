"""Tensors that give their memory back and take it again: a role sleeps while another owns the device.

Notable:
- Only the memory of a storage goes and comes. Tensors stay the objects that they are, views of one storage included,
  so nobody who holds them has to be told.
- What sleeps lies in host memory: one block, kept from sleep to sleep, pinned where the device is CUDA. torch's own
  pinned allocator would round every tensor up to a power of two.
- Every byte is summed on the device before the sleep and again after it, position by position: device memory is not
  trusted to come back, and neither is the way there.
- On CPU it is the same: memory is given back to the process's allocator and taken anew.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.distributed.tensor import DTensor

from services.model.checksum import sums_of

_ALIGNMENT = 256

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class _Block:
    """One storage, and where its bytes sleep."""

    name: str
    storage: torch.UntypedStorage
    num_bytes: int
    start: int
    """in host memory"""

    @property
    def here(self) -> torch.Tensor:
        """[num_bytes] its memory on the device, as bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class HostBackup:
    """Device memory of some tensors, given back and taken again.

    Args:
        tensors: Named tensors, asked for at each sleep. Those that share a storage count once, by their first name.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors
        self._asleep: list[_Block] = []
        self._sums: list[int] = []
        self._host = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        """of the storages that were put to sleep last"""

    @property
    def is_asleep(self) -> bool:
        """Between `put_to_sleep` and `wake`."""
        return bool(self._asleep)

    def put_to_sleep(self) -> int:
        """Sum everything, copy it to host memory and give the device's back.

        Returns:
            Bytes given back; 0 where it slept already.
        """
        if self._asleep:
            return 0
        blocks = _blocks_of(self._tensors())
        devices = {block.storage.device for block in blocks if block.storage.device.type == "cuda"}
        self.num_bytes = sum(block.num_bytes for block in blocks)
        self._make_room(max((block.start + block.num_bytes for block in blocks), default=0), pinned=bool(devices))
        self._sums = sums_of([block.here for block in blocks])
        for block in blocks:
            self._bytes_of(block).copy_(block.here, non_blocking=True)
        _synchronize(devices)
        for block in blocks:
            block.storage.resize_(0)
        self._asleep = blocks
        if devices:
            gc.collect()
            torch.cuda.empty_cache()
        return self.num_bytes

    def wake(self) -> list[str]:
        """Take the memory again, with everything in it that went to sleep.

        Returns:
            Names of the tensors that are not what they were; none where all is well, or where nothing slept.
        """
        blocks, self._asleep = self._asleep, []
        for block in blocks:
            block.storage.resize_(block.num_bytes)
            block.here.copy_(self._bytes_of(block), non_blocking=True)
        sums = sums_of([block.here for block in blocks])
        return [block.name for block, now, then in zip(blocks, sums, self._sums, strict=False) if now != then]

    def _bytes_of(self, block: _Block) -> torch.Tensor:
        return self._host[block.start : block.start + block.num_bytes]

    def _make_room(self, num_bytes: int, *, pinned: bool) -> None:
        if len(self._host) >= num_bytes:
            return
        self._host = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        self._host = _pinned(num_bytes) if pinned else torch.empty(num_bytes, dtype=torch.uint8)


def _pinned(num_bytes: int) -> torch.Tensor:
    """Page-locked host memory; ordinary memory, and slower turns, where the system does not lock that much."""
    host = torch.empty(num_bytes, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(host.data_ptr(), num_bytes, 0))
    if code == 0:
        # memory that goes back to the system while it is registered could never be registered again
        weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
        return host
    logger.warning(
        "{:.1f} GB of host memory cannot be pinned (CUDA error {}): turns take longer", num_bytes / 1e9, code
    )
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)  # CUDA would report the same error once more, to whoever comes next
    return host


def _blocks_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[_Block]:
    """Each storage once, in the order of the names."""
    blocks: dict[int, _Block] = {}
    end = 0
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes == 0 or storage._cdata in blocks:
            continue
        assert storage.resizable(), f"{name} lies in memory that is not torch's own"
        blocks[storage._cdata] = _Block(name, storage, num_bytes, end)
        end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return list(blocks.values())


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


@torch.no_grad()
def own_memory(module: nn.Module) -> None:
    """Copy what lies in a mapped file, as loaded parameters do on CPU, to memory that can be given back.

    Call it before anything else holds views of them.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
