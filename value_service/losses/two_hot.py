"""Two-hot targets and their cross-entropy: a value as weights of the two points around it.

Paper: arXiv 2403.03950, section 3 (two-hot targets).

Legend: T tokens, N targets, K points.

Notable:
- The target's expectation is the return itself, exactly; for a return on a point it is one-hot.

Deviations: none.
"""

from __future__ import annotations

import torch

from value_service.losses.categorical import Sums, categorical_loss
from value_service.losses.support import Support


def target_distribution(returns: torch.Tensor, support: Support) -> torch.Tensor:
    """Distributions over the support's points whose mean is the return.

    Args:
        returns: [N] targets; clamped to [low, high].
        support: The points.

    Returns:
        [N, K], rows summing to 1; f64 for f64 targets, else f32. A target that is not finite gives a row of NaN.
    """
    place = (support.clamp(returns) - float(support.points[0])) / support.width  # [N] in units of w
    index = torch.arange(support.num_points, dtype=torch.float64, device=returns.device)  # [K]
    weights = (1.0 - (place[:, None] - index).abs()).clamp(min=0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)  # 1 but for rounding
    return weights if returns.dtype == torch.float64 else weights.float()


def two_hot_loss(
    logits: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, *, denominator: float, support: Support
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t -sum_i p_ti log softmax(z_t)_i, with p the two-hot target.

    Args:
        logits: [T, K] the head's outputs; carries the gradient.
        returns: [T] targets.
        loss_mask: [T] bool or 0/1.
        denominator: N, loss tokens of the whole optimizer step over all ranks.
        support: The points.

    Returns:
        (loss, sums); see `categorical_loss`.
    """
    return categorical_loss(
        logits, returns, loss_mask, lambda y: target_distribution(y, support), support=support, denominator=denominator
    )
