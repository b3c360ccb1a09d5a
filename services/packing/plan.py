"""Which samples share a bin, and which data rank trains it.

Legend: N samples, R data ranks, M micro-batches of a rank (the same on all ranks), K = R M bins.

Notable:
- M is the least that could hold the samples where they level out over so many bins, else what first-fit-decreasing
  needs. Levelled bins make ranks work alike at every micro-batch, which they run in lock-step.
- Ranks are balanced by tokens or by a cost (`services.packing.cost`). The limits are in tokens and samples in any case.
- Pure and deterministic: ties go to the lower index. 8192 samples onto 64 ranks take some tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.packing.balance import balance
from services.packing.bins import first_fit_decreasing, spread


def pack(
    lengths: Sequence[int],
    *,
    seq_len: int,
    num_data_ranks: int,
    cost: Callable[[int], float] | Sequence[float] | None = None,
    pad_multiple: int = 1,
    max_samples: int | None = None,
) -> list[list[list[int]]]:
    """Pack samples into bins of `seq_len` tokens and share the bins among the data ranks.

    Args:
        lengths: [N] tokens per sample.
        seq_len: Tokens of a bin.
        num_data_ranks: R.
        cost: What the ranks' loads are balanced by: a function of a sample's length, or [N] numbers; None: tokens.
        pad_multiple: Every sample takes its length rounded up to a multiple of this.
        max_samples: Samples of a bin at most; None: no limit.

    Returns:
        `[data_rank][micro_batch][sample index]`: every index exactly once, the same number of micro-batches on every
        rank, `[]` where a rank only fills the count (no sample at all: no micro-batch at all).

    Raises:
        ValueError: a sample that does not fit (naming it, its length and the limit), an empty sample, an argument
            below 1, a cost that is negative, not finite or missing.
    """
    limit = max(1, len(lengths)) if max_samples is None else max_samples
    arguments = {"seq_len": seq_len, "num_data_ranks": num_data_ranks, "pad_multiple": pad_multiple}
    for name, number in (arguments | {"max_samples": limit}).items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    sizes = _sizes(lengths, seq_len, pad_multiple)
    costs = _costs(lengths, sizes, cost)
    if len(sizes) == 0:
        return [[] for _ in range(num_data_ranks)]
    bins = _bins(sizes, costs, seq_len, num_data_ranks, limit)
    return balance(bins, sizes, costs, seq_len=seq_len, num_data_ranks=num_data_ranks, max_samples=limit)


def _sizes(lengths: Sequence[int], seq_len: int, pad_multiple: int) -> np.ndarray:
    """[N] tokens that each sample takes of a bin."""
    given = np.asarray(lengths, dtype=np.int64).reshape(-1)
    sizes = -(-given // pad_multiple) * pad_multiple
    for index in np.flatnonzero((given < 1) | (sizes > seq_len)).tolist():
        length, size = int(given[index]), int(sizes[index])
        if length < 1:
            raise ValueError(f"sample {index} has length {length}; an empty sample cannot be packed")
        padded = "" if size == length else f" ({size} padded to a multiple of {pad_multiple})"
        raise ValueError(f"sample {index} has length {length}{padded}, over the limit of {seq_len} tokens")
    return sizes


def _bins(sizes: np.ndarray, costs: np.ndarray, seq_len: int, num_data_ranks: int, max_samples: int) -> list[list[int]]:
    """Members of each of K bins."""
    num_large = int((2 * sizes > seq_len).sum())  # no two of these share a bin
    needed = max(-(-int(sizes.sum()) // seq_len), num_large, -(-len(sizes) // max_samples))
    num_bins = _rounded_up(needed, num_data_ranks)
    levelled = spread(sizes, costs, seq_len, num_bins, max_samples)
    if levelled is not None:
        return levelled
    fitted = first_fit_decreasing(sizes, seq_len, max_samples)
    needed, num_bins = num_bins, _rounded_up(len(fitted), num_data_ranks)
    levelled = spread(sizes, costs, seq_len, num_bins, max_samples) if num_bins > needed else None
    return levelled or fitted + [[] for _ in range(num_bins - len(fitted))]


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _costs(
    lengths: Sequence[int], sizes: np.ndarray, cost: Callable[[int], float] | Sequence[float] | None
) -> np.ndarray:
    if cost is None:
        return sizes.astype(np.float64)
    given = [cost(int(length)) for length in lengths] if callable(cost) else cost
    costs = np.asarray(given, dtype=np.float64).reshape(-1)  # [N]
    if len(costs) != len(sizes):
        raise ValueError(f"cost has {len(costs)} entries for {len(sizes)} samples")
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        raise ValueError("cost must be finite and not negative")
    return costs
