"""Generalized advantage estimation over action tokens only, for one branch at a time.

Paper: arXiv 1506.02438 (GAE); arXiv 2607.07508, eq. 4-5 (skip-observation) and its length-adaptive lambda.

Legend: T tokens of a branch, n action tokens among them.

Notable:
- The branch is compressed to its action tokens first, so an observation of any length costs one factor gamma * lam,
  and nothing off the action mask is ever read: noise or NaN there changes no bit.
- Returns are computed by the lambda-return recursion rather than as A + V: with lam = 1 they then do not depend on
  the values at all, not even by rounding.
- f64, and aligned from the branch's end: the result of a branch is the same in any order and in any company, and what
  precedes a token changes no bit of its advantage.
- A long branch is cut into runs of BLOCK action tokens that are computed side by side, then joined by what each run
  hands to the one before it; at most BLOCK tokens take a plain loop. Both do the same operations in the same order
  within a run, and differ from the plain loop over all tokens by rounding (1e-14).

Deviations: none.
"""

from __future__ import annotations

import math
import threading

import numpy as np

_KEPT = threading.local()
BLOCK = 24
"""Action tokens of a run: few numpy calls a level, few levels (measured; from 16 to 40 makes no difference)."""


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
    mask = np.asarray(action_mask).astype(bool, copy=False)
    values = np.asarray(values, dtype=np.float64)
    rewards = np.asarray(rewards, dtype=np.float64)
    for name, array in (("values", values), ("rewards", rewards)):
        if mask.ndim != 1 or array.shape != mask.shape:
            raise ValueError(f"{name} has shape {array.shape}, action_mask has {mask.shape}; both must be [T]")
    num_actions = int(np.count_nonzero(mask))
    values_n, rewards_n, errors, blends = scratch = _scratch(num_actions)  # [n] each
    for name, array, compressed in (("values", values, values_n), ("rewards", rewards, rewards_n)):
        compressed[:] = array if num_actions == len(mask) else array[mask]
        if num_actions and not (math.isfinite(compressed.min()) and math.isfinite(compressed.max())):  # NaN is both
            raise ValueError(f"{name} holds a non-finite number on an action token")
    if np.count_nonzero(rewards) != np.count_nonzero(rewards_n):  # NaN counts as nonzero
        raise ValueError("rewards holds a reward off the action mask")

    advantages = np.zeros(len(mask))  # [T]
    returns = np.zeros(len(mask))  # [T]
    if num_actions:
        np.multiply(values_n[1:], gamma, out=errors[:-1])
        errors[-1] = gamma * bootstrap_value
        errors += rewards_n
        errors -= values_n
        np.multiply(values_n[1:], 1.0 - lam, out=blends[:-1])
        blends[:-1] *= gamma
        blends[-1] = gamma * bootstrap_value  # all of it: (1 - lam) B + lam B need not round to B
        blends += rewards_n
        _discount_in_place(scratch[2:], gamma * lam)
        advantages[mask], returns[mask] = errors, blends
    return advantages, returns


def _discount_in_place(terms: np.ndarray, decay: float) -> None:
    """Replace each entry by the sum from it to the end, later entries discounted: y_k = x_k + decay y_{k+1}.

    Args:
        terms: [R, n] f64, rows contiguous; changed. An entry's bits depend on nothing before it, nor on other rows.
        decay: Factor per entry, in [0, 1].
    """
    num_rows, length = terms.shape
    if length <= BLOCK:
        _sequential(terms, decay, [0.0] * num_rows)
        return
    num_runs, head = divmod(length, BLOCK)
    runs = terms[:, head:].reshape(num_rows, num_runs, BLOCK)  # a view, aligned at the end
    powers = np.array([decay**k for k in range(BLOCK)])  # [BLOCK]
    # The first entry of each run, were it the last run; then with all later runs: the same recursion over runs.
    totals = np.einsum("srk,k->sr", runs, powers)  # not `@`: its rounding depends on how many runs there are
    _discount_in_place(totals, decay**BLOCK)
    carried = np.zeros((num_rows, num_runs))  # what each run takes from the later ones
    carried[:, :-1] = totals[:, 1:]
    for k in range(BLOCK - 1, -1, -1):
        np.multiply(carried, decay, out=carried)
        carried += runs[:, :, k]
        runs[:, :, k] = carried
    _sequential(terms[:, :head], decay, totals[:, 0].tolist())


def _sequential(terms: np.ndarray, decay: float, carried: list[float]) -> None:
    """`_discount_in_place` of few entries, in plain floats: a numpy call a token would cost ten times as much."""
    for row, total in zip(terms, carried, strict=True):
        sums: list[float] = []
        for term in reversed(row.tolist()):
            total = term + decay * total
            sums.append(total)
        row[:] = sums[::-1]


def _scratch(length: int) -> np.ndarray:
    """[4, length] f64 whose contents are anybody's, good until the thread's next call.

    Megabytes that are fresh from the system cost several times the arithmetic done in them.
    """
    kept: np.ndarray = getattr(_KEPT, "buffer", np.empty(0))
    if len(kept) < 4 * length:
        kept = _KEPT.buffer = np.empty(4 * length)
    return kept[: 4 * length].reshape(4, length)


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
