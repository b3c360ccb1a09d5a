"""One policy step: one optimizer update per mini-batch of a grid, by the loss that the header names.

Notable:
- Log-probabilities are taken at the header's sampling temperature, in f32, at the loss tokens only, in chunks.
- The ratio is against the rollout's log-probabilities, or against those of one forward before the grid's first update
  (`policy.old_logprobs`): a choice, never a fallback.
- What a loss sum is divided by is in the header. KL and entropy terms take the same weights and the same divisor.
- The reference policy is a frozen copy of the model this object is given, the run's first, and exists only where
  `policy.kl.coef` is above 0.
- `policy/mismatch_*` compares trainer and engine on tokens that the trained version itself sampled: at zero staleness
  the two must agree, and what remains is the numerical gap between them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from policy_trainer.losses import LOSSES, entropy_loss, kl_loss, summarize
from policy_trainer.losses.common import sample_weights
from services.config.train import PolicyConfig
from services.model.attention import PackedLayout
from services.model.logprobs import PolicyHead
from services.model.snapshot import save_snapshot
from services.training.board import StatusBoard
from services.training.optimizer import Optimizer, add_sums
from services.training.ranks import Ranks
from services.wire.errors import ContractError
from services.wire.grids import GridItem, MicroBatch


@dataclass
class _Row:
    """A micro-batch on the device; a dummy is two tokens of which nothing counts."""

    arrays: dict[str, torch.Tensor]
    """[T] each"""
    layout: PackedLayout
    positions: torch.Tensor
    """[n] loss tokens; never a first token, so the position before is its own sequence's"""
    owner: torch.Tensor
    """[n] sample of each"""

    @staticmethod
    def of(micro_batch: MicroBatch, device: torch.device) -> _Row:
        if micro_batch.is_dummy:
            zero, one = torch.zeros(2, dtype=torch.long, device=device), torch.ones(1, dtype=torch.long, device=device)
            return _Row({"token_ids": zero}, PackedLayout.of([2], device), one, zero[:1])
        lengths = torch.from_numpy(micro_batch.lengths.astype("int64"))
        arrays = {name: torch.from_numpy(array.copy()).to(device) for name, array in micro_batch.arrays.items()}
        arrays["token_ids"] = arrays["token_ids"].long()
        positions = arrays["loss_mask"].nonzero().flatten()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
        return _Row(arrays, PackedLayout.of(lengths.tolist(), device), positions, owner[positions])


class PolicyTrainer:
    """The policy's trainer, on every rank."""

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        board: StatusBoard,
        config: PolicyConfig,
        *,
        weights_dir: Path,
        tokenizer_from: Path,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._board = board
        self._weights_dir = weights_dir
        self._tokenizer_from = tokenizer_from
        self._config = config
        self._device = next(model.parameters()).device
        self._head = PolicyHead(model)
        self._reference = None
        if config.kl.coef > 0:
            self._reference = PolicyHead(copy.deepcopy(model).requires_grad_(False))
        self._optimizer = Optimizer(model, config.optim, ranks, warmup_updates=config.warmup.lr_updates)
        self._updates_before = 0

    @property
    def optimizer(self) -> Optimizer:
        """Counts this role's own updates."""
        return self._optimizer

    def train(self, item: GridItem) -> dict[str, Any]:
        """Apply one policy grid; returns its metrics row.

        Raises:
            ContractError: when the header names a loss that does not exist.
        """
        if item.header.loss_name not in LOSSES:
            raise ContractError(f"unknown policy loss {item.header.loss_name!r}; known: {', '.join(sorted(LOSSES))}")
        sums: dict[str, float] = {}
        tokens = num_skipped = 0
        divisors = grad_norm = 0.0
        self._updates_before = self._optimizer.num_updates
        mini_batches = list(item.mini_batches())
        old_logprobs = self._old_logprobs(item, [row for _, rows in mini_batches for row in rows])
        for mini_batch, micro_batches in mini_batches:
            divisor = item.header.divisor(mini_batch)
            result = self._optimizer.update(  # it asks for the loss of each micro-batch once, in order
                micro_batches,
                lambda micro_batch, d=divisor: self._loss_of(micro_batch, item, d, next(old_logprobs)),
                step=mini_batch.tokens > 0,
            )
            add_sums(sums, result.sums)
            tokens += mini_batch.tokens
            divisors += divisor
            num_skipped += not result.applied and mini_batch.tokens > 0
            grad_norm = max(grad_norm, result.grad_norm)
        current = sums.get("current_tokens", 0.0)
        return summarize(sums | {"denominator": divisors}) | {
            "policy/entropy": sums.get("entropy_sum", 0.0) / max(tokens, 1),
            "policy/grad_norm": grad_norm,
            "policy/lr": self._optimizer.lr,
            "policy/nonfinite": num_skipped,
            "policy/empty_batch": int(tokens == 0),
            "policy/mismatch_tokens": current,
            "policy/mismatch_mean": sums.get("mismatch_sum", 0.0) / max(current, 1.0),
            "policy/mismatch_max": sums.get("mismatch_max", 0.0),
        }

    def after_step(self, step: int) -> None:
        """Publish version step + 1 (rank 0)."""
        if self._ranks.rank == 0:
            path = save_snapshot(self._model, self._weights_dir, step + 1, tokenizer_from=self._tokenizer_from)
            self._board.progress(published={"version": step + 1, "path": str(path)})

    def _old_logprobs(self, item: GridItem, micro_batches: list[MicroBatch]) -> Iterator[torch.Tensor | None]:
        """Log-probabilities [n] of each micro-batch before the first update; None where the rollout's own are taken."""
        old: list[torch.Tensor | None] = [None] * len(micro_batches)
        if self._config.old_logprobs == "recomputed":
            with torch.no_grad():
                old = [self._forward(self._head, _Row.of(m, self._device), item)[0] for m in micro_batches]
        return iter(old)

    def _forward(
        self, head: PolicyHead, row: _Row, item: GridItem, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [n] at the row's loss tokens."""
        return head(
            row.arrays["token_ids"],
            row.layout,
            row.positions,
            temperature=item.header.temperature,
            entropy_gradient=entropy_gradient,
        )

    def _loss_of(
        self, micro_batch: MicroBatch, item: GridItem, divisor: float, old: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        row = _Row.of(micro_batch, self._device)
        has_bonus = self._config.entropy_coef > 0
        logprobs, entropies = self._forward(self._head, row, item, entropy_gradient=has_bonus)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._forward(self._reference, row, item)
        if micro_batch.is_dummy:
            return logprobs.sum() * 0.0, {}
        rollout, advantages = (row.arrays[name][row.positions] for name in ("logprobs", "advantages"))
        everywhere = torch.ones_like(logprobs, dtype=torch.bool)
        weights = None
        if item.header.denominator == "sequence_mean":
            weights = sample_weights(row.owner, len(micro_batch.lengths))
        loss, sums = LOSSES[item.header.loss_name](
            logprobs,
            rollout if old is None else old,
            advantages,
            everywhere,
            denominator=divisor,
            weights=weights,
            **item.header.loss_constants,
        )
        bonus, more = entropy_loss(entropies, everywhere, denominator=divisor, weights=weights)
        sums |= more
        if has_bonus:
            loss = loss + self._config.entropy_coef * bonus
        if reference is not None:
            kl = self._config.kl
            penalty, more = kl_loss(
                logprobs,
                reference,
                rollout,
                everywhere,
                kind=kl.type,
                unbiased=kl.unbiased,
                denominator=divisor,
                weights=weights,
            )
            loss, sums = loss + kl.coef * penalty, sums | more
        if old is not None:  # the loss saw another ratio than that to the rollout
            sums["kl_rollout_sum"] = (rollout - logprobs.detach()).double().sum()
        own = {name: float(value) for name, value in sums.items()}
        return loss, own | self._mismatch(micro_batch, item, row, (logprobs.detach() - rollout).abs().double())

    def _mismatch(self, micro_batch: MicroBatch, item: GridItem, row: _Row, gap: torch.Tensor) -> dict[str, float]:
        """Sums over the loss tokens that the version in training sampled itself, of |trainer - engine| `gap [n]`."""
        if self._optimizer.num_updates > self._updates_before:
            return {}  # an earlier mini-batch has moved the weights: they are no longer those that sampled
        current = self._sampled_by(item.header.policy_version, micro_batch, row.layout.num_tokens)[row.positions]
        gap = gap[current]
        return {
            "current_tokens": float(current.sum()),
            "mismatch_sum": float(gap.sum()),
            "mismatch_max": float(gap.max()) if len(gap) else 0.0,
        }

    def _sampled_by(self, version: int, micro_batch: MicroBatch, num_tokens: int) -> torch.Tensor:
        """[T] bool: tokens that policy `version` sampled."""
        own = torch.zeros(num_tokens, dtype=torch.bool, device=self._device)
        start = 0
        for length, spans in zip(micro_batch.lengths.tolist(), micro_batch.spans, strict=True):
            for first, end, span_version in spans:
                if span_version == version:
                    own[start + first : start + end] = True
            start += length
        return own
