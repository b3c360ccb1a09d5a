"""Half squared error of the critic: 0.5 (V - y)^2.

Legend: any shape, all tensors alike; N = `denominator`.

Notable:
- The factor 1/2 is in the loss: learning rates found with another factor do not carry over.
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


def mse_loss(
    values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, *, denominator: float
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t 0.5 (V_t - y_t)^2.

    Args:
        values: [T] the critic's values; carries the gradient.
        returns: [T] targets.
        loss_mask: [T] bool or 0/1.
        denominator: N, loss tokens of the whole optimizer step over all ranks.

    Returns:
        (loss, sums): f32 scalar; f64 sums `tokens`, `loss_sum`, `error_sum` (of V - y) that add up over micro-batches
        and ranks.

    Raises:
        ValueError: shapes that differ, or a denominator that is not positive and finite.
    """
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator must be positive and finite, got {denominator}: skip a step without loss tokens")
    for name, tensor in (("values", values), ("returns", returns)):
        if tensor.shape != loss_mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, loss_mask has {tuple(loss_mask.shape)}")
    mask = loss_mask.bool()
    values = values if values.dtype == torch.float64 else values.float()
    zero = torch.zeros((), device=values.device)
    error = torch.where(mask, values, zero) - torch.where(mask, returns.detach().to(values.dtype), zero)
    loss_sum = 0.5 * error.square().sum()
    sums = {
        "tokens": mask.sum(dtype=torch.float64),
        "loss_sum": loss_sum.detach().double(),
        "error_sum": error.detach().sum(dtype=torch.float64),
    }
    return loss_sum / denominator, sums
