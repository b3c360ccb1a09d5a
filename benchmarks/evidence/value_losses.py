"""E2 and E2b: classification against regression for the critic, with features of different scale and with outliers.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.value_losses [--seeds 5] [--quick] [--write]

Notable:
- The critic is its head alone, on fixed features (`critic_head.py`), with the value service's defaults. Hidden states
  of language models have norms of 60 to 200; a head sees them as they are.
- A head has one output under MSE and 57 under the others.
- Learning rates are the same for all losses, except where the best of several is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from benchmarks.evidence.critic_head import BATCH, FEATURES, HELD_OUT, SIGNAL, Trained, ceiling, train

LR = 1e-3
LRS = (3e-4, 1e-3, 3e-3)
AT = (1, 10, 30, 100, 300, 600)
NORMS = (1, 16, 60, 200)
WELL_SCALED, LARGE, SWEPT = (1, 16), (60, 200), (16, 60, 200)
"""16 is the norm of 256 coordinates of unit variance."""
STD = 0.02
UNIT = {"low": 0.0, "high": 1.0, "num_bins": 51, "pad_bins": 3}
WIDE = {"low": 0.0, "high": 10.0, "num_bins": 101, "pad_bins": 3}
CONSTANTS: dict[str, dict[str, float]] = {"mse": {}, "two_hot": UNIT, "hl_gauss": UNIT | {"sigma_ratio": 0.75}}


# ---------------------------------------------------------------------------------------------------------------------
# E2


Key = tuple[float, int, str]
"""(head's initial deviation, norm, loss)"""


def classification(seeds: Sequence[int], quick: bool) -> Page:
    at = AT[:4] if quick else AT
    runs: dict[Key, list[Trained]] = {
        (std, norm, loss): [train(loss, constants, seed, norm=norm, std=std, lr=LR, at=at) for seed in seeds]
        for std in (STD, 0.0)
        for norm in NORMS
        for loss, constants in CONSTANTS.items()
    }
    best = best_of_rates(seeds, at[:-1], runs)
    curves = {key: np.array([trained.explained for trained in many]) for key, many in runs.items()}
    peaks = {key: np.array([trained.peak_norm for trained in many]) for key, many in runs.items()}
    columns = [f"EV@{update}" for update in at]
    rows = [
        [
            f"N(0, {std:g})" if std else "zero",
            str(norm),
            loss,
            *map(over_seeds, curves[std, norm, loss].T),
            over_seeds(peaks[std, norm, loss], ".1f"),
        ]
        for std, norm, loss in runs
    ]
    late = at[-2]
    return Page(
        name="E2",
        title="a classification loss for the critic",
        claim=Claim(
            "Trained by cross-entropy on HL-Gauss targets, a critic learns where one trained by squared errors does "
            "not: its gradients are bounded and it does not begin far off.",
            "arXiv 2403.03950 and arXiv 2608.02181, which reports MSE below two-hot below HL-Gauss",
        ),
        setting=(
            f"A head on {FEATURES} features of norm 1 to 200, of which one direction decides by a logistic (slope "
            f"{SIGNAL:g}) whether the return is 1 or 0. {BATCH} new states an update, AdamW at {LR:g}, gradients "
            f"clipped to 1. The head's weight begins as N(0, {STD:g}) or at zero, which is our default. Explained "
            f"variance (EV) of {HELD_OUT} held-out states after so many updates; at best about {ceiling():.2f}."
        ),
        tables=[
            table(["head", "feature norm", "loss", *columns, "peak gradient norm"], rows),
            f"The best EV@{late} over learning rates of {', '.join(f'{lr:g}' for lr in LRS)}, head N(0, {STD:g}):\n\n"
            + table(
                ["loss", *(f"norm {norm}" for norm in SWEPT)],
                [[loss, *(over_seeds(best[norm, loss]) for norm in SWEPT)] for loss in CONSTANTS],
            ),
        ],
        checks=checks_of(curves, peaks, best, at),
        sentence=sentence_of(curves, at),
        panels=[
            Panel(
                f"norm {norm}, head N(0, {STD:g})",
                "updates",
                "explained variance",
                [Line(loss, at, curves[STD, norm, loss]) for loss in CONSTANTS],
                (-1.0, 0.7),
                x_log=True,
            )
            for norm in (16, 60, 200)
        ],
        notes=[
            "The features' norm acts as a learning rate: a step of AdamW moves an output by about lr times the sum of "
            "the features' sizes, whatever the loss. A scalar output moves by that much; an expectation over a support "
            "cannot leave it.",
            "A linear head cannot follow a logistic, a softmax can: part of what classification wins late is that.",
        ],
    )


def best_of_rates(
    seeds: Sequence[int], at: Sequence[int], runs: Mapping[Key, list[Trained]]
) -> dict[tuple[int, str], np.ndarray]:
    """(norm, loss) to [S] the last EV at the learning rate with the best median; those at `LR` are known."""
    best: dict[tuple[int, str], np.ndarray] = {}
    for norm in SWEPT:
        for loss, constants in CONSTANTS.items():
            known = [trained.explained[len(at) - 1] for trained in runs[STD, norm, loss]]
            tried = [np.array(known)]
            for lr in LRS:
                if lr != LR:
                    many = [train(loss, constants, seed, norm=norm, std=STD, lr=lr, at=at[-1:]) for seed in seeds]
                    tried.append(np.array([trained.explained[-1] for trained in many]))
            best[norm, loss] = max(tried, key=lambda finals: float(np.median(finals)))
    return best


def checks_of(
    curves: Mapping[Key, np.ndarray],
    peaks: Mapping[Key, np.ndarray],
    best: Mapping[tuple[int, str], np.ndarray],
    at: Sequence[int],
) -> list[Check]:
    def pair(std: float, norm: int, update: int) -> tuple[np.ndarray, np.ndarray]:
        mse, hl = (curves[std, norm, loss][:, at.index(update)] for loss in ("mse", "hl_gauss"))
        return mse, hl

    def shown(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
        return "; ".join(f"MSE {over_seeds(mse)}, HL-Gauss {over_seeds(hl)}" for mse, hl in pairs)

    first, late, last = at[0], at[-2], at[-1]
    begins, learns = ([pair(STD, norm, update) for norm in LARGE] for update in (first, late))
    zero = [pair(0.0, norm, last) for norm in LARGE]
    scaled_early, scaled_last = ([pair(STD, norm, update) for norm in WELL_SCALED] for update in (late, last))
    tops = [(peaks[STD, norm, "mse"], peaks[STD, norm, "hl_gauss"]) for norm in LARGE]
    norms = " and ".join(map(str, LARGE))
    swept = [(best[norm, "mse"], best[norm, "hl_gauss"]) for norm in LARGE]
    return [
        Check(
            f"norms {norms}, EV@{first}: MSE below -1, HL-Gauss above -1",
            shown(begins),
            all(bool((mse < -1).all() and (hl > -1).all()) for mse, hl in begins),
        ),
        Check(
            f"norms {norms}, EV@{late}: HL-Gauss above MSE with every seed",
            shown(learns),
            all(bool((hl > mse).all()) for mse, hl in learns),
        ),
        Check(
            "two-hot lies between the two or at HL-Gauss there",
            "; ".join(over_seeds(curves[STD, norm, "two_hot"][:, at.index(late)]) for norm in LARGE),
            all(
                bool(
                    np.median(curves[STD, norm, "mse"][:, at.index(late)])
                    <= np.median(curves[STD, norm, "two_hot"][:, at.index(late)])
                    <= np.median(curves[STD, norm, "hl_gauss"][:, at.index(late)]) + 0.02
                )
                for norm in LARGE
            ),
        ),
        Check(
            f"norms {norms}: the peak gradient norm of MSE is the larger one with every seed",
            "; ".join(f"MSE {over_seeds(mse, '.0f')}, HL-Gauss {over_seeds(hl, '.0f')}" for mse, hl in tops),
            all(bool((mse > hl).all()) for mse, hl in tops),
        ),
        Check(
            f"with well-scaled features (norms {' and '.join(map(str, WELL_SCALED))}) MSE is no worse at EV@{late}",
            shown(scaled_early),
            all(bool((mse >= hl).all()) for mse, hl in scaled_early),
            limits=True,
        ),
        Check(
            f"and still no worse at EV@{last}",
            shown(scaled_last),
            all(bool((mse >= hl).all()) for mse, hl in scaled_last),
            limits=True,
        ),
        Check(
            f"a head that begins at zero rescues MSE in part at norms {norms}: EV@{last} above 0, below HL-Gauss",
            shown(zero),
            all(bool((mse > 0).all() and (mse < hl).all()) for mse, hl in zero),
            limits=True,
        ),
        Check(
            f"the best of {len(LRS)} learning rates brings MSE within 0.1 of HL-Gauss at norms {norms}",
            shown(swept),
            all(bool(np.median(mse) > np.median(hl) - 0.1) for mse, hl in swept),
            limits=True,
        ),
    ]


def sentence_of(curves: Mapping[Key, np.ndarray], at: Sequence[int]) -> str:
    def medians(std: float, norm: int, index: int) -> str:
        return " against ".join(f"{np.median(curves[std, norm, loss][:, index]):.2f}" for loss in ("mse", "hl_gauss"))

    return (
        f"With features of norm 200 and a random head, MSE against HL-Gauss is {medians(STD, 200, 0)} after {at[0]} "
        f"update and {medians(STD, 200, -2)} after {at[-2]}; with a head from zero {medians(0.0, 200, -2)}; with "
        f"features of norm 1 it is the other way round, {medians(STD, 1, -2)}: classification is robust to scale, not "
        "better in general."
    )


# ---------------------------------------------------------------------------------------------------------------------
# E2b


OUTLIERS, OUTLIER = 0.01, 10.0
OUTLIER_AT = (50, 100, 250, 500)
OUTLIER_NORM = 60


class Arm(NamedTuple):
    """A loss, and what it is given."""

    loss: str
    constants: Mapping[str, float]
    outliers: bool = True
    clamps: bool = False
    """targets are cut to [0, 1] before the loss; a classification on [0, 1] does so itself"""


ARMS = {
    "MSE": Arm("mse", {}),
    "MSE, targets clamped": Arm("mse", {}, clamps=True),
    "MSE, no outliers": Arm("mse", {}, outliers=False),
    "HL-Gauss on [0, 1]": Arm("hl_gauss", CONSTANTS["hl_gauss"]),
    "HL-Gauss on [0, 1], no outliers": Arm("hl_gauss", CONSTANTS["hl_gauss"], outliers=False),
    "HL-Gauss on [0, 10]": Arm("hl_gauss", WIDE | {"sigma_ratio": 0.75}),
}


def outlying(arm: Arm, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(2000 + seed)

    def spoil(returns: torch.Tensor) -> torch.Tensor:
        wrong = torch.rand(returns.shape, generator=generator) < OUTLIERS
        spoiled = torch.where(wrong, OUTLIER, returns) if arm.outliers else returns
        return spoiled.clamp(0, 1) if arm.clamps else spoiled

    return spoil


def outliers(seeds: Sequence[int], quick: bool) -> Page:
    at = OUTLIER_AT[:2] if quick else OUTLIER_AT
    curves = {
        name: np.array(
            [
                train(
                    arm.loss, arm.constants, seed, norm=OUTLIER_NORM, std=0.0, lr=LR, at=at, spoil=outlying(arm, seed)
                ).explained
                for seed in seeds
            ]
        )
        for name, arm in ARMS.items()
    }
    middle, last = ({name: runs[:, index] for name, runs in curves.items()} for index in (-2, -1))
    mse, clamped, hl, wide = (
        last[n] for n in ("MSE", "MSE, targets clamped", "HL-Gauss on [0, 1]", "HL-Gauss on [0, 10]")
    )
    shown = {name: f"{np.median(column):.2f}" for name, column in last.items()}
    return Page(
        name="E2b",
        title="a classification loss when one reward in a hundred is wrong",
        claim=Claim(
            "A critic trained by classification is hardly disturbed by rare rewards out of range, one trained by "
            "squared errors is.",
            "arXiv 2403.03950, which argues for robustness to noise, and own",
        ),
        setting=(
            f"As in [E2](E2.md) with features of norm {OUTLIER_NORM} and a head from zero; each training return is "
            f"{OUTLIER:g} with probability {OUTLIERS:g}. Explained variance (EV) is on held-out states with clean "
            "returns. HL-Gauss on [0, 1] clamps its targets, so an outlier counts as a success; MSE is run with and "
            "without the same clamp, and HL-Gauss also on a support that holds the outliers."
        ),
        tables=[
            table(
                ["critic", *(f"EV@{update}" for update in at)],
                [[name, *map(over_seeds, runs.T)] for name, runs in curves.items()],
            )
        ],
        checks=[
            Check(
                f"HL-Gauss above MSE at EV@{at[-2]} and EV@{at[-1]} with every seed",
                "; ".join(
                    f"HL-Gauss {over_seeds(column['HL-Gauss on [0, 1]'])}, MSE {over_seeds(column['MSE'])}"
                    for column in (middle, last)
                ),
                all(bool((column["HL-Gauss on [0, 1]"] > column["MSE"]).all()) for column in (middle, last)),
            ),
            Check(
                "HL-Gauss loses less than 0.05 to its own run without outliers",
                f"{over_seeds(last['HL-Gauss on [0, 1], no outliers'] - hl, '.3f')}",
                bool((last["HL-Gauss on [0, 1], no outliers"] - hl < 0.05).all()),
            ),
            Check(
                "the clamp explains part: MSE with it is above MSE without, with every seed",
                f"{over_seeds(clamped)} against {over_seeds(mse)}",
                bool((clamped > mse).all()),
                limits=True,
            ),
            Check(
                "the clamp does not explain all: HL-Gauss is above MSE with the clamp, with every seed",
                f"{over_seeds(hl)} against {over_seeds(clamped)}",
                bool((hl > clamped).all()),
                limits=True,
            ),
            Check(
                "it is the clamp that protects: HL-Gauss on a support up to the outliers is below MSE, with every seed",
                f"{over_seeds(wide)} against {over_seeds(mse)}",
                bool((wide < mse).all()),
                limits=True,
            ),
        ],
        sentence=(
            f"After {at[-1]} updates MSE explains {shown['MSE']} and HL-Gauss {shown['HL-Gauss on [0, 1]']}; but MSE "
            f"with the same clamp explains {shown['MSE, targets clamped']}, as without outliers "
            f"({shown['MSE, no outliers']}), and HL-Gauss on a support that holds the outliers "
            f"{shown['HL-Gauss on [0, 10]']}: what protects from outliers is the clamp."
        ),
        panels=[
            Panel(
                f"{OUTLIERS:.0%} of returns are {OUTLIER:g}",
                "updates",
                "explained variance, clean returns",
                [Line(name, at, runs) for name, runs in curves.items()],
                (-1.0, 0.7),
            )
        ],
        notes=[
            "Clamped targets are counted (`value/target_oob_fraction`), so a reward out of range is seen either way.",
            "The rest of the gap between HL-Gauss and the clamped MSE is that of E2: there is one without outliers.",
        ],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(__doc__, [classification, outliers], command="python -m benchmarks.evidence.value_losses", num_seeds=5)
