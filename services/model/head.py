"""The value head and the critic: a causal backbone whose hidden states become token values.

Notable:
- The head is `Linear(lm_head.in_features, K, bias)`, f32, zero at first. With K = 1 its output is the value, and a
  fresh critic says 0 everywhere.
- With K points the outputs are logits and V = softmax(z) . points: a fresh critic says the middle of the points. The
  points are part of the state that is saved, so a head is never read with another support.
- Whoever scores, credits or measures sees one f32 value a token, whatever K is; only the loss sees the logits.
- `values[t]` is the output at position t-1: the value of the state before token t. `values[0] = 0`.
- Values are never divided by the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model.layout import PackedLayout
from services.model.load import head_features, own_hidden, packed_hidden


class ValueHead(nn.Module):
    """Hidden state `[..., D]` to value `[...]`, in f32 whatever the backbone's type."""

    points: torch.Tensor | None

    def __init__(
        self, in_features: int, *, init_std: float, seed: int, points: Sequence[float] | torch.Tensor | None = None
    ) -> None:
        """Make a seeded head.

        Args:
            in_features: D, width of a hidden state.
            init_std: Standard deviation of the initial weight; 0 = all outputs start at 0.
            seed: Of the initial weight.
            points: [K] ascending, for a classification head; None for a scalar one.
        """
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        num_outputs = 1 if points is None else len(points)
        self.weight = nn.Parameter(torch.randn(num_outputs, in_features, generator=generator) * init_std)
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.register_buffer("points", None if points is None else torch.as_tensor(points, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Value of the state after each position, `[...]` f32."""
        return self.values_of(self.outputs(hidden))

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a loss is computed from: `[..., K]` f32."""
        return nn.functional.linear(hidden.float(), self.weight, self.bias)

    def values_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """From outputs `[..., K]` to values `[...]`; those of a classification head lie within its points."""
        if self.points is None:
            return outputs[..., 0].clone()  # FSDP wants no view
        values = outputs.softmax(-1) @ self.points
        return values.clamp(self.points[0], self.points[-1])  # a sum of probabilities may round to above 1


class Critic(nn.Module):
    """A causal backbone and a value head."""

    def __init__(
        self,
        language_model: PreTrainedModel,
        *,
        head_init_std: float,
        seed: int,
        points: Sequence[float] | torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone = language_model.base_model
        self.head = ValueHead(head_features(language_model), init_std=head_init_std, seed=seed, points=points)

    def forward(self, token_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Value after every position of this rank's stretch of a packed row `[T]`, `[T / C]` f32."""
        return self.head.values_of(self.head.outputs(packed_hidden(self.backbone, token_ids, layout)))

    def outputs(self, token_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Head outputs `[T / C, K]` f32 at every position of this rank's stretch of a packed row `[T]`."""
        return self.head.outputs(packed_hidden(self.backbone, token_ids, layout))

    def hidden(self, token_ids: torch.Tensor, layout: PackedLayout | None) -> torch.Tensor:
        """Final hidden states `[T / C, D]`; without a layout those of one sequence by the model's own attention."""
        backbone = self.backbone
        hidden = own_hidden(backbone, token_ids) if layout is None else packed_hidden(backbone, token_ids, layout)
        return hidden.clone()  # FSDP wants no view


def values_before_tokens(output: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift head outputs to states before tokens, sequence by sequence.

    Args:
        output: [T] head output at each position of a packed row; or [T, K].
        lengths: [S] tokens per sequence.

    Returns:
        values [T] (0 at each sequence's first token) and bootstrap values [S] (output at each last position); with K
        columns where the output has them.
    """
    ends = lengths.cumsum(0)
    values = torch.cat([torch.zeros_like(output[:1]), output[:-1]]) if len(output) else output
    return values.index_fill(0, ends - lengths, 0.0), output[ends - 1]
