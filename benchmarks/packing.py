"""Packing and balancing: 8,192 samples and 512 bins onto 64 ranks, beside Karmarkar-Karp.

Karmarkar-Karp (prtpy) partitions numbers and knows neither bins, nor a length limit, nor equal counts. It is timed on
the same numbers in the same process, and its result is the best balance to hope for. prtpy is no dependency of ours:

    python -m pip install --no-deps --target DIR prtpy mip cffi pycparser
    PYTHONPATH=DIR python -m benchmarks.packing

Without prtpy its columns stay empty. Writes benchmarks/results/packing.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.timing import Timing, machine, timed
from services.packing.cost import FlopCost, flop_cost
from services.packing.plan import pack

RESULT = Path(__file__).parent / "results" / "packing.md"
NUM_RANKS = 64
# A dense model of 4 B parameters.
FLOPS = flop_cost(2560, 36, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=9728, vocab_size=151_936)


def cases() -> dict[str, tuple[list[int], int, int | None]]:
    """Name to lengths, seq_len and the limit on samples."""
    rng = np.random.default_rng(0)
    uniform = rng.integers(64, 8193, 8192)
    lognormal = np.clip(np.exp(rng.normal(6.5, 1.0, 8192)), 16, 16_384).astype(int)
    bimodal = np.where(rng.random(8192) < 0.1, rng.integers(8000, 16_000, 8192), rng.integers(50, 600, 8192))
    bins = rng.integers(8193, 16_385, 512)
    filled = rng.integers(15_000, 16_385, 512)
    return {
        "8,192 samples, uniform 64 to 8,192": (uniform.tolist(), 81_920, None),
        "8,192 samples, lognormal to 16,384": (lognormal.tolist(), 32_768, None),
        "8,192 samples, lognormal, 98 % full": (lognormal.tolist(), 17_947, None),
        "8,192 samples, a tenth of them long": (bimodal.tolist(), 32_768, None),
        "512 bins, half full to full": (bins.tolist(), 16_384, 1),
        "512 bins, all but full": (filled.tolist(), 16_384, 1),
    }


def max_over_mean(plan: Sequence[Sequence[Sequence[int]]], costs: np.ndarray) -> float:
    """Heaviest rank's load over the mean."""
    loads = [sum(costs[index] for micro_batch in rank for index in micro_batch) for rank in plan]
    return float(max(loads) / np.mean(loads))


def karmarkar_karp(costs: np.ndarray) -> Callable[[], list[float]] | None:
    """Partitioning by prtpy, as a call that returns the sums; None without prtpy."""
    if importlib.util.find_spec("prtpy") is None:
        return None
    prtpy = importlib.import_module("prtpy")
    items = costs.tolist()
    return lambda: prtpy.partition(prtpy.partitioning.kk, NUM_RANKS, items, outputtype=prtpy.out.Sums)


def row_of(name: str, cost: FlopCost | None, repeats: int) -> str:
    """One line of the table."""
    lengths, seq_len, max_samples = cases()[name]
    kwargs = {"seq_len": seq_len, "num_data_ranks": NUM_RANKS, "cost": cost, "max_samples": max_samples}
    costs = np.array(lengths, dtype=float) if cost is None else cost(np.array(lengths))
    own: Timing = timed(lambda: pack(lengths, **kwargs), repeats)
    plan = pack(lengths, **kwargs)
    other = karmarkar_karp(costs)
    theirs, ratio, best = "-", "-", "-"
    if other is not None:
        timing = timed(other, 1)
        sums = other()
        theirs, ratio = f"{timing.wall_s * 1e3:.0f}", f"{timing.cpu_s / own.cpu_s:.0f}"
        best = f"{max(sums) / np.mean(sums):.6f}"
    balance = "FLOPs" if cost is not None else "tokens"
    return (
        f"| {name} | {balance} | {len(plan[0])} | {own.wall_s * 1e3:.1f} | {own.cpu_s * 1e3:.1f} "
        f"| {max_over_mean(plan, costs):.6f} | {theirs} | {ratio} | {best} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="repetitions; the best is reported")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for cost in (None, FLOPS):
        for name in cases():
            rows.append(row_of(name, cost, args.repeats))
            print(rows[-1], flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        f"""# Packing and balancing onto {NUM_RANKS} ranks

`services.packing.plan.pack`: samples into bins of `seq_len` tokens, the same number of bins on every rank, ranks
balanced by tokens or by FLOPs (a dense model of 4 B parameters). Milliseconds, the best of {args.repeats}: of wall
clock, and of the process's own CPU time, which is what the wall clock shows on an idle core. Max/mean is the heaviest
rank's load over the average one's. "512 bins" are 512 samples that each fill a bin of their own, 8 bins a rank.

Beside it Karmarkar-Karp, as prtpy has it, on the same numbers in the same process, once: it only partitions, without
bins, length limit or equal counts. "Ratio" is its CPU time over ours. "98 % full" leaves little room to
move samples once ranks are balanced by something other than the tokens that fill them.

{machine("python -m benchmarks.packing", ("numpy", "prtpy"), load)}

| case | balanced by | bins a rank | wall ms | CPU ms | max/mean | KK wall ms | ratio | KK max/mean |
|---|---|---|---|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
