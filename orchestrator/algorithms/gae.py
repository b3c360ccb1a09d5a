"""Generalized advantage estimation over action tokens only, for one branch at a time.

Paper: arXiv 1506.02438 (GAE); arXiv 2607.07508, eq. 4-5 (skip-observation) and its length-adaptive lambda.

Legend: T tokens of a branch, n action tokens among them.

Notable:
- The branch is compressed to its action tokens first, so an observation of any length costs one factor gamma * lam,
  and nothing off the action mask is ever read: noise or NaN there changes no bit.
- Returns are computed by the lambda-return recursion rather than as A + V: with lam = 1 they then do not depend on
  the values at all, not even by rounding.
- f64 and strictly sequential: the result of a branch is the same in any order and in any company.

Deviations: none.
"""

from __future__ import annotations

import math

import numpy as np


def skip_observation_gae(
    values: np.ndarray,
    action_mask: np.ndarray,
    rewards: np.ndarray,
    *,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and lambda-returns of one branch.

    With action positions t_1 < .. < t_n, V_{n+1} = bootstrap_value and A_{n+1} = 0, going down from k = n:

        A_k = r_k + gamma V_{k+1} - V_k + gamma lam A_{k+1}
        G_k = r_k + gamma ((1 - lam) V_{k+1} + lam G_{k+1}),    equal to A_k + V_k

    Args:
        values: [T] value of the state before each token.
        action_mask: [T] true where the model sampled the token; the first entry may be true.
        rewards: [T], zero off the action mask.
        gamma: Discount per action token, in [0, 1].
        lam: GAE lambda per action token, in [0, 1].
        bootstrap_value: Value of the state after the last token; 0 for a branch that terminated.

    Returns:
        (advantages [T], returns [T]), f64, zero off the action mask.

    Raises:
        ValueError: naming the field: gamma or lam outside [0, 1], a non-finite value or reward on the action mask, a
            reward off it, a non-finite bootstrap value, lengths that differ.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {number}")
    if not math.isfinite(bootstrap_value):
        raise ValueError(f"bootstrap_value must be finite, got {bootstrap_value}")
    mask = np.asarray(action_mask).astype(bool)
    values = np.asarray(values, dtype=np.float64)
    rewards = np.asarray(rewards, dtype=np.float64)
    for name, array in (("values", values), ("rewards", rewards)):
        if mask.ndim != 1 or array.shape != mask.shape:
            raise ValueError(f"{name} has shape {array.shape}, action_mask has {mask.shape}; both must be [T]")
        if not np.isfinite(array[mask]).all():
            raise ValueError(f"{name} holds a non-finite number on an action token")
    if (rewards[~mask] != 0).any():
        raise ValueError("rewards holds a reward off the action mask")

    # Plain Python floats: a numpy scalar operation costs ten times as much, and this loop is the whole work.
    advantages_n: list[float] = []
    returns_n: list[float] = []
    next_value = float(bootstrap_value)
    # (1 - lam) V_{k+1} + lam G_{k+1}; both are B at k = n, and (1 - lam) B + lam B need not round to B.
    next_blend = next_value
    advantage = 0.0
    decay, complement = gamma * lam, 1.0 - lam
    for value, reward in zip(reversed(values[mask].tolist()), reversed(rewards[mask].tolist()), strict=True):
        advantage = reward + gamma * next_value - value + decay * advantage
        lambda_return = reward + gamma * next_blend
        advantages_n.append(advantage)
        returns_n.append(lambda_return)
        next_blend = complement * value + lam * lambda_return
        next_value = value

    advantages = np.zeros(len(mask))  # [T]
    returns = np.zeros(len(mask))  # [T]
    advantages[mask] = advantages_n[::-1]
    returns[mask] = returns_n[::-1]
    return advantages, returns


def length_adaptive_lambda(num_action_tokens: int, alpha: float) -> float:
    """Lambda that gives the terminal error about the same weight at the first token of any length.

    `max(0, 1 - 1 / (alpha n))`: the weight lambda^(n-1) tends to e^(-1/alpha).

    Args:
        num_action_tokens: n, the action tokens of the branch; observations do not count.
        alpha: Positive and finite; 1.5 in the paper.

    Returns:
        Lambda in [0, 1); 0 for n = 0.

    Raises:
        ValueError: alpha not positive and finite, or n negative.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    if num_action_tokens < 0:
        raise ValueError(f"num_action_tokens must not be negative, got {num_action_tokens}")
    if num_action_tokens == 0:
        return 0.0
    return max(0.0, 1.0 - 1.0 / (alpha * num_action_tokens))
