"""Scores of branches and traces, and baselines by their mean.

Notable:
- A branch's score is its outcome reward plus its step rewards. A trace counts once, with the mean of its branches'
  scores, so branching moves no baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.algorithms.credit import token_rewards
from services.wire.samples import TrainingSample

RELATIVE_SPREAD_FLOOR = 1e-9
"""Scores that differ by no more than this share of max(1, |mean|) are equal."""


def branch_scores(samples: Sequence[TrainingSample]) -> list[float]:
    """Outcome plus step rewards of each sample.

    Raises:
        NonFiniteError: a reward is not finite.
    """
    return [float(token_rewards(sample).sum()) for sample in samples]


def scores_of_traces(samples: Sequence[TrainingSample], scores: Sequence[float]) -> dict[str, float]:
    """Mean score of each trace's branches, traces in the order of their first branch."""
    scores_of: dict[str, list[float]] = {}
    for sample, score in zip(samples, scores, strict=True):
        scores_of.setdefault(sample.trace_id, []).append(score)
    return {trace_id: float(np.mean(of_branches)) for trace_id, of_branches in scores_of.items()}


def are_equal(scores: Sequence[float]) -> bool:
    """Do scores differ by rounding only; so do none at all."""
    return not scores or max(scores) - min(scores) <= spread_floor(float(np.mean(scores)))


def spread_floor(mean: float) -> float:
    """The largest difference that is still rounding, around a mean."""
    return RELATIVE_SPREAD_FLOOR * max(1.0, abs(mean))


def group_advantages(
    samples: Sequence[TrainingSample], scores: Sequence[float], *, std_normalize: bool = False
) -> list[float]:
    """Each branch's score against the mean over traces.

    Args:
        samples: One group's, or one batch's.
        scores: One per sample.
        std_normalize: Divide by the traces' population standard deviation where it is more than rounding.

    Returns:
        One advantage per sample; zeros where all scores are equal.
    """
    of_traces = np.array(list(scores_of_traces(samples, scores).values()))  # [traces]
    if are_equal(scores):
        return [0.0] * len(scores)
    mean, deviation = float(of_traces.mean()), float(of_traces.std())
    scale = deviation if std_normalize and deviation > spread_floor(mean) else 1.0
    return [(score - mean) / scale for score in scores]


def spread_over_actions(sample: TrainingSample, advantage: float) -> np.ndarray:
    """[T] f64: one number on all action tokens, 0 elsewhere."""
    return np.where(sample.branch.action_mask, advantage, 0.0)
