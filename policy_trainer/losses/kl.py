"""A penalty on the divergence from a reference policy, estimated at the sampled tokens.

    d = log pi - log pi_ref:    k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d

Paper: arXiv 2402.03300, eq. 4 (k3 in the loss); the three estimators are J. Schulman's.

Legend: T tokens, N = `denominator`, x = pi / pi_rollout.

Notable:
- `unbiased` weighs each estimate by x and differentiates x too. Without the gradient of x, the score-function part of
  the KL's gradient is missing: k1 then has none on average, and k3 has that of the opposite KL. With it, one token's
  gradient of k3 is x d grad log pi, whatever the rollout policy was.
- Exponents are clipped to +-20. A token at such a clip adds its value and no gradient at all, through neither factor.
- In the loss only: a reward that held the KL would have to be known before the critic trains.
- Masked entries are replaced before any arithmetic; NaN at a loss token reaches the loss.

Deviations:
- arXiv 2402.03300 has no x; that is `unbiased = False`.
"""

from __future__ import annotations

import torch

from policy_trainer.losses.common import (
    LOG_RATIO_LIMIT,
    Sums,
    bounded_ratio,
    check_denominator,
    masked,
    weighted_sum,
)

KINDS = ("k1", "k2", "k3")


def kl_loss(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    kind: str,
    unbiased: bool,
    denominator: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t x_t k(d_t), or without x where not `unbiased`; the caller multiplies by its coefficient.

    Args:
        logprobs: [T] of the policy being trained; carries the gradient.
        reference_logprobs: [T] of the reference policy, at the same temperature.
        rollout_logprobs: [T] of the policy that sampled the tokens.
        loss_mask: [T] bool or 0/1.
        kind: "k1", "k2" or "k3".
        unbiased: Weigh by x, gradient included.
        denominator: N, of the whole optimizer step over all ranks.
        weights: [T] of the tokens; None = 1 each.

    Returns:
        (loss, sums): f32 scalar; f64 sum `kl_reference_sum` of k alone, without x and weights.

    Raises:
        ValueError: an unknown kind, or a denominator that is not positive and finite.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown KL estimate {kind!r}; known: {', '.join(KINDS)}")
    check_denominator(denominator)
    mask = loss_mask.bool()
    logprobs, reference, rollout = masked(mask, logprobs, reference_logprobs.detach(), rollout_logprobs.detach())
    d = logprobs - reference
    if kind == "k1":
        estimate = d
    elif kind == "k2":
        estimate = 0.5 * d.square()
    else:
        estimate = bounded_ratio(-d) - 1.0 + d
    token_loss, clipped = estimate, (d.abs() >= LOG_RATIO_LIMIT) & (kind == "k3")
    if unbiased:
        log_ratio = logprobs - rollout
        token_loss = bounded_ratio(log_ratio) * estimate
        clipped = clipped | (log_ratio.abs() >= LOG_RATIO_LIMIT)
    token_loss = torch.where(clipped, token_loss.detach(), token_loss)
    sums = {"kl_reference_sum": estimate.detach().sum(dtype=torch.float64)}
    return weighted_sum(token_loss, mask, weights) / denominator, sums
