"""E4: one, two and four updates of the critic a batch, at equal steps of the policy.

    python -m benchmarks.evidence.critic_updates [--seeds 3] [--quick] [--write]

Legend: S seeds, K updates of the critic on each batch.

Notable:
- Arms differ in `value.updates_per_batch` alone; targets stay fixed during the K updates.
- One more arm takes a single update at four times the learning rate: is it the number of updates, or their size?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from benchmarks.evidence.recorded import (
    BATCH_SIZE,
    CRITIC_LR,
    NUM_STEPS,
    NUM_WORDS,
    SETTING,
    critic_rows,
    explained,
    run_of,
    window_means,
)
from services.config.train import ValueConfig

UPDATES = (1, 2, 4)
LARGE_LR = 4 * CRITIC_LR
NAMES = [f"K = {k}" for k in UPDATES]
LARGE = f"K = 1, lr {LARGE_LR:g}"
WINDOW, EARLY = 10, 20
"""steps: of a mean, and of what counts as the beginning"""


def _large(value: ValueConfig) -> dict[str, Any]:
    return {"optim": value.optim.model_copy(update={"lr": LARGE_LR})}


def _checks(runs: dict[str, np.ndarray], ends: dict[str, np.ndarray]) -> list[Check]:
    """What has to be so.

    Args:
        runs: By arm, [S, steps / WINDOW] means.
        ends: By arm, [S] means over the last quarter.
    """
    by_k, large = ([ends[name] for name in NAMES], ends[LARGE])
    early = runs[NAMES[1]] - runs[NAMES[0]]
    early = early[:, : max(early.shape[1] * 3 // 20, 1)]  # about the first 15 %
    start = [runs[name][:, : EARLY // WINDOW].mean(1) for name in NAMES]
    return [
        Check(
            f"over the first {EARLY} steps, K = 2 explains more than K = 1 and K = 4 than K = 2, with every seed",
            f"{over_seeds(start[1] - start[0], '+.3f')} and {over_seeds(start[2] - start[1], '+.3f')}",
            bool((start[1] > start[0]).all() and (start[2] > start[1]).all()),
        ),
        Check(
            "over the last quarter of the steps, K = 2 explains more than K = 1, with every seed",
            over_seeds(by_k[1] - by_k[0], "+.3f"),
            bool((by_k[1] > by_k[0]).all()),
        ),
        Check(
            "over the last quarter, K = 4 explains more than K = 2, with every seed",
            over_seeds(by_k[2] - by_k[1], "+.3f"),
            bool((by_k[2] > by_k[1]).all()),
        ),
        Check(
            f"K = 2 explains less than K = 1 somewhere in the first {early.shape[1] * WINDOW} steps, with some seed",
            f"least of K = 2 minus K = 1 over {WINDOW} steps: {over_seeds(early.min(1), '+.3f')}",
            bool((early < 0).any()),
            limits=True,
        ),
        Check(
            "over the last quarter, one update at four times the learning rate explains less than K = 4",
            over_seeds(large - by_k[2], "+.3f"),
            bool((large < by_k[2]).all()),
            limits=True,
        ),
    ]


def _table(runs: dict[str, np.ndarray], ends: dict[str, np.ndarray]) -> str:
    """Explained variance by arm; arguments as of `_checks`."""
    num_windows = runs[LARGE].shape[1]
    shown = sorted({0, 1, 4, num_windows // 2, num_windows - 1} & set(range(num_windows)))
    head = ["EV, mean over steps", *(f"{w * WINDOW + 1}-{(w + 1) * WINDOW}" for w in shown), "last quarter"]
    body = [
        [name, *(over_seeds(run[:, w]) for w in shown), over_seeds(ends[name], ".3f")] for name, run in runs.items()
    ]
    return table(head, body)


def experiment(seeds: Sequence[int], quick: bool) -> Page:
    """All arms on each seed's run."""
    num_steps = NUM_STEPS // 10 if quick else NUM_STEPS
    curves: dict[str, list[np.ndarray]] = {name: [] for name in [*NAMES, LARGE]}
    rewards = []
    for seed in seeds:
        recorded = run_of(seed, num_steps)
        rewards.append(window_means(recorded.mean_rewards, WINDOW))
        for name, k in zip(NAMES, UPDATES, strict=True):
            curves[name].append(window_means(explained(critic_rows(recorded, updates_per_batch=k)), WINDOW))
        curves[LARGE].append(window_means(explained(critic_rows(recorded, **_large(recorded.value))), WINDOW))
    runs = {name: np.stack(curve) for name, curve in curves.items()}  # [S, steps / WINDOW]
    late = slice(-(runs[LARGE].shape[1] // 4 or 1), None)
    ends = {name: run[:, late].mean(1) for name, run in runs.items()}  # [S]
    middles = [(w + 0.5) * WINDOW for w in range(runs[LARGE].shape[1])]
    reward = np.stack(rewards)
    return Page(
        name="E4",
        title="critic updates a batch",
        claim=Claim(
            "A critic that takes K = 2 updates on each batch of a policy step keeps up better than one that takes one.",
            "arXiv 2607.07508, its ablation of K",
        ),
        setting=f"{SETTING} Explained variance (EV) is of each batch before an update has seen it.",
        tables=[_table(runs, ends)],
        checks=_checks(runs, ends),
        sentence=f"Over the first {EARLY} steps the critic explains "
        + ", ".join(f"{np.median(runs[name][:, : EARLY // WINDOW].mean(1)):.2f} with {name}" for name in NAMES)
        + "; over the last quarter of the steps "
        + ", ".join(f"{np.median(ends[name]):.2f}" for name in NAMES)
        + f" (medians of {len(seeds)} seeds).",
        panels=[
            Panel(
                f"Explained variance, mean over {WINDOW} steps",
                "policy step",
                "explained variance",
                [Line(name, middles, run) for name, run in runs.items()],
            )
        ],
        notes=[
            f"The policy's mean reward goes from {over_seeds(reward[:, 0])} to {over_seeds(reward[:, -1])}: what the "
            "critic follows moves little.",
            f"The criterion about the first {EARLY} steps was made after a first look at the curves, the others not.",
            f"A word comes back {NUM_STEPS * BATCH_SIZE / NUM_WORDS:.1f} times in a run. More updates also mean more "
            "memory of words seen; on a stream without repeats the gain may be smaller.",
            "The paper's numbers are rewards of a 30B model after hundreds of steps; nothing here says that a better "
            "fit makes a better policy.",
        ],
    )


if __name__ == "__main__":
    run(__doc__, [experiment], command="python -m benchmarks.evidence.critic_updates", num_seeds=3)
