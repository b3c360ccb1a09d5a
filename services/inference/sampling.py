"""Draw one token per row, reproducibly: a draw depends on its request's seed and position, never on its neighbours.

Legend: N rows of a step, V vocabulary.

Notable:
- One uniform number per (seed, position) from a counter-based generator (splitmix64's finaliser, twice), so no state is
  kept per request and a continued request draws what it would have drawn.
- The log-probability returned is that of the distribution the token was drawn from: softmax(logits / temperature) in
  f32. Temperature 0 is greedy and reports the distribution at temperature 1.
- A row with a non-finite logit yields token 0 with log-probability NaN: the caller's admission drops it, nothing hides.
"""

from __future__ import annotations

import numpy as np
import torch


def counter_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), a pure function of each (seed, position).

    Args:
        seeds: [N] u64
        positions: [N] u64, the index in its sequence of the token to draw.

    Returns:
        [N] f64 with 53 random bits.
    """
    mixed = _mix(seeds) ^ (positions * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03))
    return (_mix(_mix(mixed)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits: torch.Tensor, temperatures: np.ndarray, seeds: np.ndarray, positions: np.ndarray
) -> tuple[list[int], list[float]]:
    """Sample a token per row by inverting the cumulative distribution at the row's uniform number.

    Args:
        logits: [N, V]
        temperatures: [N] f32; 0 = greedy.
        seeds: [N] u64
        positions: [N] u64

    Returns:
        Token ids and their log-probabilities, N each.
    """
    greedy = temperatures == 0
    divisor = np.where(greedy, np.float32(1), temperatures).astype(np.float32)
    scaled = logits.float() / torch.from_numpy(divisor).to(logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)  # [N, V]
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    uniform = torch.from_numpy(counter_uniforms(seeds, positions)).to(logits.device)[:, None]
    # Strictly below the total, and the first entry strictly above the target: a token of probability 0 is never drawn.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)  # [N, 1]
    if greedy.any():
        tokens = torch.where(
            torch.from_numpy(greedy).to(logits.device)[:, None], logits.argmax(-1, keepdim=True), tokens
        )
    # NaN anywhere in a row makes its total NaN.
    finite = torch.isfinite(total)
    tokens = torch.where(finite, tokens, 0)
    chosen = torch.where(finite, logprobs.gather(1, tokens), torch.nan)
    return tokens[:, 0].tolist(), chosen[:, 0].tolist()
