"""What tensors hold, as one number: memory that went away and came back must have the same.

Notable:
- vLLM's workers import this in an environment of their own: it needs torch alone.
- Buffers count: a rotary table that came back as zeros would bend every position in silence.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_WORD_BYTES = 8
_CHUNK_WORDS = 2**22
"""Summed at a time: what a sum needs besides the tensor is this many words, twice."""
_MODULUS = 2**64


def checksum(tensor: torch.Tensor) -> int:
    """Sum over a tensor's bytes, as words x_i of 64 bits: (2 i + 1) x_i, modulo 2^64.

    Exact whatever the order of summation, so CPU and CUDA agree. Each factor is odd, hence one changed word always
    changes the sum; two words that changed places do, but for one case in billions.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:  # it begins in the middle of a word
        flat = flat.clone()
    return sums_of([flat.view(torch.uint8)])[0]


def sums_of(flat: list[torch.Tensor]) -> list[int]:
    """The sums of byte vectors that lie on one device, with one wait for it."""
    if not flat:
        return []
    return [total % _MODULUS for total in torch.stack([_sum(one) for one in flat]).tolist()]


@torch.no_grad()
def _sum(flat: torch.Tensor) -> torch.Tensor:
    """[] i64, of bytes that begin where words do."""
    num_words = len(flat) // _WORD_BYTES
    words = flat[: num_words * _WORD_BYTES].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, num_words, _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        factors = torch.arange(2 * start + 1, 2 * (start + len(chunk)) + 1, 2, device=flat.device)
        total += factors.mul_(chunk).sum()
    rest = flat[num_words * _WORD_BYTES :].long()
    factors = 2 * torch.arange(num_words, num_words + len(rest), device=flat.device) + 1
    return total + (factors * rest).sum()


def weights_checksum(model: nn.Module) -> str:
    """Sum over names, shapes and bytes of all parameters and buffers.

    Returns:
        16 hexadecimal digits; what is in memory, so other ranks of the same model have others.
    """
    digest, on_device = hashlib.sha256(), False
    for name, tensor in tensors_of(model):
        digest.update(f"{name} {tuple(tensor.shape)} {checksum(tensor)}\n".encode())
        on_device |= tensor.is_cuda
    if on_device:
        torch.cuda.empty_cache()  # what the sums took must not stay behind while others own the device
    return digest.hexdigest()[:16]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, of a sharded one this rank's part."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
