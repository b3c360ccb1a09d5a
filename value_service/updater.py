"""One critic step: K optimizer updates on one grid, targets fixed.

Notable:
- The targets are the grid's; nothing recomputes them between the K updates.
- `value/explained_variance` and `value/loss` are those of the first update's forward (pre-update values), pooled over
  all ranks by f64 moments; `..._at_scoring` uses the values that fed the advantages.
- A batch without a loss token takes no optimizer step, and every rank still joins every collective.
"""

from __future__ import annotations

from typing import Any

import torch

from services.config.train import ValueConfig
from services.model.attention import PackedLayout
from services.model.head import Critic, values_before_tokens
from services.training.optimizer import Optimizer, UpdateResult
from services.training.ranks import Ranks
from services.wire.errors import ContractError
from services.wire.grids import GridItem, MicroBatch, MiniBatch
from value_service.losses import LOSSES, FitMoments, summarize


class Updater:
    """The critic's trainer, on every rank."""

    def __init__(self, critic: Critic, ranks: Ranks, config: ValueConfig) -> None:
        self._critic = critic
        self._ranks = ranks
        self._config = config
        self._optimizer = Optimizer(critic, config.optim, ranks, warmup_updates=config.warmup.lr_updates)
        self._device = critic.head.weight.device

    @property
    def optimizer(self) -> Optimizer:
        """Counts this role's own updates."""
        return self._optimizer

    def train(self, item: GridItem) -> dict[str, Any]:
        """Apply one critic grid; returns its metrics row."""
        if item.header.loss_name not in LOSSES:
            raise ContractError(f"unknown value loss {item.header.loss_name!r}")
        self._loss = LOSSES[item.header.loss_name]
        row: dict[str, Any] = {}
        num_skipped = 0
        for update in range(self._config.updates_per_batch):
            for number, (mini_batch, micro_batches) in enumerate(item.mini_batches()):
                first = update == 0 and number == 0
                self._fit = self._fit_at_scoring = FitMoments()
                result = self._update(mini_batch, micro_batches)
                num_skipped += not result.applied
                if first:
                    row = self._first_row(mini_batch, result)
        row["value/updates"] = self._optimizer.num_updates
        row["value/lr"] = self._optimizer.lr
        row["value/nonfinite"] = 0 if row["value/empty_batch"] else num_skipped
        return row

    def after_step(self, step: int) -> None:
        """Nothing to publish."""

    def _update(self, mini_batch: MiniBatch, micro_batches: list[MicroBatch]) -> UpdateResult:
        denominator = max(mini_batch.tokens, 1)

        def loss_function(micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
            if micro_batch.is_dummy:
                output = self._critic(
                    torch.zeros(1, dtype=torch.long, device=self._device), PackedLayout.of([1], self._device)
                )
                return output.sum() * 0.0, {}
            return self._loss_of(micro_batch, denominator)

        return self._optimizer.update(micro_batches, loss_function, step=mini_batch.tokens > 0)

    def _loss_of(self, micro_batch: MicroBatch, denominator: int) -> tuple[torch.Tensor, dict[str, float]]:
        lengths = micro_batch.lengths.astype("int64")
        layout = PackedLayout.of(lengths.tolist(), self._device)
        arrays = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in micro_batch.arrays.items()}
        output = self._critic(arrays["token_ids"].long(), layout)
        values, _ = values_before_tokens(output, torch.from_numpy(lengths).to(self._device))
        mask = arrays["loss_mask"].bool()
        loss, sums = self._loss(values, arrays["returns"], mask, denominator=denominator)
        returns, own, old = (x.detach()[mask] for x in (arrays["returns"], values, arrays["old_values"]))
        if bool(torch.isfinite(own).all()):  # else the vote refuses the update
            self._fit = self._fit.merge(FitMoments.of(returns, own))
        self._fit_at_scoring = self._fit_at_scoring.merge(FitMoments.of(returns, old))
        return loss, {name: float(value) for name, value in sums.items()}

    def _first_row(self, mini_batch: MiniBatch, result: UpdateResult) -> dict[str, Any]:
        fit, at_scoring = (
            FitMoments.pooled(self._ranks.gather_f64(f.to_list())) for f in (self._fit, self._fit_at_scoring)
        )
        sums = {"tokens": float(mini_batch.tokens)} | result.sums
        return summarize(sums, fit, at_scoring) | {
            "value/return_mean": fit.returns.mean,
            "value/grad_norm": result.grad_norm,
        }
