"""E10: what HL-Gauss targets make of rewards of 0 and 1 at the border of their support, with and without padding.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.support_edges [--seeds 5] [--quick] [--write]

Notable:
- The bias is exact: the expectation of a target minus the return it stands for, in f64 and without any training.
- A head is then trained to the end on returns of 0 and 1, and on coins of known bias, to see that it learns just that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from services.config.train import OptimConfig
from services.model.head import ValueHead
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks
from services.wire.grids import MicroBatch
from value_service.losses import Support, ValueLoss, hl_gauss, two_hot

BINS, RATIO = 51, 0.75
PADS = (0, 1, 2, 3)
RATIOS = (0.5, 0.75, 1.0, 1.5)
DEFAULT = Support(0.0, 1.0, BINS).pad_bins
NEAR = np.linspace(0.0, 0.1, 101)
CHANCES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Of success in the states that a head is trained on."""
COPIES, LR = 10, 0.1
NOTHING = MicroBatch(np.zeros(0), {}, [])


def bias(returns: Sequence[float] | np.ndarray, pad: int, ratio: float = RATIO) -> np.ndarray:
    """[N] expectation of the HL-Gauss target minus the return."""
    support, targets = Support(0.0, 1.0, BINS, pad), torch.tensor(np.asarray(returns), dtype=torch.float64)
    return hl_gauss.target_distribution(targets, support, ratio).numpy() @ support.points - targets.numpy()


def learned(loss: str, pad: int, seed: int, updates: int) -> np.ndarray:
    """[states] value minus chance of success after training on all outcomes of each state in proportion."""
    constants = {"low": 0.0, "high": 1.0, "num_bins": BINS, "pad_bins": pad}
    constants |= {"sigma_ratio": RATIO} if loss == "hl_gauss" else {}
    points = torch.from_numpy(Support(0.0, 1.0, BINS, pad).points).float()
    head = ValueHead(len(CHANCES), init_std=0.02, seed=seed, points=points)
    optimizer, value_loss = (
        Optimizer(head, OptimConfig(lr=LR), Ranks(), warmup_updates=0),
        ValueLoss(loss, constants, points),
    )
    states = torch.eye(len(CHANCES)).repeat_interleave(COPIES, dim=0)
    returns = torch.cat([(torch.arange(COPIES) < round(chance * COPIES)).float() for chance in CHANCES])
    mask = torch.ones(len(returns), dtype=torch.bool)
    for _ in range(updates):
        total, _sums = value_loss(
            head.outputs(states), returns, mask, old_values=torch.zeros(len(returns)), denominator=len(returns)
        )
        optimizer.update([NOTHING], lambda _, total=total: (total, {}))
    with torch.no_grad():
        return head(torch.eye(len(CHANCES))).double().numpy() - np.array(CHANCES)


def edges(seeds: Sequence[int], quick: bool) -> Page:
    updates = 50 if quick else 1000
    exact = {(pad, ratio): bias([0.0, 1.0], pad, ratio) for pad in PADS for ratio in RATIOS}
    cases = {
        "HL-Gauss, no padding": ("hl_gauss", 0),
        f"HL-Gauss, {DEFAULT} padding bins": ("hl_gauss", DEFAULT),
        "two-hot, no padding": ("two_hot", 0),
    }
    trained = {name: np.array([learned(*case, seed, updates) for seed in seeds]) for name, case in cases.items()}
    (at_zero, at_one), padded = exact[0, RATIO], exact[DEFAULT, RATIO]
    bare, full, hot = trained.values()
    support = Support(0.0, 1.0, BINS, 0)
    points = torch.tensor([0.0, 1.0], dtype=torch.float64)
    exactly = two_hot.target_distribution(points, support).numpy() @ support.points - points.numpy()
    widest = max(np.abs(exact[DEFAULT, ratio]).max() for ratio in RATIOS)
    return Page(
        name="E10",
        title="HL-Gauss at the border of its support",
        claim=Claim(
            "Rewards of 0 and 1 at the very border of a support of 51 bins are biased inward by 0.0074, for the half "
            "of a target's mass that falls outside is lost; a padded support has no such bias.",
            "own; arXiv 2608.02181 pads its support, arXiv 2403.03950 describes the targets",
        ),
        setting=(
            f"The targets of this repository at returns of 0 and 1, {BINS} points on [0, 1], sigma {RATIO:g} of their "
            f"spacing, exact. Then a head with a feature for each of {len(CHANCES)} states, whose chances of "
            f"success are {', '.join(f'{chance:g}' for chance in CHANCES)}: {updates} full-batch "
            f"updates of AdamW at {LR:g} from N(0, 0.02)."
        ),
        tables=[
            "Exact bias at a return of 0 (at 1 it is the same, downward), by padding and sigma over spacing:\n\n"
            + table(
                ["padding bins", *(f"sigma {ratio:g}" for ratio in RATIOS)],
                [[str(pad), *(f"{exact[pad, ratio][0]:.1e}" for ratio in RATIOS)] for pad in PADS],
            ),
            "Value minus chance of success of trained heads:\n\n"
            + table(
                ["head", *(f"chance {chance:g}" for chance in CHANCES)],
                [[name, *(over_seeds(column, ".5f") for column in runs.T)] for name, runs in trained.items()],
            ),
        ],
        checks=[
            Check(
                "without padding: +0.0074 at 0 and -0.0074 at 1",
                f"{at_zero:+.4f}, {at_one:+.4f}",
                bool(np.allclose([at_zero, at_one], [0.0074, -0.0074], atol=5e-5)),
            ),
            Check(
                f"with {DEFAULT} padding bins, the default: below 0.0001 at both",
                f"{np.abs(padded).max():.1e}",
                bool((np.abs(padded) < 1e-4).all()),
            ),
            Check(
                "a trained head without padding has that bias at both ends, to 0.0005, with every seed",
                f"{over_seeds(bare[:, 0], '.4f')}, {over_seeds(bare[:, -1], '.4f')}",
                bool(np.allclose(bare[:, [0, -1]], exact[0, RATIO], atol=5e-4)),
            ),
            Check(
                "a trained head with padding is within 0.0005 of 0 and 1, with every seed",
                f"{over_seeds(full[:, 0], '.5f')}, {over_seeds(full[:, -1], '.5f')}",
                bool((np.abs(full[:, [0, -1]]) < 5e-4).all()),
            ),
            Check(
                "two-hot needs no padding: exact at 0 and 1",
                f"{np.abs(exactly).max():.1e}; trained {over_seeds(np.abs(hot[:, [0, -1]]).max(axis=1), '.5f')}",
                bool((np.abs(exactly) < 1e-12).all()),
                limits=True,
            ),
            Check(
                "a coin of even odds hides it: without padding the biases of its two sides cancel",
                f"{abs(at_zero + at_one) / 2:.0e}; trained {over_seeds(bare[:, CHANCES.index(0.5)], '.4f')}",
                bool(abs(at_zero + at_one) / 2 < 1e-12),
                limits=True,
            ),
            Check(
                f"{DEFAULT} padding bins are not enough for a sigma of {RATIOS[-1]:g} spacings: above 0.0001 there",
                f"{widest:.1e}",
                bool(widest > 1e-4),
                limits=True,
            ),
        ],
        sentence=(
            f"Without padding the targets for 0 and 1 mean {at_zero:.4f} and {1 + at_one:.4f}, and a trained head says "
            f"so ({np.median(bare[:, 0]):.4f} and {1 + np.median(bare[:, -1]):.4f}); with {DEFAULT} padding bins they "
            f"are off by {np.abs(padded).max():.0e}, and a trained head by {np.median(np.abs(full[:, [0, -1]])):.0e}."
        ),
        panels=[
            Panel(
                "bias of a target near the border",
                "return",
                "expectation minus return",
                [Line(f"{pad} padding bins", NEAR.tolist(), bias(NEAR, pad)[None]) for pad in PADS],
            )
        ],
        notes=[
            "Less than a hundredth of the range: it matters where an advantage of a sure thing should be 0, and for "
            "tests that compare a value with a reward; it is no reason for a critic to fail.",
            "Also a test: `tests/unit/value_service/losses/test_classification.py`.",
        ],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(__doc__, [edges], command="python -m benchmarks.evidence.support_edges", num_seeds=5)
