"""One policy step: one optimizer update per mini-batch of a grid, by the loss that the header names.

Notable:
- Log-probabilities are taken at the header's sampling temperature, in f32, at the loss tokens only.
- The ratio is against the rollout's log-probabilities; there is no second forward of an old policy.
- `policy/mismatch_*` compares trainer and engine on tokens that the trained version itself sampled: at zero staleness
  the two must agree, and what remains is the numerical gap between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from policy_trainer.losses import LOSSES, summarize
from services.config.train import PolicyConfig
from services.model.attention import PackedLayout
from services.model.load import packed_logits
from services.model.snapshot import save_snapshot
from services.training.board import StatusBoard
from services.training.optimizer import Optimizer, add_sums
from services.training.ranks import Ranks
from services.wire.errors import ContractError
from services.wire.grids import GridItem, MicroBatch


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
        self._device = next(model.parameters()).device
        self._optimizer = Optimizer(model, config.optim, ranks, warmup_updates=config.warmup.lr_updates)

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
        grad_norm = 0.0
        for mini_batch, micro_batches in item.mini_batches():
            denominator = max(mini_batch.tokens, 1)
            result = self._optimizer.update(
                micro_batches,
                lambda micro_batch, d=denominator: self._loss_of(micro_batch, item, d),
                step=mini_batch.tokens > 0,
            )
            add_sums(sums, result.sums)
            tokens += mini_batch.tokens
            num_skipped += not result.applied and mini_batch.tokens > 0
            grad_norm = max(grad_norm, result.grad_norm)
        current = sums.get("current_tokens", 0.0)
        return summarize(sums) | {
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

    def _loss_of(
        self, micro_batch: MicroBatch, item: GridItem, denominator: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        if micro_batch.is_dummy:
            layout = PackedLayout.of([1], self._device)
            zero = torch.zeros(1, dtype=torch.long, device=self._device)
            return packed_logits(self._model, zero, layout, zero).sum() * 0.0, {}
        layout = PackedLayout.of(micro_batch.lengths.astype("int64").tolist(), self._device)
        arrays = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in micro_batch.arrays.items()}
        token_ids = arrays["token_ids"].long()
        mask = arrays["loss_mask"].bool()
        positions = mask.nonzero().flatten()  # [n]; never a first token, so position - 1 is its own sequence
        logits = packed_logits(self._model, token_ids, layout, positions - 1).float() / item.header.temperature
        logprobs_n = logits.log_softmax(-1)
        logprobs = logprobs_n.gather(1, token_ids[positions, None])[:, 0]
        rollout = arrays["logprobs"][positions]
        loss, metrics = LOSSES[item.header.loss_name](
            logprobs,
            rollout,
            arrays["advantages"][positions],
            torch.ones_like(logprobs, dtype=torch.bool),
            denominator=denominator,
            **item.header.loss_constants,
        )
        with torch.no_grad():
            current = self._sampled_by(item.header.policy_version, micro_batch, mask.numel())[positions]
            gap = (logprobs - rollout).abs()[current].double()
            own = {
                "entropy_sum": float(-(logprobs_n.exp() * logprobs_n).sum()),
                "current_tokens": float(current.sum()),
                "mismatch_sum": float(gap.sum()),
                "mismatch_max": float(gap.max()) if len(gap) else 0.0,
            }
        return loss, {name: float(value) for name, value in metrics.items()} | own

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
