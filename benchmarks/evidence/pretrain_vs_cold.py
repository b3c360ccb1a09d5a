"""E3: a critic pretrained on recorded rollouts, of one policy or of several, against one that starts from nothing.

    python -m benchmarks.evidence.pretrain_vs_cold [--seeds 3] [--quick] [--write]

Legend: S seeds.

Notable:
- No corpus holds a rollout of the policy under test; its policies have warm starts of their own.
- All corpora have the same number of rows, for each seed another draw of what was recorded once. They differ in who
  made them, and in which words they are about.
- "prompts of the run": the run draws from 2000 words, the other corpora are about other words.
- After pretraining every arm trains alike, on the same batches of a live run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from benchmarks.evidence.recorded import (
    NUM_STEPS,
    NUM_WORDS,
    SETTING,
    critic_rows,
    explained,
    number_of,
    pretrained,
    read_rows,
    rows_of,
    run_of,
    window_means,
    write_rows,
)
from services.wire.value_rows import ValueRow

POLICIES = (7, 8, 9)
"""seeds of warm starts; the policy under test has seed 0"""
NUM_ROWS, NUM_RECORDED = 900, 3000
NUM_FOLLOWED, WINDOW = 120, 10
"""steps: of the run that critics train on, and of a mean"""
SETTINGS = {
    "lr": 2e-3,
    "lr_updates": 10,
    "epochs": 3,
    "batch_size": 64,
    "held_out_fraction": 0.1,
    "eval_interval_updates": 0,
}
COLD = "cold"


@dataclass(frozen=True)
class Corpus:
    """One arm's rows."""

    name: str
    num_policies: int
    same_prompts: bool = False
    """each policy has rolled out the same words; else each its own"""
    prompts_of_run: bool = False
    """words that the run draws from; else others"""


CORPORA = (
    Corpus("one policy", 1),
    Corpus("three policies", 3),
    Corpus("three policies, the same prompts", 3, same_prompts=True),
    Corpus("three policies, prompts of the run", 3, prompts_of_run=True),
)


def choose(corpus: Corpus, recorded: dict[int, list[ValueRow]], num_rows: int, seed: int) -> list[ValueRow]:
    """A corpus from what every policy has rolled out on the same words.

    Args:
        corpus: Which rows.
        recorded: By policy.
        num_rows: How many; each policy has the same share.
        seed: Of the draw.
    """
    share, chosen = num_rows // corpus.num_policies, []
    for place, seed in enumerate(POLICIES[: corpus.num_policies]):
        eligible = [row for row in recorded[seed] if (number_of(row) < NUM_WORDS) == corpus.prompts_of_run]
        eligible.sort(key=lambda row: row.prompt_id)
        rank = np.random.default_rng(seed).permutation(len(eligible))  # the same words, whoever rolled out
        begin = 0 if corpus.same_prompts else place * share
        rows = [eligible[number] for number in rank[begin : begin + share]]
        chosen += [msgspec.structs.replace(row, id=f"{seed}:{row.id}") for row in rows]
    assert len(chosen) == num_rows, f"{corpus.name}: {len(chosen)} rows"
    return chosen


@dataclass
class Found:
    """What one seed showed, by arm."""

    curves: dict[str, np.ndarray]  # [steps] each
    held_out: dict[str, float]
    returns: dict[int, float]
    """mean return of each policy of the corpora"""
    reward: np.ndarray
    """[steps] of the policy under test"""


def one_seed(seed: int, num_steps: int, num_rows: int) -> Found:
    """Record, pretrain each arm, and let all follow the same run."""
    files = {p: rows_of(p, num_rows=NUM_RECORDED, num_words=2 * NUM_WORDS) for p in POLICIES}
    recorded = {p: read_rows(file) for p, file in files.items()}
    live = run_of(seed, num_steps)
    live = replace(live, batches=live.batches[:NUM_FOLLOWED])
    returns = {p: float(np.mean([row.outcome or 0.0 for row in rows])) for p, rows in recorded.items()}
    found = Found({COLD: explained(critic_rows(live))}, {}, returns, live.mean_rewards)
    with tempfile.TemporaryDirectory() as name:
        for number, corpus in enumerate(CORPORA):
            rows = choose(corpus, recorded, num_rows, seed)
            file = write_rows(Path(name) / f"corpus-{number}", rows, like=files[POLICIES[0]])
            trained = Path(name) / f"trained-{number}"
            critic, found.held_out[corpus.name] = pretrained(live, file, trained, seed=seed, settings=SETTINGS)
            found.curves[corpus.name] = explained(critic_rows(live, init_from=str(critic)))
    return found


@dataclass
class Measured:
    """All seeds, by arm."""

    found: list[Found]

    @property
    def arms(self) -> list[str]:
        """In the order of the table."""
        return [COLD, *(corpus.name for corpus in CORPORA)]

    @property
    def first(self) -> dict[str, np.ndarray]:
        """[S] explained variance before the first update."""
        return {arm: np.array([one.curves[arm][0] for one in self.found]) for arm in self.arms}

    @property
    def windows(self) -> dict[str, np.ndarray]:
        """[S, steps / WINDOW] means."""
        return {arm: np.stack([window_means(one.curves[arm], WINDOW) for one in self.found]) for arm in self.arms}

    def checks(self) -> list[Check]:
        """What has to be so."""
        first, windows, corpora = self.first, self.windows, self.arms[1:]
        single, mixed, _, overlap = corpora
        gains = np.mean([windows[arm] - windows[COLD] for arm in corpora], axis=0)  # [S, steps / WINDOW]
        at_first = [first[arm] - first[COLD] for arm in corpora]
        to_mixed = windows[mixed][:, 0] - windows[single][:, 0]
        to_overlap = windows[overlap][:, 0] - windows[mixed][:, 0]
        return [
            Check(
                "before its first update a pretrained critic explains more than a cold one, with every corpus and seed",
                f"least gain of the corpora: {over_seeds(np.min(at_first, axis=0), '+.3f')}",
                bool((np.array(at_first) > 0).all()),
            ),
            Check(
                f"over the first {WINDOW} steps too",
                f"mean gain of the corpora: {over_seeds(gains[:, 0], '+.3f')}",
                all(bool((windows[arm][:, 0] > windows[COLD][:, 0]).all()) for arm in corpora),
            ),
            Check(
                f"the gap narrows: over the last {WINDOW} steps it is less than half of that, with every seed",
                f"mean gain of the corpora: {over_seeds(gains[:, -1], '+.3f')}",
                bool((gains[:, -1] < 0.5 * gains[:, 0]).all()),
            ),
            Check(
                f"over the first {WINDOW} steps three policies' rollouts serve better than one's, with every seed",
                over_seeds(to_mixed, "+.3f"),
                bool((to_mixed > 0).all()),
            ),
            Check(
                f"over the first {WINDOW} steps the run's own prompts serve better than others, with every seed",
                over_seeds(to_overlap, "+.3f"),
                bool((to_overlap > 0).all()),
                limits=True,
            ),
        ]

    def table(self) -> str:
        """Explained variance by arm."""
        first, windows = self.first, self.windows
        num_windows = windows[COLD].shape[1]
        shown = sorted({0, 1, 4, num_windows // 2, num_windows - 1} & set(range(num_windows)))
        head = ["EV of the returns", "held-out prompts", "before update 1"]
        head += [f"steps {w * WINDOW + 1}-{(w + 1) * WINDOW}" for w in shown]
        body = [
            [
                arm,
                "-" if arm == COLD else over_seeds([one.held_out[arm] for one in self.found]),
                over_seeds(first[arm]),
                *(over_seeds(windows[arm][:, w]) for w in shown),
            ]
            for arm in self.arms
        ]
        return table(head, body)

    def sentence(self) -> str:
        """The verdict's."""
        first, windows = self.first, self.windows
        single, mixed = self.arms[1:3]
        ends = {arm: np.median(windows[arm][:, -1]) for arm in self.arms}
        return (
            f"Before its first update a cold critic explains {np.median(first[COLD]):.2f}, one pretrained on one "
            f"policy {np.median(first[single]):.2f}, on three {np.median(first[mixed]):.2f}; over the last {WINDOW} "
            f"steps {ends[COLD]:.2f}, {ends[single]:.2f} and {ends[mixed]:.2f} (medians of {len(self.found)} seeds)."
        )


def experiment(seeds: Sequence[int], quick: bool) -> Page:
    """All arms on each seed's corpora and run."""
    num_steps, num_rows = (NUM_STEPS // 10, NUM_ROWS // 10) if quick else (NUM_STEPS, NUM_ROWS)
    found = [one_seed(seed, num_steps, num_rows) for seed in seeds]
    measured = Measured(found)
    windows = measured.windows
    middles = [(w + 0.5) * WINDOW for w in range(windows[COLD].shape[1])]
    returns = "; ".join(f"{found[0].returns[p]:.2f}" for p in POLICIES)
    return Page(
        name="E3",
        title="a pretrained critic and a cold one",
        claim=Claim(
            "A critic pretrained on recorded rollouts explains more from the first update on; rollouts of several "
            "policies make a better corpus than those of one; the gap to a cold critic narrows as both train.",
            "reports of large-scale value pretraining; arXiv 2607.27203 on corpora of several policies",
        ),
        setting=f"{SETTING} Here the first {NUM_FOLLOWED} are used. Before that, arms pretrain on {NUM_ROWS} rollouts "
        f"of policies with other warm starts (mean returns of the three: {returns}): {SETTINGS['epochs']} epochs of "
        f"{SETTINGS['batch_size']} rows at {SETTINGS['lr']:g}, a tenth of the prompts held out. Prompts are of "
        f"{NUM_WORDS} words that the run does not have, but for the last arm. Explained variance (EV) is of each batch "
        "before an update has seen it.",
        tables=[measured.table()],
        checks=measured.checks(),
        sentence=measured.sentence(),
        panels=[
            Panel(
                f"Explained variance, mean over {WINDOW} steps",
                "policy step",
                "explained variance",
                [Line(arm, middles, windows[arm]) for arm in measured.arms],
            )
        ],
        notes=[
            "The head starts at zero, so a cold critic explains exactly 0 at first; a head with the usual random "
            "weights would begin below that (E2).",
            f"The policy under test moves little: its mean reward over {WINDOW} steps goes from "
            f"{over_seeds([one.reward[:WINDOW].mean() for one in found])} to "
            f"{over_seeds([one.reward[-WINDOW:].mean() for one in found])}.",
            "Its first batch has 64 returns: the column before update 1 is a noisy one.",
        ],
    )


if __name__ == "__main__":
    run(__doc__, [experiment], command="python -m benchmarks.evidence.pretrain_vs_cold", num_seeds=3)
