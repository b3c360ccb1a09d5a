"""The value head and the critic: a causal backbone whose hidden states become token values.

Notable:
- The head is `Linear(lm_head.in_features, 1, bias)`, f32, zero at first, so a fresh critic says 0 everywhere.
- `values[t]` is the output at position t-1: the value of the state before token t. `values[0] = 0`.
- Values are never divided by the sampling temperature.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model.attention import PackedLayout
from services.model.load import head_features, packed_hidden


class ValueHead(nn.Module):
    """Hidden state `[..., D]` to value `[...]`, in f32 whatever the backbone's type."""

    def __init__(self, in_features: int, *, init_std: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(1, in_features, generator=generator) * init_std)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Value of the state after each position, `[...]` f32."""
        return nn.functional.linear(hidden.float(), self.weight, self.bias)[..., 0]


class Critic(nn.Module):
    """A causal backbone and a value head."""

    def __init__(self, language_model: PreTrainedModel, *, head_init_std: float, seed: int) -> None:
        super().__init__()
        self.backbone = language_model.base_model
        self.head = ValueHead(head_features(language_model), init_std=head_init_std, seed=seed)

    def forward(self, token_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Head output `[T]` f32 at every position of a packed row `[T]`."""
        return self.head(packed_hidden(self.backbone, token_ids, layout))


def values_before_tokens(output: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift head outputs to states before tokens, sequence by sequence.

    Args:
        output: [T] head output at each position of a packed row.
        lengths: [S] tokens per sequence.

    Returns:
        values [T] (0 at each sequence's first token) and bootstrap values [S] (output at each last position).
    """
    ends = lengths.cumsum(0)
    values = torch.cat([output.new_zeros(1), output[:-1]]) if len(output) else output
    first = ends - lengths
    keep = torch.ones_like(values)
    keep[first] = 0
    return values * keep, output[ends - 1]
