"""HL-Gauss targets and their cross-entropy: a value as a Gaussian's mass in each bin.

Paper: arXiv 2403.03950, section 3 (HL-Gauss); arXiv 1806.04613 (histogram losses).

Legend: T tokens, N targets, K points, w = spacing, F = the normal distribution function around the target.

Notable:
- sigma = sigma_ratio * w. At 0.75, a target spreads over about six bins.
- The mass is divided by what lies within the outer edges. With three padding points that is all but 2e-6 of it, and
  the mean of the target is the return; without padding a target at the border is biased inward.
- Computed in f64 from clamped targets, so the mass within the edges never vanishes.

Deviations: none; for the bins see `support`.
"""

from __future__ import annotations

import math

import torch

from value_service.losses.categorical import Sums, categorical_loss
from value_service.losses.support import Support


def target_distribution(returns: torch.Tensor, support: Support, sigma_ratio: float) -> torch.Tensor:
    """p_i = (F(e_{i+1}) - F(e_i)) / (F(e_K) - F(e_0)).

    Args:
        returns: [N] targets; clamped to [low, high].
        support: The points and edges.
        sigma_ratio: sigma / w.

    Returns:
        [N, K], rows summing to 1; f64 for f64 targets, else f32. A target that is not finite gives a row of NaN.

    Raises:
        ValueError: a sigma_ratio that is not positive and finite.
    """
    if not (math.isfinite(sigma_ratio) and sigma_ratio > 0):
        raise ValueError(f"sigma_ratio must be positive and finite, got {sigma_ratio}")
    edges = torch.from_numpy(support.edges).to(returns.device)  # [K + 1]
    sigma = sigma_ratio * support.width
    below = torch.special.ndtr((edges - support.clamp(returns)[:, None]) / sigma)  # [N, K + 1]
    weights = below.diff(dim=1) / (below[:, -1:] - below[:, :1])
    return weights if returns.dtype == torch.float64 else weights.float()


def hl_gauss_loss(
    logits: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    denominator: float,
    support: Support,
    sigma_ratio: float,
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t -sum_i p_ti log softmax(z_t)_i, with p the HL-Gauss target.

    Args:
        logits: [T, K] the head's outputs; carries the gradient.
        returns: [T] targets.
        loss_mask: [T] bool or 0/1.
        denominator: N, loss tokens of the whole optimizer step over all ranks.
        support: The points and edges.
        sigma_ratio: sigma / w.

    Returns:
        (loss, sums); see `categorical_loss`.
    """
    return categorical_loss(
        logits,
        returns,
        loss_mask,
        lambda y: target_distribution(y, support, sigma_ratio),
        support=support,
        denominator=denominator,
    )
