"""Log-probabilities and entropies of chosen tokens, without the logits of a whole row in memory.

Legend: T tokens of a packed row, n chosen positions, D width of a hidden state, V vocabulary, C positions of a chunk.

Notable:
- With V = 150,000, the f32 logits of 16,384 positions are 10 GB, and their softmax as much again. Here C positions at
  a time go from hidden state to two numbers, and backward computes the chunk's logits again: nothing of `[n, V]` lives.
- What an architecture does after its output embedding (soft caps, scales) is done by its own forward: a shell of the
  model shares everything with it but the backbone, whose place is taken by the hidden states themselves.
- Whether that is the same number is found out, not assumed: `PolicyHead` compares both ways on a probe at its start,
  and where they differ, or the architecture will not have it, goes the plain way and says so in the log.
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

from services.model.attention import PackedLayout
from services.model.load import packed_hidden, packed_logits

CHUNK_ELEMENTS = 2**26
"""C x V of a chunk: 256 MiB in f32."""
PROBE_TOLERANCE = 1e-4
"""Relative to the largest logit; a missing soft cap or scale is orders of magnitude more."""


class PolicyHead:
    """From a packed row to log-probabilities and entropies at chosen positions, chunk by chunk."""

    def __init__(self, model: PreTrainedModel, *, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        """Probe the model.

        Args:
            model: A causal language model with packed attention; shared, never changed.
            chunk_elements: C x V.
        """
        self._model = model
        self._chunk_size = max(1, chunk_elements // model.config.vocab_size)
        self._shell = _shell_of(model)
        self.is_chunked = self._probe()

    def __call__(
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
            token_ids: [T].
            layout: The sequences of the row.
            positions: [n], none the first of its sequence.
            temperature: Divides the logits.
            entropy_gradient: Whether entropies carry a gradient.

        Returns:
            logprobs [n] with gradient, entropies [n] in nats.
        """
        targets = token_ids[positions]
        if not self.is_chunked:
            logits = packed_logits(self._model, token_ids, layout, positions - 1)
            return _from_logits(logits, targets, temperature, entropy_gradient)
        hidden = packed_hidden(self._model.base_model, token_ids, layout)[positions - 1]  # [n, D]
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

    def _of_hidden(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _from_logits(self._logits(hidden), targets, temperature, entropy_gradient)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[C, V]` of hidden states `[C, D]`, by the architecture's own forward."""
        return self._shell(inputs_embeds=hidden[None], use_cache=False).logits[0]

    @torch.no_grad()
    def _probe(self) -> bool:
        """Do hidden states and the shell give the model's logits."""
        model, device = self._model, next(self._model.parameters()).device
        token_ids = torch.arange(8, device=device) * 7 % model.config.vocab_size
        layout = PackedLayout.of([3, 5], device)
        positions = torch.arange(8, device=device)
        plain = packed_logits(model, token_ids, layout, positions)
        try:
            ours = self._logits(packed_hidden(model.base_model, token_ids, layout))
        except Exception as error:  # foreign code, given what it may not expect: the plain way always works
            logger.warning("{} computes no logits from hidden states: {!r}", type(model).__name__, error)
            return False
        gap = float((ours.float() - plain.float()).abs().max()) / max(float(plain.float().abs().max()), 1e-30)
        if not gap <= PROBE_TOLERANCE:
            logger.warning("{}: logits from hidden states differ by {:.1e}; not chunked", type(model).__name__, gap)
        return gap <= PROBE_TOLERANCE


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
    return logprobs_nV.gather(1, targets[:, None])[:, 0], entropies
