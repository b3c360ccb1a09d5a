"""The clipped surrogate of PPO, with its own upper border and an optional second clip for negative advantages.

Paper: arXiv 1707.06347, eq. 7; arXiv 1912.09729 (dual clip); arXiv 2503.14476 (a higher upper border).

Legend: any shape, all tensors alike; N = `denominator`.

Notable:
- Clipping shows in the loss itself: where the clipped branch is the larger one, the gradient is exactly zero.
- The ratio's logarithm is clipped to +-20, so no difference of log-probabilities overflows; the KL estimate is taken
  from the raw difference.
- Masked entries are replaced before any arithmetic; NaN at a loss token reaches the loss.

Deviations:
- `old_logprobs` are whoever's the caller passes: the rollout's own, or those of a forward before the batch's first
  update (`policy.old_logprobs`). The latter take no account of how far the rollout policy was from that one.
"""

from __future__ import annotations

import torch

from policy_trainer.losses.common import (
    Sums,
    bounded_ratio,
    check_denominator,
    check_positive,
    masked,
    ratio_sums,
    weighted_sum,
)


def ppo_clip_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    denominator: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t max(-x A, -clip(x, 1-e_l, 1+e_h) A), at most -c A where A < 0 and dual_clip = c.

    Args:
        logprobs: [T] of the policy being trained; carries the gradient.
        old_logprobs: [T] in the ratio's denominator.
        advantages: [T].
        loss_mask: [T] bool or 0/1.
        eps_low: Lower clip distance, in (0, 1).
        eps_high: Upper clip distance, positive.
        dual_clip: c > 1; None or 0 turns the second clip off.
        denominator: N, of the whole optimizer step over all ranks: its loss tokens for a mean over tokens.
        weights: [T] of the tokens in the loss; None = 1 each.

    Returns:
        (loss, sums): f32 scalar; see `summarize` for the sums.

    Raises:
        ValueError: a constant outside its range.
    """
    check_positive("eps_low", eps_low)
    check_positive("eps_high", eps_high)
    check_denominator(denominator)
    if eps_low >= 1.0:
        raise ValueError(f"eps_low must be below 1, got {eps_low}")
    if dual_clip:
        check_positive("dual_clip", dual_clip)
        if dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1 (or None or 0 for off), got {dual_clip}")
    mask = loss_mask.bool()
    logprobs, old_logprobs, advantages = masked(mask, logprobs, old_logprobs, advantages.detach())
    log_ratio = logprobs - old_logprobs
    ratio = bounded_ratio(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages
    token_loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    is_dual_clipped = torch.zeros_like(mask)
    if dual_clip:
        ceiling = -dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (token_loss > ceiling)
        token_loss = torch.where(is_dual_clipped, ceiling, token_loss)
    loss_sum = weighted_sum(token_loss, mask, weights)

    sums = ratio_sums(mask, log_ratio.detach(), ratio.detach(), loss_sum)
    sums["clipped"] = (is_clipped & mask).sum(dtype=torch.float64)
    sums["dual_clipped"] = (is_dual_clipped & mask).sum(dtype=torch.float64)
    return loss_sum / denominator, sums
