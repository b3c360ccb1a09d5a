"""Ulysses: before attention every rank trades its rows of all heads for all rows of its heads, and back afterwards.

Paper: arXiv 2309.14509, section 3.

Notable:
- One all-to-all each for query, key, value and result; its gradient is the same exchange backwards.
- Where key heads are fewer than ranks they are repeated first, as few times as the exchange needs; a query head keeps
  its key head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from services.model.mesh import Mesh
from services.wire.errors import ConfigError


class _Exchange(torch.autograd.Function):
    """Slice i of the first dimension goes to rank i; slice i of the result came from rank i."""

    @staticmethod
    def forward(ctx: Any, slices: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _exchange(slices, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad, ctx.group), None


def _exchange(slices: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty(slices.shape, dtype=slices.dtype, device=slices.device)
    dist.all_to_all_single(out, slices.contiguous(), group=group)
    return out


def rows_to_heads(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """`[1, H, T / C, D]` of this rank's rows to `[1, H / C, T, D]` of its heads."""
    assert mesh.cp_group is not None
    _, heads, rows, width = x.shape
    slices = x[0].view(mesh.cp, heads // mesh.cp, rows, width)
    traded = _Exchange.apply(slices, mesh.cp_group)  # [C rows' owners, H / C, T / C, D]
    return traded.transpose(0, 1).reshape(1, heads // mesh.cp, mesh.cp * rows, width)


def heads_to_rows(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """`[1, T, H / C, D]` of this rank's heads to `[1, T / C, H, D]` of its rows."""
    assert mesh.cp_group is not None
    _, rows, heads, width = x.shape
    slices = x[0].view(mesh.cp, rows // mesh.cp, heads, width)
    traded = _Exchange.apply(slices, mesh.cp_group)  # [C heads' owners, T / C, H / C, D]
    return traded.transpose(0, 1).reshape(1, rows // mesh.cp, mesh.cp * heads, width)


def num_repeats(num_heads: int, num_key_heads: int, cp: int) -> int:
    """How often key heads must be repeated so that `cp` ranks get whole heads that belong together.

    Raises:
        ConfigError: when the query heads cannot be divided.
    """
    if num_heads % cp:
        raise ConfigError([f"model.cp: {cp} ranks cannot share the {num_heads} attention heads of this model"])
    groups = num_heads // num_key_heads
    repeats = cp // math.gcd(num_key_heads, cp)
    return repeats if groups % repeats == 0 else groups
