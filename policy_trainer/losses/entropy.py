"""A bonus on the entropy of the sampled distributions.

Legend: T tokens, N = `denominator`.

Notable:
- The entropy of the whole distribution before each loss token, at the sampling temperature, not an estimate from the
  sampled token.
- Masked entries are replaced before any arithmetic; NaN at a loss token reaches the loss.
"""

from __future__ import annotations

import torch

from policy_trainer.losses.common import Sums, check_denominator, masked, weighted_sum


def entropy_loss(
    entropies: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    denominator: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """L = -(1/N) sum_t H_t; the caller multiplies by its coefficient.

    Args:
        entropies: [T] nats; carries the gradient.
        loss_mask: [T] bool or 0/1.
        denominator: N, of the whole optimizer step over all ranks.
        weights: [T] of the tokens; None = 1 each.

    Returns:
        (loss, sums): f32 scalar; f64 sum `entropy_sum`, without weights.

    Raises:
        ValueError: a denominator that is not positive and finite.
    """
    check_denominator(denominator)
    mask = loss_mask.bool()
    (entropies,) = masked(mask, entropies)
    sums = {"entropy_sum": entropies.detach().sum(dtype=torch.float64)}
    return -weighted_sum(entropies, mask, weights) / denominator, sums
