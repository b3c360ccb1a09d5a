"""How far a step moved the parts of a model: ||W1 - W0|| over the norm of W, by attention, experts, norms and so on.

Legend: W0 the weights before a step, W1 after it, of all parameters of one part together.

Notable:
- Taken once a step, over all its updates: a copy of what trains before the first, one pass over it after the last. The
  copy lives in host memory and costs 4 bytes a parameter of this rank; device memory is for training.
- The norm that it is relative to is the larger of ||W0|| and ||W1||: a head that starts at zero moves by 1, one that is
  wiped out too, and a part of zeros that stays moves by 0.
- Squares are summed in f64 over local shards, replicas counted once, and over the ranks in one gather: the same number
  on every rank and, up to rounding, in every layout.
- What is frozen is not copied. Its norm must stay, bit for bit; by how much it does not is the least that it moved.
- A part is told by path components (`services.config.parts`): a query's norm within attention is of the attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from services.config.parts import is_part
from services.training.parts import local_of, reshard
from services.training.ranks import Ranks

_COMPONENTS = {
    "adapters": ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"),
    "head": ("head", "lm_head", "embed_out"),
    "attention": ("attention",),
    "experts": ("experts", "shared_expert", "shared_experts"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe"),
    "embeddings": ("embed_tokens", "embeddings", "word_embeddings", "embed_in", "wte", "wpe"),
}
"""Components of a path that tell its part, the first part that fits; a value head is called "head"."""
PARTS = (*_COMPONENTS, "norms", "other")


def part_of(path: str) -> str:
    """The part that a parameter is of.

    Args:
        path: Its dotted name.
    """
    for part, names in _COMPONENTS.items():
        if any(is_part(path, name) for name in names):
            return part
    is_norm = any("norm" in component or component.startswith("ln_") for component in path.split("."))
    return "norms" if is_norm else "other"


@dataclass(frozen=True, slots=True)
class Moved:
    """What a step did to one part."""

    relative: float
    """||W1 - W0|| / max(||W0||, ||W1||); 0 exactly where no bit has changed"""
    norm: float
    """||W1||"""


@dataclass(slots=True)
class _Tensor:
    """One parameter as this rank holds it."""

    part: str
    parameter: nn.Parameter
    copy: torch.Tensor | None = None
    """in host memory, kept from step to step"""


class Movement:
    """Measures a model's steps. Every rank calls `begin` and `end`."""

    def __init__(self, model: nn.Module, ranks: Ranks, *, interval_steps: int, always: Sequence[str] = ()) -> None:
        """Take the parameters as they are sharded now.

        Args:
            model: In its layout.
            ranks: The group.
            interval_steps: Steps from one measurement of all parts to the next; 0 = never.
            always: Parts that are measured in every step all the same.
        """
        reshard(model)
        self._tensors = [_Tensor(part_of(name), parameter) for name, parameter in model.named_parameters()]
        self._ranks = ranks
        self._interval_steps = interval_steps
        self._always = always
        self._measured: list[_Tensor] = []
        self._before: list[float] = []

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Before the first update of `step`."""
        is_due = self._interval_steps > 0 and step % self._interval_steps == 0
        self._measured = [tensor for tensor in self._tensors if is_due or tensor.part in self._always]
        for tensor in self._measured:
            if tensor.parameter.requires_grad:
                local = local_of(tensor.parameter)
                if tensor.copy is None:
                    is_pinned = local.device.type == "cuda"
                    tensor.copy = torch.empty_like(local, device="cpu", pin_memory=is_pinned)
                tensor.copy.copy_(local, non_blocking=True)
        self._before = _norms(local_of(tensor.parameter) for tensor in self._measured)  # waits for the copies too

    @torch.no_grad()
    def end(self) -> dict[str, Moved]:
        """After the last update: what became of each part that was measured; the same on every rank."""
        after = _norms(local_of(tensor.parameter) for tensor in self._measured)
        steps = iter(_norms(_difference(tensor) for tensor in self._measured if tensor.copy is not None))
        parts = [part for part in PARTS if any(tensor.part == part for tensor in self._measured)]
        if not parts:  # on all ranks or on none
            return {}
        sums = {(part, is_sharded): [0.0, 0.0, 0.0] for part in parts for is_sharded in (True, False)}
        for tensor, norm_before, norm_after in zip(self._measured, self._before, after, strict=True):
            step = norm_after - norm_before if tensor.copy is None else next(steps)
            own = sums[tensor.part, isinstance(tensor.parameter, DTensor)]
            for index, norm in enumerate((norm_before, norm_after, step)):
                own[index] += norm * norm
        rows = self._ranks.gather_f64([square for own in sums.values() for square in own])
        moved = {}
        for number, part in enumerate(parts):
            start = 6 * number  # three sums over shards, then three over replicas, which are alike on all ranks
            totals = [math.sqrt(sum(row[start + i] for row in rows) + rows[0][start + 3 + i]) for i in range(3)]
            largest = max(totals[:2])
            moved[part] = Moved(totals[2] / largest if largest > 0 else 0.0, totals[1])
        return moved


def _difference(tensor: _Tensor) -> torch.Tensor:
    """W1 - W0 of this rank, on its device."""
    assert tensor.copy is not None
    local = local_of(tensor.parameter)
    if local.device.type == "cpu":
        return local - tensor.copy
    return tensor.copy.to(local.device).neg_().add_(local)


def _norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Of each tensor, in f64, with one wait for the device."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).tolist() if norms else []
