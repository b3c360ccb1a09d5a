"""Bins onto data ranks: dealt in rounds, then levelled by swaps until the heaviest rank is almost an average one.

Legend: K bins, R data ranks, M = K / R bins of a rank, U units that may change places.

Notable:
- A swap keeps the number of bins on every rank. Whole bins are swapped first, which no limit forbids; where that is
  not enough, samples are, within the limits of both bins. A free place of a bin is a unit too, of size 0: swapping a
  sample with it moves the sample.
- Each swap takes the heaviest rank and lowers the higher of two loads as far as it goes, so the highest load never
  rises. The search is bounded by counts, not by a clock, so that the plan is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOLERANCE = 5e-4
"""Levelled is a heaviest rank at most this fraction above the mean: a quarter of what a planner of ours may leave."""
_FIRST_PAIRS = 2**13
"""Pairs looked at for one swap at first, some tens of microseconds; eight times as many once none of them helps."""
_MAX_PAIRS = 2**20
"""Pairs looked at in all, some tens of milliseconds."""


@dataclass
class _Units:
    """What may change places: bins among ranks, or samples and free places among bins."""

    costs: np.ndarray
    """[U] f64"""
    sizes: np.ndarray
    """[U] tokens"""
    bins: np.ndarray
    """[U] bin of the unit"""
    ranks: np.ndarray
    """[U] data rank of the unit"""


def balance(
    bins: list[list[int]],
    sizes: np.ndarray,
    costs: np.ndarray,
    *,
    seq_len: int,
    num_data_ranks: int,
    max_samples: int,
) -> list[list[list[int]]]:
    """Share K bins among R ranks, M to each, with loads as equal as swaps make them.

    Args:
        bins: Members of each bin; K is a multiple of R.
        sizes: [N] tokens of the samples.
        costs: [N] what the ranks are balanced by.
        seq_len: Tokens of a bin.
        num_data_ranks: R.
        max_samples: Samples of a bin.

    Returns:
        `[data_rank][micro_batch][sample index]`: micro-batches from heavy to light, empty ones last.
    """
    loads = np.array([float(costs[members].sum()) for members in bins])  # [K]
    ranks = _deal(loads, np.array([not members for members in bins]), num_data_ranks)
    whole = _Units(loads, np.zeros(len(bins), np.int64), np.arange(len(bins)), ranks)
    if not _level(whole, np.zeros(len(bins), np.int64), num_data_ranks):
        bins = _swap_samples(bins, sizes, costs, ranks, seq_len, num_data_ranks, max_samples)
        loads = np.array([float(costs[members].sum()) for members in bins])
    plan: list[list[list[int]]] = [[] for _ in range(num_data_ranks)]
    for b in sorted(range(len(bins)), key=lambda b: (not bins[b], -loads[b], b)):
        plan[ranks[b]].append(sorted(bins[b]))
    return plan


def _deal(loads: np.ndarray, empty: np.ndarray, num_data_ranks: int) -> np.ndarray:
    """[K] ranks: rounds of R bins, heaviest first; within a round the heaviest goes to the lightest rank."""
    order = np.lexsort((-loads, empty))
    ranks = np.empty(len(loads), dtype=np.int64)
    totals = np.zeros(num_data_ranks)
    for start in range(0, len(order), num_data_ranks):
        dealt = order[start : start + num_data_ranks]
        ranks[dealt] = np.argsort(totals, kind="stable")
        totals[ranks[dealt]] += loads[dealt]
    return ranks


def _swap_samples(
    bins: list[list[int]],
    sizes: np.ndarray,
    costs: np.ndarray,
    ranks: np.ndarray,
    seq_len: int,
    num_data_ranks: int,
    max_samples: int,
) -> list[list[int]]:
    """The bins after samples changed places across ranks."""
    counts = np.array([len(members) for members in bins])
    order = np.concatenate([np.asarray(members, np.int64) for members in bins])
    places = np.flatnonzero(counts < max_samples)  # one free place of each bin that has one
    where = np.concatenate([np.repeat(np.arange(len(bins)), counts), places])
    units = _Units(
        costs=np.concatenate([costs[order], np.zeros(len(places))]),
        sizes=np.concatenate([sizes[order], np.zeros(len(places), np.int64)]),
        bins=where,
        ranks=ranks[where],
    )
    free = seq_len - np.array([int(sizes[members].sum()) for members in bins])
    _level(units, free, num_data_ranks)
    moved: list[list[int]] = [[] for _ in bins]
    for sample, b in zip(order.tolist(), units.bins.tolist(), strict=False):  # the free places come after all samples
        moved[b].append(sample)
    return moved


def _level(units: _Units, free: np.ndarray, num_data_ranks: int) -> bool:
    """Swap units in place until the ranks are level; `free` are the tokens left in each bin.

    Returns:
        Whether they are level.
    """
    loads = np.bincount(units.ranks, units.costs, num_data_ranks)
    target = loads.mean() * (1 + TOLERANCE)
    width, num_pairs = _FIRST_PAIRS, 0
    while loads.max() > target:
        own = np.flatnonzero(units.ranks == loads.argmax())  # [A]
        num_light = max(1, width * num_data_ranks // (len(units.ranks) * len(own)))
        is_light = np.zeros(num_data_ranks, dtype=bool)
        is_light[np.argsort(loads, kind="stable")[: min(num_light, num_data_ranks - 1)]] = True
        others = np.flatnonzero(is_light[units.ranks])  # [B]
        stride = -(-len(own) * len(others) // width)
        own = own[:: max(1, stride)]
        num_pairs += len(own) * len(others)
        if num_pairs > _MAX_PAIRS:
            return False
        pair = _best_pair(units, free, loads, own, others)
        if pair is not None:
            _swap(units, free, loads, *pair)
        elif stride > 1 or num_light < num_data_ranks - 1:
            width *= 8
        else:
            return False
    return True


def _best_pair(
    units: _Units, free: np.ndarray, loads: np.ndarray, own: np.ndarray, others: np.ndarray
) -> tuple[int, int] | None:
    """The swap of one of `own` [A] with one of `others` [B] that lowers the higher load most; None where none does."""
    load = loads[units.ranks[own[0]]]
    given = units.costs[own, None] - units.costs[others]  # [A, B] cost that leaves the heaviest rank
    peak = np.maximum(load - given, loads[units.ranks[others]] + given)
    a, b = divmod(int(peak.argmin()), len(others))
    if not -free[units.bins[own[a]]] <= units.sizes[own[a]] - units.sizes[others[b]] <= free[units.bins[others[b]]]:
        # Only now ask all pairs whether they fit: it takes as long as all of the above, and is seldom needed.
        grown = units.sizes[own, None] - units.sizes[others]  # [A, B] tokens that the other bin gains
        peak[(grown > free[units.bins[others]]) | (-grown > free[units.bins[own], None])] = np.inf
        a, b = divmod(int(peak.argmin()), len(others))
    return (int(own[a]), int(others[b])) if peak[a, b] < load * (1 - 1e-12) else None


def _swap(units: _Units, free: np.ndarray, loads: np.ndarray, a: int, b: int) -> None:
    given, grown = units.costs[a] - units.costs[b], units.sizes[a] - units.sizes[b]
    loads[units.ranks[a]] -= given
    loads[units.ranks[b]] += given
    free[units.bins[a]] += grown
    free[units.bins[b]] -= grown
    for places in (units.bins, units.ranks):
        places[[a, b]] = places[[b, a]]
