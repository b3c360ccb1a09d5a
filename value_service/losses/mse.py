"""Half squared error of the critic: 0.5 (V - y)^2, with an optional clip around the values at scoring.

Paper: the clip is that of the reference code of arXiv 1707.06347; the paper itself has none.

Legend: any shape, all tensors alike; N = `denominator`.

Notable:
- The factor 1/2 is in the loss: learning rates found with another factor do not carry over.
- The clip is relative to the values that fed the advantages, also in the last of K updates: it bounds how far a batch
  can move a value at all. Off by default.
- Targets are constants: the K updates of a batch see the same ones.
- Masked entries are replaced before any arithmetic: NaN there reaches neither loss nor gradient. NaN at a loss token
  does reach the loss, so that the trainer refuses the step.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

Sums: TypeAlias = dict[str, torch.Tensor]
"""Name to f64 scalar, detached."""


def check_denominator(denominator: float) -> None:
    """Refuse a denominator no loss can be divided by.

    Raises:
        ValueError: an optimizer step without a loss token, which is to be skipped rather than divided by zero.
    """
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator must be positive and finite, got {denominator}: skip a step without loss tokens")


def mse_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    denominator: float,
    old_values: torch.Tensor | None = None,
    clip: float = 0.0,
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t 0.5 (V_t - y_t)^2; with a clip c, the larger of that and 0.5 (clip(V_t, Vold_t +- c) - y_t)^2.

    Args:
        values: [T] the critic's values; carries the gradient.
        returns: [T] targets.
        loss_mask: [T] bool or 0/1.
        denominator: N, loss tokens of the whole optimizer step over all ranks.
        old_values: [T] values at scoring, which the clip needs.
        clip: c; 0 = off.

    Returns:
        (loss, sums): f32 scalar; f64 sums `tokens`, `loss_sum`, `error_sum` (of V - y) that add up over micro-batches
        and ranks, and `clipped` with a clip (tokens that it keeps from moving: no gradient).

    Raises:
        ValueError: shapes that differ, a denominator that is not positive and finite, a negative clip, or one without
            `old_values`.
    """
    check_denominator(denominator)
    if not (math.isfinite(clip) and clip >= 0) or (clip and old_values is None):
        raise ValueError(f"clip must be 0 or positive and needs old_values, got {clip}")
    old_values = values.detach() if old_values is None else old_values.detach()
    for name, tensor in (("values", values), ("returns", returns), ("old_values", old_values)):
        if tensor.shape != loss_mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, loss_mask has {tuple(loss_mask.shape)}")
    mask = loss_mask.bool()
    values = values if values.dtype == torch.float64 else values.float()
    zero = torch.zeros((), device=values.device)
    values, target, old = (
        torch.where(mask, tensor.to(values.dtype), zero) for tensor in (values, returns.detach(), old_values)
    )
    error = values - target
    squared = error.square()
    sums = {"tokens": mask.sum(dtype=torch.float64), "error_sum": error.detach().sum(dtype=torch.float64)}
    if clip:
        # beyond the clip `torch.clamp` has no gradient: where that branch is the larger one, the value stays
        within = (old + (values - old).clamp(-clip, clip) - target).square()
        sums["clipped"] = (within > squared).sum(dtype=torch.float64)
        squared = torch.maximum(squared, within)
    loss_sum = 0.5 * squared.sum()
    sums["loss_sum"] = loss_sum.detach().double()
    return loss_sum / denominator, sums
