"""Value losses and the critic's metrics.

Notable:
- Signature: `fn(values, returns, loss_mask, *, denominator, **constants) -> (loss, sums)`; sums add up over
  micro-batches and ranks, and `summarize` turns the totals into the named metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from value_service.losses.explained_variance import FitMoments, Moments, explained_variance
from value_service.losses.mse import Sums, mse_loss

LOSSES: dict[str, Callable[..., tuple[torch.Tensor, Sums]]] = {"mse": mse_loss}


def summarize(
    sums: Mapping[str, float],
    fit: FitMoments | None = None,
    fit_at_scoring: FitMoments | None = None,
) -> dict[str, float | None]:
    """Named metrics from the totals of one critic update.

    Args:
        sums: Totals over micro-batches and ranks of what a loss returned.
        fit: Pooled moments with the values of this update's forward (the first of K, before it changed anything).
        fit_at_scoring: Pooled moments with the values that fed the advantages.

    Returns:
        `value/*` metrics. Without a loss token, `value/empty_batch` is 1 and means are absent. An undefined explained
        variance is None beside `value/ev_undefined` = 1.
    """
    num_tokens = float(sums.get("tokens", 0.0))
    metrics: dict[str, float | None] = {"value/loss_tokens": num_tokens, "value/empty_batch": float(num_tokens == 0)}
    if num_tokens:
        metrics["value/loss"] = float(sums["loss_sum"]) / num_tokens
        metrics["value/bias"] = float(sums["error_sum"]) / num_tokens
    if fit is not None:
        metrics["value/explained_variance"] = fit.explained_variance()
        metrics["value/ev_undefined"] = float(metrics["value/explained_variance"] is None)
    if fit_at_scoring is not None:
        metrics["value/explained_variance_at_scoring"] = fit_at_scoring.explained_variance()
    return metrics


__all__ = ["LOSSES", "FitMoments", "Moments", "Sums", "explained_variance", "mse_loss", "summarize"]
