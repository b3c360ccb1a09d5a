"""One critic step: K optimizer updates on one grid, targets fixed.

Notable:
- The targets are the grid's; nothing recomputes them between the K updates.
- `value/explained_variance` and `value/loss` are those of the first update's forward (pre-update values), pooled over
  all ranks by f64 moments; `..._at_scoring` uses the values that fed the advantages.
- The loss sees the head's outputs, everything measured the one value a token that scoring returns too.
- A batch without a loss token takes no optimizer step, and every rank still joins every collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from services.config.train import ValueConfig
from services.model.attention import PackedLayout
from services.model.head import Critic, values_before_tokens
from services.training.optimizer import Optimizer, UpdateResult
from services.training.ranks import Ranks
from services.wire.grids import GridItem, MicroBatch, MiniBatch
from value_service.losses import FitMoments, TraceFit, ValueLoss, summarize
from value_service.losses.measures import calibration_sums, trace_fit


@dataclass
class _Fits:
    """Moments of the first update's forward, over this rank's micro-batches."""

    tokens: FitMoments = field(default_factory=FitMoments)
    at_scoring: FitMoments = field(default_factory=FitMoments)
    by_trace: TraceFit = field(default_factory=TraceFit)


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
        """Apply one critic grid; returns its metrics row.

        Raises:
            ContractError: when the header's loss does not exist, or does not fit the critic's head.
        """
        self._loss = ValueLoss(item.header.loss_name, item.header.loss_constants, self._critic.head.points)
        row: dict[str, Any] = {}
        num_skipped = 0
        for update in range(self._config.updates_per_batch):
            for number, (mini_batch, micro_batches) in enumerate(item.mini_batches()):
                self._fits = _Fits() if update == 0 and number == 0 else None
                result = self._update(mini_batch, micro_batches)
                num_skipped += not result.applied
                if self._fits is not None:
                    row = self._first_row(mini_batch, result, self._fits)
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
                outputs = self._critic.outputs(
                    torch.zeros(1, dtype=torch.long, device=self._device), PackedLayout.of([1], self._device)
                )
                return outputs.sum() * 0.0, {}
            return self._loss_of(micro_batch, denominator)

        return self._optimizer.update(micro_batches, loss_function, step=mini_batch.tokens > 0)

    def _loss_of(self, micro_batch: MicroBatch, denominator: int) -> tuple[torch.Tensor, dict[str, float]]:
        lengths = torch.from_numpy(micro_batch.lengths.astype("int64"))
        layout = PackedLayout.of(lengths.tolist(), self._device)
        lengths = lengths.to(self._device)
        arrays = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in micro_batch.arrays.items()}
        outputs, _ = values_before_tokens(self._critic.outputs(arrays["token_ids"].long(), layout), lengths)
        mask = arrays["loss_mask"].bool()
        loss, sums = self._loss(
            outputs, arrays["returns"], mask, old_values=arrays["old_values"], denominator=denominator
        )
        own = {name: float(value) for name, value in sums.items()}
        if self._fits is not None:
            own |= self._measure(self._fits, self._critic.head.values_of(outputs.detach()), arrays, lengths)
        return loss, own

    def _measure(
        self, fits: _Fits, values: torch.Tensor, arrays: dict[str, torch.Tensor], lengths: torch.Tensor
    ) -> dict[str, float]:
        """Add this micro-batch to the fits; returns the sums that no loss reports."""
        mask, acting, returns = arrays["loss_mask"].bool(), arrays["action_mask"].bool(), arrays["returns"]
        fits.at_scoring = fits.at_scoring.merge(FitMoments.of(returns[mask], arrays["old_values"][mask]))
        if not bool(torch.isfinite(values[acting]).all()):  # then the vote refuses the update
            return {}
        fits.tokens = fits.tokens.merge(FitMoments.of(returns[mask], values[mask]))
        by_trace, sums = trace_fit(values, returns, acting, mask, lengths)
        fits.by_trace = fits.by_trace.merge(by_trace)
        low, high = self._loss.value_range
        return sums | calibration_sums(values[mask], returns[mask], low=low, high=high)

    def _first_row(self, mini_batch: MiniBatch, result: UpdateResult, fits: _Fits) -> dict[str, Any]:
        tokens, at_scoring, means, first = (
            FitMoments.pooled(self._ranks.gather_f64(fit.to_list()))
            for fit in (fits.tokens, fits.at_scoring, fits.by_trace.means, fits.by_trace.first)
        )
        sums = {"tokens": float(mini_batch.tokens)} | result.sums
        return summarize(sums, tokens, at_scoring, TraceFit(means, first)) | {
            "value/return_mean": tokens.returns.mean,
            "value/grad_norm": result.grad_norm,
        }
