"""How the sequences of a packed row lie, and which stretch of the row a context-parallel rank holds.

Legend: T tokens of a row, C context-parallel ranks, P padding tokens, so that C divides T + P; B x L a padded batch.

Notable:
- With C > 1 a row is followed by P padding tokens, a sequence of their own, and rank c holds the rows
  [c (T + P) / C, (c + 1) (T + P) / C). Everything that goes with tokens is cut by `shard` and put together by `gather`.
- A padding token is nobody's neighbour and nobody's label, so it is neither in a loss nor in a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from services.model.mesh import Mesh


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of a packed row lie.

    `buckets` holds, per group of similar lengths, `index [B, L]` into the row (padding points at the sequence's own
    first token) and `flat [n]`, the positions in `[B * L]` that are real, with `rows [n]`, their places in the row.
    """

    lengths: tuple[int, ...]
    """of the real sequences"""
    position_ids: torch.Tensor
    """[1, (T + P) / C] of this rank's rows, restarting at 0 for each sequence"""
    buckets: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    offsets: torch.Tensor
    """[S + 1] i32, where the sequences of the whole row begin, padding included, and its end"""
    num_padding: int = 0
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def num_tokens(self) -> int:
        """T, the real tokens of the whole row."""
        return sum(self.lengths)

    @property
    def num_local(self) -> int:
        """Rows of this rank, padding included."""
        return self.position_ids.shape[1]

    @property
    def first_local(self) -> int:
        """The row that this rank's first one is in the whole."""
        return self.mesh.cp_rank * self.num_local

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu", mesh: Mesh | None = None) -> PackedLayout:
        """Lay out sequences of these lengths, each at least 1, one after another, over the context ranks of `mesh`."""
        mesh = mesh or Mesh()
        num_padding = -sum(lengths) % mesh.cp
        padded = [*lengths, num_padding] if num_padding else list(lengths)
        offsets = torch.tensor([0, *padded]).cumsum(0)
        positions = torch.cat([torch.arange(n) for n in padded]) if padded else torch.zeros(0, dtype=torch.long)
        num_local = len(positions) // mesh.cp
        own = positions[mesh.cp_rank * num_local : (mesh.cp_rank + 1) * num_local]
        return PackedLayout(
            tuple(lengths),
            own[None].to(device),
            _buckets(padded, offsets.tolist(), device),
            offsets.to(device, torch.int32),
            num_padding,
            mesh,
        )

    def shard(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's stretch `[(T + P) / C, ...]` of anything `[T, ...]` that goes with tokens; padding is 0."""
        if self.num_padding:
            row = torch.cat([row, row.new_zeros(self.num_padding, *row.shape[1:])])
        return row[self.first_local : self.first_local + self.num_local]

    def holds(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] bool: which rows of the whole this rank holds."""
        return (rows >= self.first_local) & (rows < self.first_local + self.num_local)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole `[T, ...]` from every rank's stretch, in order and without padding; carries no gradient."""
        if self.mesh.cp_group is None:
            return local
        parts = [torch.empty_like(local) for _ in range(self.mesh.cp)]
        dist.all_gather(parts, local.detach().contiguous(), group=self.mesh.cp_group)
        return torch.cat(parts)[: self.num_tokens]


def _buckets(
    lengths: list[int], starts: list[int], device: torch.device | str
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(i)
    buckets = []
    for _, members in sorted(groups.items()):
        start_B = torch.tensor([starts[i] for i in members])
        length_B = torch.tensor([lengths[i] for i in members])
        offset_L = torch.arange(int(length_B.max()))
        real_BL = offset_L[None, :] < length_B[:, None]
        index_BL = start_B[:, None] + torch.where(real_BL, offset_L[None, :], 0)
        flat = real_BL.flatten().nonzero().flatten()
        rows = index_BL.flatten()[flat]
        buckets.append((index_BL.to(device), flat.to(device), rows.to(device)))
    return tuple(buckets)
