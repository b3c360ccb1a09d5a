"""Which samples made the loss of a micro-batch non-finite, in words that lead back to them.

Notable:
- A sample is told by its number in the grid item, as in the item's `lengths`: the wire knows no names of traces.
- Where every sample's own loss is finite and only their sum is not, the largest one is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.wire.grids import MicroBatch

CULPRITS_TOLD = 2


@dataclass(frozen=True)
class Suspect:
    """One sample with the loss it has alone."""

    number: int
    """in its grid item"""
    num_tokens: int
    loss: torch.Tensor
    seen: Mapping[str, torch.Tensor]
    """what went into the loss at this rank's loss tokens, by name"""


def first_samples(micro_batches: Iterable[MicroBatch]) -> dict[int, int]:
    """The number in the item of each micro-batch's first sample, by its `id`; given all of an item, in order."""
    numbers: dict[int, int] = {}
    count = 0
    for micro_batch in micro_batches:
        numbers[id(micro_batch)] = count
        count += len(micro_batch.lengths)
    return numbers


def tell_culprits(step: int, suspects: Sequence[Suspect]) -> str:
    """Name the samples whose loss is not finite.

    Args:
        step: The grid's.
        suspects: All samples of a micro-batch of which this rank holds loss tokens.

    Returns:
        Such as "step 3: sample 5 of 9 tokens, returns up to 3e+38, outputs up to 0.4"; empty without a suspect.
    """
    if not suspects:
        return ""
    losses = [float(suspect.loss) for suspect in suspects]
    guilty = [suspect for suspect, loss in zip(suspects, losses, strict=True) if not math.isfinite(loss)]
    guilty = guilty or [suspects[max(range(len(losses)), key=lambda index: abs(losses[index]))]]
    told = [_tell(suspect) for suspect in guilty[:CULPRITS_TOLD]]
    if len(guilty) > CULPRITS_TOLD:
        told.append(f"{len(guilty) - CULPRITS_TOLD} more")
    return f"step {step}: {' and '.join(told)}"


def _tell(suspect: Suspect) -> str:
    """Magnitudes only: a largest one that is not a number shows as nan."""
    seen = [f"{name} up to {float(tensor.abs().max()):.3g}" for name, tensor in suspect.seen.items() if tensor.numel()]
    return ", ".join([f"sample {suspect.number} of {suspect.num_tokens} tokens", *seen])
