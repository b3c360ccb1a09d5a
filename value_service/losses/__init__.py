"""Value losses by the name that travels in the critic grid's header, and the critic's metrics.

Notable:
- Signature: `fn(outputs, returns, loss_mask, *, denominator, **settings) -> (loss, sums)`; sums add up over
  micro-batches and ranks, and `summarize` turns the totals into the named metrics.
- A regression's outputs are values [T], a classification's are logits [T, K]. `ValueLoss` makes the difference, from
  the header alone; a header that does not fit the critic's head is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from services.wire.errors import ContractError
from value_service.losses.explained_variance import FitMoments, Moments, explained_variance
from value_service.losses.hl_gauss import hl_gauss_loss
from value_service.losses.measures import TraceFit, auc, calibration_metrics
from value_service.losses.mse import Sums, mse_loss
from value_service.losses.support import Support
from value_service.losses.two_hot import two_hot_loss

LOSSES: dict[str, Callable[..., tuple[torch.Tensor, Sums]]] = {
    "mse": mse_loss,
    "two_hot": two_hot_loss,
    "hl_gauss": hl_gauss_loss,
}
SUPPORT_CONSTANTS = ("low", "high", "num_bins", "pad_bins")

_MEANS = {
    "value/loss": "loss_sum",
    "value/bias": "error_sum",
    "value/return_mean": "return_sum",
    "value/bootstrapped_fraction": "bootstrapped",
    "value/clip_fraction": "clipped",
    "value/accuracy": "accurate",
    "value/entropy": "entropy_sum",
    "value/confidence": "confidence_sum",
    "value/target_oob_fraction": "out_of_range",
}
"""Metric to its sum over the loss tokens; absent where neither the loss nor the updater reports it."""


def support_of(name: str, constants: Mapping[str, float]) -> Support | None:
    """The support that a loss's constants speak of; None for a regression.

    Raises:
        ContractError: a classification loss without one of them.
    """
    if name == "mse":
        return None
    missing = [key for key in SUPPORT_CONSTANTS if key not in constants]
    if missing:
        raise ContractError(f"the header's {name} has no {missing[0]}")
    low, high, num_bins, pad_bins = (constants[key] for key in SUPPORT_CONSTANTS)
    return Support(low, high, int(num_bins), int(pad_bins))


class ValueLoss:
    """A loss with the constants of a grid's header."""

    def __init__(self, name: str, constants: Mapping[str, float], points: torch.Tensor | None = None) -> None:
        """Look the loss up and check that it fits the critic's head.

        Args:
            name: The header's loss name.
            constants: The header's loss constants.
            points: [K] of the critic's head; None for a scalar one.

        Raises:
            ContractError: an unknown loss, constants it does not take, or another support than the head's.
        """
        if name not in LOSSES:
            raise ContractError(f"unknown value loss {name!r}; known: {', '.join(sorted(LOSSES))}")
        self._function = LOSSES[name]
        self._settings: dict[str, float] = {k: v for k, v in constants.items() if k not in SUPPORT_CONSTANTS}
        self.support = support_of(name, constants)
        own = None if self.support is None else torch.from_numpy(self.support.points).float()
        if (own is None) != (points is None) or (
            own is not None and points is not None and not (len(own) == len(points) and torch.equal(own, points.cpu()))
        ):
            raise ContractError(f"the header's {name} does not fit the critic's head: {_shown(own)}, {_shown(points)}")

    def __call__(
        self,
        outputs: torch.Tensor,
        returns: torch.Tensor,
        loss_mask: torch.Tensor,
        *,
        old_values: torch.Tensor,
        denominator: float,
    ) -> tuple[torch.Tensor, Sums]:
        """Loss and sums of one micro-batch.

        Args:
            outputs: [T, K] the head's outputs before each token.
            returns: [T] targets.
            loss_mask: [T] bool.
            old_values: [T] values at scoring.
            denominator: Loss tokens of the whole optimizer step over all ranks.
        """
        if self.support is None:
            values = outputs[:, 0]
            return self._function(
                values, returns, loss_mask, old_values=old_values, denominator=denominator, **self._settings
            )
        return self._function(
            outputs, returns, loss_mask, support=self.support, denominator=denominator, **self._settings
        )

    @property
    def value_range(self) -> tuple[float, float]:
        """Where returns lie, for calibration bins: the support's range, [0, 1] without one."""
        return (0.0, 1.0) if self.support is None else (self.support.low, self.support.high)


def summarize(
    sums: Mapping[str, float],
    fit: FitMoments | None = None,
    fit_at_scoring: FitMoments | None = None,
    by_trace: TraceFit | None = None,
    values: Moments | None = None,
) -> dict[str, float | None]:
    """Named metrics from the totals of one critic update.

    Args:
        sums: Totals over micro-batches and ranks of what a loss returned.
        fit: Pooled moments with the values of this update's forward (the first of K, before it changed anything).
        fit_at_scoring: Pooled moments with the values that fed the advantages.
        by_trace: Pooled moments over samples, with the same values as `fit`.
        values: Pooled moments of these values at all loss tokens.

    Returns:
        `value/*` metrics. Without a loss token, `value/empty_batch` is 1 and means are absent; so is whatever the loss
        does not report (a regression has no accuracy). An undefined explained variance is None; over tokens it stands
        beside `value/ev_undefined` = 1.
    """
    num_tokens = float(sums.get("tokens", 0.0))
    metrics: dict[str, float | None] = {"value/loss_tokens": num_tokens, "value/empty_batch": float(num_tokens == 0)}
    if num_tokens:
        metrics |= {metric: float(sums[total]) / num_tokens for metric, total in _MEANS.items() if total in sums}
    if sums.get("traces"):
        metrics["value/brier"] = float(sums["brier_sum"]) / float(sums["traces"])
    metrics |= calibration_metrics(sums)
    if fit is not None:
        metrics["value/explained_variance"] = fit.explained_variance()
        metrics["value/ev_undefined"] = float(metrics["value/explained_variance"] is None)
    if fit_at_scoring is not None:
        metrics["value/explained_variance_at_scoring"] = fit_at_scoring.explained_variance()
    if by_trace is not None:
        metrics["value/explained_variance_by_trace"] = by_trace.means.explained_variance()
        metrics["value/explained_variance_first_token"] = by_trace.first.explained_variance()
        if (area := auc(by_trace.pairs)) is not None:
            metrics["value/auc"] = area
    if values is not None and values.variance is not None:
        metrics["value/value_std"] = math.sqrt(values.variance)
    return metrics


def _shown(points: torch.Tensor | None) -> str:
    return "a scalar" if points is None else f"{len(points)} points on [{float(points[0]):g}, {float(points[-1]):g}]"


__all__ = [
    "LOSSES",
    "FitMoments",
    "Moments",
    "Sums",
    "Support",
    "TraceFit",
    "ValueLoss",
    "explained_variance",
    "hl_gauss_loss",
    "mse_loss",
    "summarize",
    "support_of",
    "two_hot_loss",
]
