"""Log-probabilities and entropies of chosen tokens, without the logits of a whole row in memory.

Legend: T tokens of a packed row, n chosen positions, D width of a hidden state, V vocabulary, C positions of a chunk.

Notable:
- With V = 150,000, the f32 logits of 16,384 positions are 10 GB, and their softmax as much again. Here C positions at
  a time go from hidden state to two numbers, and backward computes the chunk's logits again: nothing of `[n, V]` lives.
- What an architecture does after its output embedding (soft caps, scales) is done by its own forward: a shell of the
  model shares everything with it but the backbone, whose place is taken by the hidden states themselves.
- Whether that is the same number is found out, not assumed: `probe` compares both ways at the start, and where they
  differ, or the architecture will not have it, the plain way is gone and the log says so.
- Numbers are f32 (f64 for a f64 model), whatever the backbone computes in.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from services.model.layout import PackedLayout
from services.model.load import own_hidden, packed_hidden, packed_logits

CHUNK_ELEMENTS = 2**26
"""C x V of a chunk: 256 MiB in f32."""
PROBE_TOLERANCE = 1e-4
"""Relative to the largest logit; a missing soft cap or scale is orders of magnitude more."""


class PolicyModel(nn.Module):
    """A causal language model as the policy trainer sees it: packed rows in, log-probabilities and entropies out."""

    def __init__(self, language_model: PreTrainedModel, *, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        """Take a model over; `probe` is still to be called, once it is in its layout.

        Args:
            language_model: With packed attention.
            chunk_elements: C x V.
        """
        super().__init__()
        self.language_model = language_model
        self.is_chunked = False
        self._chunk_size = max(1, chunk_elements // language_model.config.vocab_size)
        self._shell = [_shell_of(language_model)]  # in a list: it is no part of this module, only another view of it

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: PackedLayout,
        positions: torch.Tensor,
        *,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of the token at each position, and the entropy of the distribution it was drawn from.

        Args:
            token_ids: [T], the whole row on every context rank.
            layout: The sequences of the row.
            positions: [n], none the first of its sequence; this rank must hold the row before each.
            temperature: Divides the logits.
            entropy_gradient: Whether entropies carry a gradient.

        Returns:
            logprobs [n] with gradient, entropies [n] in nats.
        """
        targets, rows = token_ids[positions], positions - 1
        if not self.is_chunked:
            logits = packed_logits(self.language_model, token_ids, layout, rows)
            return _from_logits(logits, targets, temperature, entropy_gradient)
        hidden = packed_hidden(self.language_model.base_model, token_ids, layout)[rows - layout.first_local]  # [n, D]
        if len(positions) <= self._chunk_size:
            return self._of_hidden(hidden, targets, temperature, entropy_gradient)
        pieces = []
        for chunk, chunk_targets in zip(hidden.split(self._chunk_size), targets.split(self._chunk_size), strict=True):
            pieces.append(
                checkpoint(
                    self._of_hidden,
                    chunk,
                    chunk_targets,
                    temperature,
                    entropy_gradient,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def hidden(self, token_ids: torch.Tensor, layout: PackedLayout | None) -> torch.Tensor:
        """Final hidden states `[T / C, D]`; without a layout those of one sequence by the model's own attention."""
        backbone = self.language_model.base_model
        hidden = own_hidden(backbone, token_ids) if layout is None else packed_hidden(backbone, token_ids, layout)
        return hidden.clone()  # FSDP wants no view

    def both_logits(self, token_ids: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[T, V]` of an undivided row, the plain way and from hidden states; None where that is refused."""
        rows = torch.arange(len(token_ids), device=token_ids.device)
        plain = packed_logits(self.language_model, token_ids, layout, rows)
        hidden = packed_hidden(self.language_model.base_model, token_ids, layout)
        try:
            return plain, self._logits(hidden)
        except Exception as error:  # foreign code, given what it may not expect: the plain way always works
            logger.warning("{} computes no logits from hidden states: {!r}", type(self.language_model).__name__, error)
            return plain, None

    @torch.no_grad()
    def probe(self) -> None:
        """Go by hidden states where they give the model's logits; every rank calls it, outside of a forward."""
        device = next(self.parameters()).device
        token_ids = torch.arange(8, device=device) * 7 % self.language_model.config.vocab_size
        plain, ours = self.both_logits(token_ids, PackedLayout.of([3, 5], device))
        if ours is None:
            return
        gap = float((ours.float() - plain.float()).abs().max()) / max(float(plain.float().abs().max()), 1e-30)
        self.is_chunked = gap <= PROBE_TOLERANCE
        if not self.is_chunked:
            name = type(self.language_model).__name__
            logger.warning("{}: logits from hidden states differ by {:.1e}; not chunked", name, gap)

    def _of_hidden(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _from_logits(self._logits(hidden), targets, temperature, entropy_gradient)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V]` of hidden states `[n, D]`, by the architecture's own forward."""
        return self._shell[0](inputs_embeds=hidden[None], use_cache=False).logits[0]


class _Given(nn.Module):
    """Stands for a backbone: the final hidden states are those that come in."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)


class _GivenOutput:
    """A backbone's output that holds nothing but hidden states."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]


def _shell_of(model: PreTrainedModel) -> nn.Module:
    """The model around another backbone; every parameter and buffer outside of it is the model's own."""
    shell = copy.copy(model)
    shell._modules = dict(model._modules)
    shell._modules[model.base_model_prefix] = _Given()
    return shell


def _from_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    logprobs_nV = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(logprobs_nV.exp() * logprobs_nV).sum(-1)
    return logprobs_nV.gather(1, targets[:, None])[:, 0].clone(), entropies  # FSDP wants no view
