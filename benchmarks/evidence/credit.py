"""E1: what skipping observations in credit assignment is good for, with a critic that errs on observations.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.credit [--seeds 5] [--quick] [--write]

Legend: N traces, T tokens of a trace, L tokens of an observation.

Notable:
- A trace is four turns of eight action tokens with an observation after each but the last. The last token of a turn is
  a tool call, good or bad by a coin; all else is filler. Every turn's call and the task's difficulty move the
  probability of success, so the value of every state and the advantage of every call are known exactly.
- Both ways are `skip_observation_gae`: "plain" is told that every token of the trace is an action.
- The critic is right on action tokens. On an observation it is off by one random number, the same at all its tokens: it
  was never trained there, and what it reads is foreign text. "By token" draws the error anew at each token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from orchestrator.algorithms.gae import length_adaptive_lambda, skip_observation_gae

ALPHA = 1.5
TURNS, TURN = 4, 8
OBSERVATIONS = (0, 8, 40, 160)
ERROR = 0.3
"""Standard deviation of the critic's error on an observation."""
CALL, DIFFICULTY = 0.7, 1.0
"""Logits: what a call moves either way, and the standard deviation over tasks."""


class Traces(NamedTuple):
    """N traces of the same shape, without prompts."""

    mask: np.ndarray  # [T]
    values: np.ndarray  # [N, T] exact
    rewards: np.ndarray  # [N]
    call_advantages: np.ndarray  # [N, TURNS - 1] of the calls that an observation follows, exact


def sample(rng: np.random.Generator, num: int, observation: int) -> Traces:
    """Traces with all that is known of them."""
    difficulty = DIFFICULTY * rng.normal(size=num)
    calls = rng.choice([-CALL, CALL], size=(num, TURNS))
    after = np.empty((num, TURNS + 1))  # probability of success with so many calls made
    for made in range(TURNS + 1):
        rest = itertools.product([-CALL, CALL], repeat=TURNS - made)
        logits = difficulty + calls[:, :made].sum(axis=1)
        after[:, made] = np.mean([1 / (1 + np.exp(-(logits + sum(more)))) for more in rest], axis=0)
    rewards = (rng.random(num) < after[:, -1]).astype(float)
    turns = [1] * TURN + [0] * observation
    mask = np.array((turns * TURNS)[: TURNS * len(turns) - observation], dtype=bool)
    made = np.arange(len(mask)) // len(turns) + (np.arange(len(mask)) % len(turns) >= TURN)  # before each token
    return Traces(mask, after[:, made], rewards, np.diff(after, axis=1)[:, :-1])


def judged(rng: np.random.Generator, traces: Traces, error: float, by_token: bool) -> np.ndarray:
    """[N, T] values as the critic gives them."""
    errors = error * rng.normal(size=traces.values.shape)
    if not by_token:
        starts = np.flatnonzero(~traces.mask & np.r_[True, traces.mask[:-1]])
        for start in starts:
            end = start + int(np.argmax(traces.mask[start:]))
            errors[:, start:end] = errors[:, start : start + 1]
    return np.where(traces.mask, traces.values, traces.values + errors)


def advantages(traces: Traces, values: np.ndarray, way: str) -> np.ndarray:
    """[N, T] by one way: "skip", "plain", or "plain, lambda of all tokens"."""
    mask = traces.mask if way == "skip" else np.ones_like(traces.mask)
    counted = mask if way.endswith("all tokens") else traces.mask
    lam = length_adaptive_lambda(int(counted.sum()), ALPHA)
    rows = np.zeros(values.shape)
    for row, own, reward in zip(rows, values, traces.rewards, strict=True):
        rewards = np.zeros(len(mask))
        rewards[-1] = reward
        row[:] = skip_observation_gae(own, mask, rewards, gamma=1.0, lam=lam)[0]
    return rows


WAYS = ("skip", "plain", "plain, lambda of all tokens")
CRITICS = {
    "errs by observation": (ERROR, False),
    "errs by token": (ERROR, True),
    "exact": (0.0, False),
}
ERRORS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Of a critic that errs by observation, at the longest observation."""
Curves = dict[tuple[str, str], np.ndarray]
"""(critic, way) to [S, L] correlations."""


def correlations(traces: Traces, values: np.ndarray, way: str, observation: int) -> tuple[float, float, float]:
    """Of the first token's advantage with the reward, of calls' with the reward, of calls' with their true advantage.

    Calls are those that an observation follows: the mean over them.
    """
    credit = advantages(traces, values, way)
    calls = credit[:, TURN - 1 :: TURN + observation][:, : TURNS - 1]  # [N, TURNS - 1]
    return (
        _correlation(credit[:, 0], traces.rewards),
        float(np.mean([_correlation(column, traces.rewards) for column in calls.T])),
        float(np.mean([_correlation(a, b) for a, b in zip(calls.T, traces.call_advantages.T, strict=True)])),
    )


def measure(seeds: Sequence[int], num: int) -> tuple[Curves, Curves, Curves]:
    """`correlations` of each critic and way, by seed and length of observation."""
    keys = list(itertools.product(CRITICS, WAYS))
    curves: tuple[Curves, ...] = tuple({key: np.empty((len(seeds), len(OBSERVATIONS))) for key in keys} for _ in "123")
    for (critic, way), i, j in itertools.product(keys, range(len(seeds)), range(len(OBSERVATIONS))):
        rng = np.random.default_rng(seeds[i])
        traces = sample(rng, num, OBSERVATIONS[j])
        values = judged(rng, traces, *CRITICS[critic])
        for curve, number in zip(curves, correlations(traces, values, way, OBSERVATIONS[j]), strict=True):
            curve[critic, way][i, j] = number
    return curves[0], curves[1], curves[2]


def by_error(seeds: Sequence[int], num: int) -> dict[str, np.ndarray]:
    """Way to [S, error]: correlation of calls' advantages with their true ones at the longest observation."""
    curves = {way: np.empty((len(seeds), len(ERRORS))) for way in ("skip", "plain")}
    for way, i, j in itertools.product(curves, range(len(seeds)), range(len(ERRORS))):
        rng = np.random.default_rng(seeds[i])
        traces = sample(rng, num, OBSERVATIONS[-1])
        values = judged(rng, traces, ERRORS[j], by_token=False)
        curves[way][i, j] = correlations(traces, values, way, OBSERVATIONS[-1])[2]
    return curves


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def checks_of(first: Curves, call: Curves, own: Curves) -> list[Check]:
    skip, plain = ("errs by observation", "skip"), ("errs by observation", "plain")
    spread = max(float(np.ptp(np.median(curves[skip], axis=0))) for curves in (first, call, own))
    far = -1  # the longest observation
    counted, exact = first["errs by observation", "plain, lambda of all tokens"], own["exact", "plain"]
    return [
        Check(
            "skip: no correlation depends on the length of observations",
            f"differences up to {spread:.3f}",
            spread < 0.01,
        ),
        Check(
            f"plain, first token and reward: below half of skip's from L = {OBSERVATIONS[2]}",
            f"{over_seeds(first[plain][:, 2])} against {over_seeds(first[skip][:, 2])}",
            bool((first[plain][:, 2:] < first[skip][:, 2:] / 2).all()),
        ),
        Check(
            f"plain, calls and reward: below a third of skip's at L = {OBSERVATIONS[far]}",
            f"{over_seeds(call[plain][:, far])} against {over_seeds(call[skip][:, far])}",
            bool((call[plain][:, far] < call[skip][:, far] / 3).all()),
        ),
        Check(
            f"plain, calls and their own true advantage: below skip's at L = {OBSERVATIONS[far]}",
            f"{over_seeds(own[plain][:, far])} against {over_seeds(own[skip][:, far])}",
            bool((own[plain][:, far] < own[skip][:, far]).all()),
        ),
        Check(
            "with an exact critic nothing is lost: plain's credit of calls is as close to the true one as skip's",
            f"{over_seeds(exact[:, far])} against {over_seeds(own['exact', 'skip'][:, far])}",
            bool((exact >= own["exact", "skip"] - 0.01).all()),
            limits=True,
        ),
        Check(
            "with an exact critic the first token's correlation with the reward has no gap either",
            f"{over_seeds(first['exact', 'plain'][:, far])} against {over_seeds(first['exact', 'skip'][:, far])}",
            bool((np.abs(first["exact", "plain"] - first["exact", "skip"]) < 0.05).all()),
            limits=True,
        ),
        Check(
            "most of the gap is lambda: plain that counts all tokens in it keeps nine tenths of skip's first token",
            f"{over_seeds(counted[:, far])} against {over_seeds(first[skip][:, far])}",
            bool((counted >= 0.9 * first[skip]).all()),
            limits=True,
        ),
    ]


def table_of(title: str, curves: Curves) -> str:
    rows = [[*key, *(over_seeds(column) for column in runs.T)] for key, runs in curves.items()]
    return f"{title}\n\n" + table(["critic", "GAE", *(f"L = {length}" for length in OBSERVATIONS)], rows)


def skipping(seeds: Sequence[int], quick: bool) -> Page:
    num = 300 if quick else 2000
    first, call, own = measure(seeds, num)
    wrong = by_error(seeds, num)
    errs = "errs by observation"

    def panel(title: str, curves: Curves, critic: str) -> Panel:
        lines = [Line(way, range(len(OBSERVATIONS)), curves[critic, way]) for way in WAYS]
        names = [str(length) for length in OBSERVATIONS]
        return Panel(title, "tokens of an observation", "correlation", lines, (0, 1.02), x_names=names)

    skip, plain = np.median(first[errs, "skip"][:, -1]), np.median(first[errs, "plain"], axis=0)
    return Page(
        name="E1",
        title="skipping observations in credit assignment",
        claim=Claim(
            "In traces with tool output, GAE over action tokens alone keeps its credit whatever the length of the "
            "output; GAE over all tokens loses it, for a critic is unreliable on text that it was not trained on.",
            "arXiv 2607.07508, equations 4 and 5, which give the method without this measurement",
        ),
        setting=(
            f"{num} traces a seed of {TURNS} turns of {TURN} action tokens, observations of L tokens between them; the "
            f"last token of a turn is a call, good or bad by a coin, which moves the logit of success by {CALL} either "
            f"way; tasks differ by a standard deviation of {DIFFICULTY:g}. True values and advantages are known. The "
            f"critic is exact on actions and errs by a standard deviation of {ERROR:g} on observations: one error for "
            f"a whole observation, or one for each token. gamma 1, length-adaptive lambda with alpha {ALPHA}, counted "
            "over action tokens unless said otherwise. Plain GAE is the same function, told that every token acts."
        ),
        tables=[
            table_of("First token's advantage and the reward:", first),
            table_of("Calls' advantages and the reward:", call),
            table_of("Calls' advantages and their true ones:", own),
            f"Calls' advantages and their true ones at L = {OBSERVATIONS[-1]}, by the error on observations:\n\n"
            + table(
                ["GAE", *(f"error {error:g}" for error in ERRORS)],
                [[way, *(over_seeds(column) for column in runs.T)] for way, runs in wrong.items()],
            ),
        ],
        checks=checks_of(first, call, own),
        sentence=(
            f"With a critic that errs on observations, the first token's advantage correlates with the reward by "
            f"{skip:.2f} at any length when they are skipped, and by {', '.join(f'{x:.2f}' for x in plain[1:])} at "
            f"L = {', '.join(map(str, OBSERVATIONS[1:]))} when they are not; but that is mostly lambda's decay, and "
            "against a call's true advantage plain GAE is worse only where the critic's error outweighs the outcome's "
            "noise."
        ),
        panels=[
            panel("first token and reward", first, errs),
            panel("calls and true advantage", own, errs),
            Panel(
                f"calls and true advantage, L = {OBSERVATIONS[-1]}",
                "error of the critic on observations",
                "correlation",
                [Line(way, ERRORS, runs) for way, runs in wrong.items()],
                (0, 1.02),
            ),
        ],
        notes=[
            "Correlation with the reward asks how much of the outcome reaches a token; correlation with the true "
            "advantage asks how much of what reaches it is its own doing. Long observations trade the first for the "
            "second: plain GAE at a long observation is nearly the critic's one-step judgement, the best there is with "
            "an exact critic and noise with a bad one.",
            "Skipping makes credit independent of what the critic says on observations and of their length; it does "
            "not make it the least noisy estimate.",
        ],
    )


if __name__ == "__main__":
    run(__doc__, [skipping], command="python -m benchmarks.evidence.credit", num_seeds=5)
