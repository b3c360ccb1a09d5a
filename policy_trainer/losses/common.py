"""What the policy losses share: masking before arithmetic, argument checks, and the sums behind the metrics.

Notable:
- Every loss returns sums and counts, f64 scalars that add up over micro-batches, ranks and optimizer steps (names
  ending in `_max` are maxima instead); means are taken once, at the end, by `policy_trainer.losses.summarize`.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

Sums: TypeAlias = dict[str, torch.Tensor]
"""Name to f64 scalar, detached."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clipped to +- this before exp: e^20 is 5e8, still harmless in f32."""


def check_positive(name: str, number: float) -> None:
    """Refuse a constant that is not positive and finite.

    Raises:
        ValueError: naming the constant.
    """
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be positive and finite, got {number}")


def check_denominator(denominator: float) -> None:
    """Refuse a denominator no loss can be divided by.

    Raises:
        ValueError: an optimizer step without a loss token, which is to be skipped rather than divided by zero.
    """
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator must be positive and finite, got {denominator}: skip a step without loss tokens")


def masked(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Replace what is off the mask by 0 before anything is computed from it.

    Args:
        mask: [T] bool.
        tensors: [T] each.

    Returns:
        The tensors in at least f32. `where` has no gradient off the mask, so NaN there stays there.

    Raises:
        ValueError: a tensor of another shape, which would broadcast.
    """
    for tensor in tensors:
        if tensor.shape != mask.shape:
            raise ValueError(f"shapes differ: loss_mask {tuple(mask.shape)}, an input {tuple(tensor.shape)}")
    zero = torch.zeros((), device=mask.device)
    return tuple(
        torch.where(mask, tensor if tensor.dtype == torch.float64 else tensor.float(), zero) for tensor in tensors
    )


def weighted_sum(token_loss: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sum of a loss over its tokens.

    Args:
        token_loss: [T], 0 off the mask.
        mask: [T] bool.
        weights: [T] of the tokens, whatever off the mask; None = 1 each.
    """
    if weights is None:
        return token_loss.sum()
    (weights,) = masked(mask, weights.detach())
    return (token_loss * weights).sum()


def sample_weights(owner: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Weights that make a sum over tokens a sum over samples of each one's mean.

    Args:
        owner: [n] sample of each loss token.
        num_samples: Samples in the row.

    Returns:
        [n] f32: 1 / (loss tokens of the token's sample).
    """
    return 1.0 / torch.bincount(owner, minlength=num_samples)[owner]


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Ratio from its logarithm, clipped to +- LOG_RATIO_LIMIT so that it cannot overflow.

    Args:
        log_ratio: [T] raw log(pi / pi_rollout).

    Returns:
        [T]; NaN where the log-ratio is not finite. The clip alone would turn an infinite log-probability into a number.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() + 0.0 * log_ratio.detach()


def ratio_sums(mask: torch.Tensor, log_ratio: torch.Tensor, ratio: torch.Tensor, loss_sum: torch.Tensor) -> Sums:
    """Sums every ratio-based loss reports.

    Args:
        mask: [T] bool.
        log_ratio: [T] raw log(pi / pi_rollout), detached, 0 off the mask.
        ratio: [T] the ratio as the loss used it, detached.
        loss_sum: Scalar, the loss before its division.

    Returns:
        `tokens`, `loss_sum`, `ratio_sum`, `kl_rollout_sum` (of -log ratio, unclipped), `log_ratio_abs_sum`,
        `log_ratio_abs_max`.
    """
    log_ratio = log_ratio.double()
    return {
        "tokens": mask.sum(dtype=torch.float64),
        "loss_sum": loss_sum.detach().double(),
        "ratio_sum": torch.where(mask, ratio, 0).sum(dtype=torch.float64),
        "kl_rollout_sum": -log_ratio.sum(),
        "log_ratio_abs_sum": log_ratio.abs().sum(),
        "log_ratio_abs_max": log_ratio.abs().max() if log_ratio.numel() else log_ratio.sum(),
    }
