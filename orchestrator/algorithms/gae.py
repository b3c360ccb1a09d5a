"""Generalized advantage estimation over action tokens only, for one branch at a time.

Paper: arXiv 1506.02438 (GAE); arXiv 2607.07508, eq. 4-5 (skip-observation) and its length-adaptive lambda.

Legend: T tokens of a branch, n action tokens among them.

Notable:
- The branch is compressed to its action tokens first, so an observation of any length costs one factor gamma * lam,
  and nothing off the action mask is ever read: noise or NaN there changes no bit.
- What is computed are lambda-returns, and advantages as A = G - V: with lambda 1 returns then do not depend on the
  values at all, not even by rounding.
- f64, and counted from the branch's end: the result of a branch is the same in any order and in any company, and what
  precedes a token changes no bit of its advantage.
- The recursion is one running sum over powers of the decay (see `_discount_in_place`), without a Python loop over
  tokens. How it is cut into pieces changes no bit; it differs from the plain loop by rounding (1e-14).

Deviations: none.
"""

from __future__ import annotations

import math

import numpy as np

CHUNK = 8192
"""Tokens of a piece, so that its arrays stay in the processor's cache."""
RANGE_BITS = 256
"""Powers of the decay within a piece go down to about 2^-RANGE_BITS, far from the end of f64's range at 2^-1022."""
LEAST_DECAY = 2.0**-4
"""Below it pieces get so short that the plain loop is as fast."""
ROW = 64
"""Powers that are computed one by one; the others are products of two."""


def skip_observation_gae(
    values: np.ndarray,
    action_mask: np.ndarray,
    rewards: np.ndarray,
    *,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
    value_lambda: float | None = None,
    out: np.ndarray | None = None,
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
        value_lambda: Lambda of the returns, in [0, 1]; None: `lam`.
        out: [2, T] f64 to write advantages and returns to; None: a new array.

    Returns:
        (advantages [T], returns [T]), f64, zero off the action mask: the rows of `out`.

    Raises:
        ValueError: naming the field: a factor outside [0, 1], a non-finite value or reward on the action mask, a
            reward off it, a non-finite bootstrap value, lengths that differ.
    """
    value_lambda = lam if value_lambda is None else value_lambda
    for name, number in (("gamma", gamma), ("lam", lam), ("value_lambda", value_lambda)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {number}")
    if not math.isfinite(bootstrap_value):
        raise ValueError(f"bootstrap_value must be finite, got {bootstrap_value}")
    mask = np.asarray(action_mask).astype(bool, copy=False)
    values_n, rewards_n = _action_tokens(values, rewards, mask)
    advantages, returns = np.empty((2, len(mask))) if out is None else out
    returns_n = _lambda_returns(values_n, rewards_n, gamma, value_lambda, bootstrap_value)
    returns.fill(0.0)
    returns[mask] = returns_n
    if lam != value_lambda:
        returns_n = _lambda_returns(values_n, rewards_n, gamma, lam, bootstrap_value)
    advantages.fill(0.0)
    advantages[mask] = np.subtract(returns_n, values_n, out=returns_n)
    return advantages, returns


def _action_tokens(values: np.ndarray, rewards: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of values and rewards on the action tokens, [n] each, or a ValueError that names what is wrong."""
    compressed: list[np.ndarray] = []
    rewards = np.asarray(rewards, dtype=np.float64)
    for name, array in (("values", np.asarray(values, dtype=np.float64)), ("rewards", rewards)):
        if mask.ndim != 1 or array.shape != mask.shape:
            raise ValueError(f"{name} has shape {array.shape}, action_mask has {mask.shape}; both must be [T]")
        compressed.append(array[mask])
        if not np.isfinite(compressed[-1]).all():
            raise ValueError(f"{name} holds a non-finite number on an action token")
    if np.count_nonzero(rewards != 0) != np.count_nonzero(compressed[1] != 0):  # three times as fast as without `!=`
        raise ValueError("rewards holds a reward off the action mask")
    return compressed[0], compressed[1]


def _lambda_returns(
    values_n: np.ndarray, rewards_n: np.ndarray, gamma: float, lam: float, bootstrap_value: float
) -> np.ndarray:
    """[n] G_k of `skip_observation_gae`, a new array."""
    returns_n = np.empty(len(values_n))
    if len(returns_n):
        np.multiply(values_n[1:], gamma * (1.0 - lam), out=returns_n[:-1])
        returns_n[-1] = gamma * bootstrap_value  # all of it: (1 - lam) B + lam B need not round to B
        returns_n += rewards_n
        _discount_in_place(returns_n, gamma * lam)
    return returns_n


def _discount_in_place(terms: np.ndarray, decay: float) -> None:
    """Replace each entry by the sum from it to the end, later entries discounted: y_k = x_k + decay y_{k+1}.

    Counted from the end, y_i = d^i S_i, and S_i = S_{i-1} + x_i / d^i is a running sum. Before d^i leaves f64's range,
    it and S_i are scaled by a power of two, which rounds nothing: the pieces change no bit (of numbers above 1e-290).
    d^i itself is h_a d^b with i = ROW a + b and h_a = h_{a-1} d^ROW: the same bits wherever a piece begins.

    Args:
        terms: [n] f64, contiguous; changed.
        decay: Factor per entry, in [0, 1].
    """
    if decay < LEAST_DECAY:
        _sequential(terms, decay)
        return
    if decay == 1.0:
        np.add.accumulate(terms[::-1], out=terms[::-1])
        return
    size = min(CHUNK, int(RANGE_BITS / -math.log2(decay)))
    powers = decay ** np.arange(ROW - 1.0, -1.0, -1.0)  # [ROW] as all that follows in the order of the tokens
    first, carried = 1.0, 0.0  # h of the piece's first row, and S before it, both scaled alike
    for done in range(0, len(terms), size):
        piece = terms[max(len(terms) - done - size, 0) : len(terms) - done]
        skipped = done % ROW
        rows = np.full((skipped + len(piece)) // ROW + 1, decay**ROW)  # h by row, that of the next piece last
        rows[0] = first
        np.multiply.accumulate(rows, out=rows)
        weights = np.dot(rows[::-1, None], powers[None]).reshape(-1)  # twice as fast as `outer`, and sums nothing
        weights = weights[len(weights) - skipped - len(piece) : len(weights) - skipped]
        piece /= weights
        piece[-1] += carried
        np.add.accumulate(piece[::-1], out=piece[::-1])
        first, exponent = math.frexp(rows[-1])
        carried = math.ldexp(piece[0], exponent)
        piece *= weights


def _sequential(terms: np.ndarray, decay: float) -> None:
    """`_discount_in_place` in plain floats."""
    total = 0.0
    sums: list[float] = []
    for term in reversed(terms.tolist()):
        total = term + decay * total
        sums.append(total)
    terms[:] = sums[::-1]


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
