"""GAE over steps instead of tokens: a step is a maximal run of action tokens, what the model says in one turn.

Paper: arXiv 2607.07508, appendix A.1 (step-level advantages).

Legend: T tokens of a branch, S steps.

Notable:
- A step's value is the mean of its tokens' values ("step_mean"), or the value at its last token ("step_last"). Its
  reward is the sum of its tokens' rewards. GAE runs over the steps, then each token takes its step's number.
- "step_last" trains the critic on the last token of each step only; "step_mean" on all tokens. The policy trains on
  all of them either way.

Deviations:
- The value at a token is that of the state before it, also for the last token: it does not know that token itself.
- Turns with nothing between them would be one step: the action mask cannot tell them apart.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from orchestrator.algorithms.gae import skip_observation_gae
from services.config.algorithm import Granularity


def num_transitions(action_mask: np.ndarray, granularity: Granularity) -> int:
    """Action tokens of a branch, or steps.

    Args:
        action_mask: [T] bool.
        granularity: What one transition is.
    """
    return int(action_mask.sum()) if granularity == "token" else len(step_starts(action_mask))


def step_starts(action_mask: np.ndarray) -> np.ndarray:
    """[S] positions of the first token of each step."""
    return np.flatnonzero(action_mask & ~np.concatenate([[False], action_mask[:-1]]))


def last_tokens(action_mask: np.ndarray) -> np.ndarray:
    """[T] bool, true at the last token of each step."""
    return action_mask & ~np.concatenate([action_mask[1:], [False]])


def step_gae(
    values: np.ndarray,
    action_mask: np.ndarray,
    rewards: np.ndarray,
    *,
    granularity: Granularity,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
    value_lambda: float | None = None,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and lambda-returns of one branch, each step one transition; tokens without a granularity.

    Args:
        values: [T] value of the state before each token.
        action_mask: [T] bool.
        rewards: [T], zero off the action mask.
        granularity: "token" is `skip_observation_gae` itself.
        gamma: Discount per transition.
        lam: GAE lambda per transition.
        bootstrap_value: Value of the state after the last token; 0 for a branch that terminated.
        value_lambda: Lambda of the returns; None: `lam`.
        out: [2, T] f64 to write advantages and returns to; None: a new array.

    Returns:
        (advantages [T], returns [T]), f64, zero off the action mask: the rows of `out`.

    Raises:
        ValueError: see `skip_observation_gae`.
    """
    gae = partial(
        skip_observation_gae, gamma=gamma, lam=lam, bootstrap_value=bootstrap_value, value_lambda=value_lambda
    )
    if granularity == "token":
        return gae(values, action_mask, rewards, out=out)
    starts = step_starts(action_mask)  # [S]
    ends = np.flatnonzero(last_tokens(action_mask))  # [S]
    step_of_token = np.repeat(np.arange(len(starts)), ends - starts + 1)  # [action tokens]

    def per_step(numbers: np.ndarray) -> np.ndarray:
        return np.bincount(step_of_token, weights=numbers[action_mask], minlength=len(starts))  # [S] sums

    step_values = values[ends] if granularity == "step_last" else per_step(values) / (ends - starts + 1)
    everywhere = np.ones(len(starts), dtype=bool)
    numbers = gae(step_values, everywhere, per_step(rewards))
    advantages, returns = out = np.empty((2, len(action_mask))) if out is None else out
    out.fill(0.0)
    advantages[action_mask], returns[action_mask] = (array[step_of_token] for array in numbers)
    return advantages, returns
