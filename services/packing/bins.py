"""Samples into bins: as few as first-fit-decreasing finds, or levelled over a given number of bins.

Legend: N samples, K bins.

Notable:
- First fit is O(N K), vectorised over K. Spreading is O(N log K) where dearer samples are no shorter: a bin without
  room waits apart until a sample comes that fits, and does so at most once for each sample that it takes.
- A bin that may take no more samples counts as one without room.
- Deterministic: ties go to the lower index.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np


def first_fit_decreasing(sizes: np.ndarray, seq_len: int, max_samples: int) -> list[list[int]]:
    """Longest sample first, each into the first bin with room (Johnson 1973: at most 11/9 of the best, plus 6/9).

    Args:
        sizes: [N] tokens, each from 1 to `seq_len`.
        seq_len: Tokens of a bin.
        max_samples: Samples of a bin.

    Returns:
        Members of each bin.
    """
    order = np.argsort(-sizes, kind="stable")
    num_large = int((2 * sizes > seq_len).sum())  # no two of these share a bin
    bins = [[index] for index in order[:num_large].tolist()]
    free = np.full(len(sizes) + 1, seq_len, dtype=np.int64)  # at most one bin per sample, and one nobody needs
    free[:num_large] = seq_len - sizes[order[:num_large]] if max_samples > 1 else 0
    start, last = 0, 0
    for index, size in zip(order[num_large:].tolist(), sizes[order[num_large:]].tolist(), strict=True):
        start = start if size == last else 0  # a bin without room for the last sample has none for its equal
        # The first bin not yet opened always has room, so argmax finds a true entry.
        first = start + int(np.argmax(free[start : len(bins) + 1] >= size))
        if first == len(bins):
            bins.append([])
        bins[first].append(index)
        free[first] = free[first] - size if len(bins[first]) < max_samples else 0
        start, last = first, size
    return bins


def spread(
    sizes: np.ndarray, costs: np.ndarray, seq_len: int, num_bins: int, max_samples: int
) -> list[list[int]] | None:
    """Costliest sample first onto the cheapest bin with room (longest processing time first, Graham 1969).

    Args:
        sizes: [N] tokens.
        costs: [N] what the bins are levelled by.
        seq_len: Tokens of a bin.
        num_bins: K.
        max_samples: Samples of a bin.

    Returns:
        Members of each of K bins, or None where a sample finds no room.
    """
    order = np.lexsort((-sizes, -costs))
    num_first = min(num_bins, len(order)) if costs.all() else 0  # while bins are empty, each sample opens the next one
    first, rest = order[:num_first], order[num_first:]
    bins = [[index] for index in first.tolist()] + [[] for _ in range(num_bins - num_first)]
    free = [seq_len] * num_bins
    for b, size in enumerate(sizes[first].tolist()):
        free[b] = seq_len - size if max_samples > 1 else 0
    loads = costs[first].tolist() + [0.0] * (num_bins - num_first)
    cheap = [(load, b) for b, load in enumerate(loads)]
    heapify(cheap)
    apart: list[tuple[int, float, int]] = []  # (-free, load, bin)
    for index, size, cost in zip(rest.tolist(), sizes[rest].tolist(), costs[rest].tolist(), strict=True):
        while apart and -apart[0][0] >= size:
            _, load, b = heappop(apart)
            heappush(cheap, (load, b))
        while cheap and free[cheap[0][1]] < size:
            load, b = heappop(cheap)
            heappush(apart, (-free[b], load, b))
        if not cheap:
            return None
        load, b = cheap[0]
        bins[b].append(index)
        free[b] = free[b] - size if len(bins[b]) < max_samples else 0
        heapreplace(cheap, (load + cost, b))
    return bins
