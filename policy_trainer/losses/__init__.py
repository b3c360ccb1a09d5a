"""Policy losses, by the name that travels in the policy grid's header.

Notable:
- Signature: `fn(logprobs, old_logprobs, advantages, loss_mask, *, denominator, weights, **constants) -> (loss, sums)`.
- What comes on top of any of them, by `[policy]`: `kl_loss` and `entropy_loss`.
- Sums add up over micro-batches and ranks (names ending in `_max` are maxima); `summarize` turns the totals into the
  named metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from policy_trainer.losses.common import Sums
from policy_trainer.losses.dis import dis_loss
from policy_trainer.losses.entropy import entropy_loss
from policy_trainer.losses.kl import kl_loss
from policy_trainer.losses.ppo_clip import ppo_clip_loss

LOSSES: dict[str, Callable[..., tuple[torch.Tensor, Sums]]] = {"dis": dis_loss, "ppo_clip": ppo_clip_loss}

_MEANS = {
    "policy/ratio_mean": ("ratio_sum", "tokens"),
    "policy/kl_rollout": ("kl_rollout_sum", "tokens"),
    "policy/kl_reference": ("kl_reference_sum", "tokens"),
    "policy/log_ratio_abs_mean": ("log_ratio_abs_sum", "tokens"),
    "policy/clip_fraction": ("clipped", "tokens"),
    "policy/dual_clip_fraction": ("dual_clipped", "tokens"),
    "policy/dis_reject_low": ("dis_reject_low", "tokens"),
    "policy/dis_reject_high": ("dis_reject_high", "tokens"),
    "policy/dis_reject_positive": ("dis_reject_positive", "positive_tokens"),
    "policy/dis_reject_negative": ("dis_reject_negative", "negative_tokens"),
}
"""Metric to (sum, count)."""


def summarize(sums: Mapping[str, float]) -> dict[str, float]:
    """Named metrics from the totals of one step.

    Args:
        sums: Totals over micro-batches and ranks of what the losses returned. `denominator` is what the loss was
            divided by where that is not the number of tokens.

    Returns:
        `policy/*` metrics. What the loss does not report, or no token counts towards, is absent rather than 0;
        `policy/loss_tokens` is always there.
    """
    metrics = {"policy/loss_tokens": float(sums.get("tokens", 0.0))}
    for metric, (total, count) in _MEANS.items():
        if total in sums and float(sums.get(count, 0.0)) > 0:
            metrics[metric] = float(sums[total]) / float(sums[count])
    if metrics["policy/loss_tokens"] > 0:
        metrics["policy/loss"] = float(sums["loss_sum"]) / float(sums.get("denominator", sums["tokens"]))
        metrics["policy/log_ratio_abs_max"] = float(sums["log_ratio_abs_max"])
    return metrics


__all__ = ["LOSSES", "Sums", "dis_loss", "entropy_loss", "kl_loss", "ppo_clip_loss", "summarize"]
