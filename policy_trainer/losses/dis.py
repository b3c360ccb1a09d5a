"""Double-sided masked direct ratio: an importance-weighted policy gradient that drops tokens with an extreme ratio.

Paper: arXiv 2607.07508, eq. 1-3.

Legend: any shape, all tensors alike; N = `denominator`.

Notable:
- The coefficient f(x) is detached. Differentiating it too gives x A (1 + log pi) d log pi: zero at log pi = -1 and the
  wrong sign below.
- Both inequalities are strict and compared in log space: a ratio on the border is rejected.
- The denominator counts every loss token of the optimizer step, rejected ones too, so a batch with many rejections
  takes a smaller step.
- Masked entries are replaced before any arithmetic: NaN there reaches neither loss nor gradient. NaN at a loss token
  does reach the loss, so that the trainer refuses the step.

Deviations: none.
"""

from __future__ import annotations

import math

import torch

from policy_trainer.losses.common import (
    LOG_RATIO_LIMIT,
    Sums,
    bounded_ratio,
    check_denominator,
    check_positive,
    masked,
    ratio_sums,
    weighted_sum,
)


def dis_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    denominator: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """L = -(1/N) sum_t sg[f(x_t)] A_t log pi(a_t), with x = pi / pi_rollout and f(x) = x inside (1-e_l, 1+e_h), else 0.

    Args:
        logprobs: [T] of the policy being trained; carries the gradient.
        rollout_logprobs: [T] of the policy that sampled the tokens.
        advantages: [T].
        loss_mask: [T] bool or 0/1.
        eps_low: Ratios at or below 1 - eps_low are rejected; 1 or more: no lower border.
        eps_high: Ratios at or above 1 + eps_high are rejected.
        denominator: N, of the whole optimizer step over all ranks: its loss tokens for a mean over tokens.
        weights: [T] of the tokens in the loss; None = 1 each.

    Returns:
        (loss, sums): f32 scalar; see `summarize` for the sums.

    Raises:
        ValueError: an epsilon or the denominator that is not positive and finite.
    """
    check_positive("eps_low", eps_low)
    check_positive("eps_high", eps_high)
    check_denominator(denominator)
    mask = loss_mask.bool()
    logprobs, rollout_logprobs, advantages = masked(mask, logprobs, rollout_logprobs, advantages.detach())
    raw_log_ratio = (logprobs - rollout_logprobs).detach()
    log_ratio = raw_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = bounded_ratio(raw_log_ratio)
    above_low = log_ratio > (math.log(1.0 - eps_low) if eps_low < 1.0 else -math.inf)
    below_high = log_ratio < math.log1p(eps_high)
    # A product rather than a choice: 0 * NaN stays NaN, where `where` would turn a NaN ratio into a silent zero.
    coefficient = ratio * (above_low & below_high).to(ratio.dtype)
    loss_sum = -weighted_sum(coefficient * advantages * logprobs, mask, weights)

    rejected_low = mask & ~above_low
    rejected_high = mask & ~below_high
    rejected = rejected_low | rejected_high
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    sums = ratio_sums(mask, raw_log_ratio, ratio, loss_sum)
    for name, chosen in (
        ("dis_reject_low", rejected_low),
        ("dis_reject_high", rejected_high),
        ("dis_reject_positive", rejected & positive),
        ("dis_reject_negative", rejected & negative),
        ("positive_tokens", positive),
        ("negative_tokens", negative),
    ):
        sums[name] = chosen.sum(dtype=torch.float64)
    return loss_sum / denominator, sums
