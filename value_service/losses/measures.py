"""How a critic does beyond its loss: by trace, at the first action token, and how well its values are calibrated.

Paper: arXiv 2608.02181 (measures beside explained variance); Brier 1950 (the score).

Legend: S samples, T tokens of all samples in a row, B calibration bins.

Notable:
- Tokens of one trace share its outcome, so explained variance over tokens is dominated by long traces. By trace, each
  sample counts once: by its mean over the loss tokens, and by its first action token, before anything was said.
- AUC: the chance that a rollout which ended well began with a higher value than one that did not. It asks for the
  order alone: a critic may rank well and be badly calibrated.
- Calibration: the loss tokens are sorted into equal bins by their value; in a calibrated critic each bin's mean
  return is its mean value. Values outside the range count in the outer bins.
- All are sums and moments that add up over micro-batches and ranks. Values are those before the update.

Deviations:
- The Brier score takes the target at the first action token, which is the outcome where gamma is 1 and nothing is
  bootstrapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from value_service.losses.explained_variance import FitMoments

NUM_BINS = 10
"""B."""
_COLUMNS = ("tokens", "value", "return")


@dataclass(frozen=True, slots=True)
class TraceFit:
    """Moments over samples instead of tokens."""

    means: FitMoments = field(default_factory=FitMoments)
    """of each sample's mean target and mean value over its loss tokens"""
    first: FitMoments = field(default_factory=FitMoments)
    """of the target and the value at each sample's first action token"""
    pairs: tuple[tuple[float, float], ...] = ()
    """those targets and values themselves"""

    def merge(self, other: TraceFit) -> TraceFit:
        """Moments of both shards together."""
        return TraceFit(self.means.merge(other.means), self.first.merge(other.first), (*self.pairs, *other.pairs))


def trace_fit(
    values: torch.Tensor,
    returns: torch.Tensor,
    action_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[TraceFit, dict[str, float]]:
    """Fit by sample, and the sums of the Brier score.

    Args:
        values: [T] finite on the action mask.
        returns: [T] targets, given on the action mask.
        action_mask: [T] bool.
        loss_mask: [T] bool, within the action mask.
        lengths: [S] tokens of each sample; a sample without a loss token counts nowhere.

    Returns:
        The moments, and sums `brier_sum` and `traces`.
    """
    num_samples = len(lengths)
    owner = torch.repeat_interleave(torch.arange(num_samples, device=lengths.device), lengths)  # [T]
    zero = torch.zeros(num_samples, dtype=torch.float64, device=lengths.device)
    own = owner[loss_mask]
    counts = zero.index_add(0, own, torch.ones_like(own, dtype=torch.float64))
    trained = counts > 0  # [S]
    means = [zero.index_add(0, own, x[loss_mask].double())[trained] / counts[trained] for x in (returns, values)]
    acting = action_mask.nonzero().flatten()  # ascending, so the first of each owner is its first action token
    first_of = torch.full((num_samples,), len(action_mask), device=lengths.device)
    first_of = first_of.scatter_reduce(0, owner[acting], acting, "amin")[trained]
    first = [x[first_of].double() for x in (returns, values)]
    sums = {"brier_sum": float((first[1] - first[0]).square().sum()), "traces": float(trained.sum())}
    pairs = tuple(zip(first[0].tolist(), first[1].tolist(), strict=True))
    return TraceFit(FitMoments.of(*means), FitMoments.of(*first), pairs), sums


def auc(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Chance that a good outcome has a higher value than a bad one (area under the ROC curve); ties count half.

    Args:
        pairs: Target and value of each sample. Good is a target above the middle between the lowest and the highest.

    Returns:
        0.5 for a critic that knows nothing, 1 for one that ranks all of them right; None where the targets are alike.
    """
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)  # [S, 2]
    if len(table) == 0 or table[:, 0].min() == table[:, 0].max():
        return None
    good = table[:, 0] > (table[:, 0].min() + table[:, 0].max()) / 2
    _, place, counts = np.unique(table[:, 1], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1 on; equal values share their mean rank
    num_good, num_bad = int(good.sum()), int((~good).sum())
    return float((ranks[good].sum() - num_good * (num_good + 1) / 2) / (num_good * num_bad))


def calibration_sums(
    values: torch.Tensor, returns: torch.Tensor, *, low: float = 0.0, high: float = 1.0
) -> dict[str, float]:
    """Tokens, values and returns summed by bin of the value.

    Args:
        values: [N] at the loss tokens, finite.
        returns: [N].
        low: Lower border of the first bin.
        high: Upper border of the last bin.

    Returns:
        `calibration_<tokens|value|return>_<bin>` for each bin that holds a token.
    """
    place = ((values.double() - low) / (high - low) * NUM_BINS).floor().clamp(0, NUM_BINS - 1).long()  # [N]
    columns = torch.stack([torch.ones_like(values, dtype=torch.float64), values.double(), returns.double()])
    totals = torch.zeros(len(_COLUMNS), NUM_BINS, dtype=torch.float64, device=values.device).index_add(
        1, place, columns
    )
    return {
        f"calibration_{column}_{number}": total
        for column, row in zip(_COLUMNS, totals.tolist(), strict=True)
        for number, total in enumerate(row)
        if totals[0, number] > 0
    }


def calibration_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """What the totals of `calibration_sums` say.

    Args:
        sums: Totals over micro-batches and ranks.

    Returns:
        For each bin with tokens, their number, mean value and mean return; and the calibration error, the mean over
        tokens of each bin's |mean value - mean return|. Empty without any.
    """
    metrics: dict[str, float] = {}
    gap = total = 0.0
    for number in range(NUM_BINS):
        tokens, value, target = (float(sums.get(f"calibration_{column}_{number}", 0.0)) for column in _COLUMNS)
        if tokens:
            metrics[f"value/calibration/{number}/tokens"] = tokens
            metrics[f"value/calibration/{number}/value"] = value / tokens
            metrics[f"value/calibration/{number}/return"] = target / tokens
            gap, total = gap + abs(value - target), total + tokens
    return metrics | ({"value/calibration_error": gap / total} if total else {})
