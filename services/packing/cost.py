"""What a packed sequence costs to train, from the sizes in a model's `config.json`: so many FLOPs.

    cost(T) = linear T + quadratic T^2

Legend: T tokens of a sequence, H hidden size, L layers, F width of the feed-forward part, V vocabulary.

Notable:
- A matrix costs 2 FLOPs an entry and token. A layer has four projections of attention and three of a gated feed-forward
  part; the policy has a head of H V besides, a critic's is too small to count.
- Attention is causal: scores and their sum of values are each 2 T^2 (heads x head size) / 2.
- These are FLOPs of a forward pass. A backward pass costs twice as many in both terms, and only ratios matter here.

Deviations: every layer counts as one of full attention, which is too much for windows and for linear attention, and a
layer of experts counts those that a token visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from services.config.model_path import model_sizes
from services.config.train import PackingConfig


@dataclass(frozen=True)
class FlopCost:
    """`cost(T)` of the module docstring, for one length or an array of lengths."""

    linear: float
    """FLOPs a token"""
    quadratic: float
    """FLOPs a pair of tokens"""

    @overload
    def __call__(self, length: float) -> float: ...
    @overload
    def __call__(self, length: np.ndarray) -> np.ndarray: ...
    def __call__(self, length: float | np.ndarray) -> float | np.ndarray:
        """FLOPs of one forward pass over sequences of `length` tokens."""
        return (self.linear + self.quadratic * length) * length


def flop_cost(
    hidden_size: int,
    num_layers: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int = 0,
) -> FlopCost:
    """Cost of one sequence from a model's sizes.

    Args:
        hidden_size: H.
        num_layers: L.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head.
        intermediate_size: F, of all experts together that one token visits.
        vocab_size: V of a language model's head; 0 without one.

    Returns:
        A function of the length.

    Raises:
        ValueError: a size below 1 (below 0 for the vocabulary).
    """
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    sizes |= {"head_dim": head_dim, "intermediate_size": intermediate_size, "vocab_size + 1": vocab_size + 1}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    attention = hidden_size * head_dim * 2 * (num_heads + num_kv_heads)  # queries and output, keys and values
    layer = attention + 3 * hidden_size * intermediate_size
    return FlopCost(
        linear=2.0 * (num_layers * layer + hidden_size * vocab_size),
        quadratic=2.0 * num_layers * num_heads * head_dim,
    )


def cost_of_role(packing: PackingConfig, model_dir: Path, *, has_vocabulary: bool) -> FlopCost | None:
    """What a role's data ranks are balanced by; None: tokens.

    Args:
        packing: `[policy.packing]` or `[value.packing]`.
        model_dir: Folder with the model's `config.json`; read for "flops" only.
        has_vocabulary: Whether the role computes a distribution over the vocabulary for every token.

    Raises:
        ConfigError: the file does not say a size that is needed.
    """
    if packing.balance == "tokens":
        return None
    sizes = model_sizes(model_dir)
    return flop_cost(**(sizes if has_vocabulary else sizes | {"vocab_size": 0}))
