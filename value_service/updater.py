"""One critic step: K optimizer updates on one grid, targets fixed.

Notable:
- The targets are the grid's; nothing recomputes them between the K updates.
- `value/explained_variance` and `value/loss` are those of the first pass over the batch, pooled over all ranks by f64
  moments: every token's value is from before an update has seen it. `..._at_scoring` uses the values that fed the
  advantages.
- Each of the K passes makes one update a mini-batch.
- A target that holds the critic's own value at a cut trains like any other, but counts in no measure of fit: explained
  variance, Brier score and calibration would find the critic in agreement with itself.
- The loss sees the head's outputs, everything measured the one value a token that scoring returns too.
- Where a loss is not finite, one more forward finds the sample.
- A batch without a loss token takes no optimizer step, and every rank still joins every collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from services.config.train import ValueConfig
from services.model.freeze import is_head
from services.model.head import Critic, values_before_tokens
from services.model.layout import PackedLayout
from services.model.mesh import Mesh
from services.training.culprits import Suspect, first_samples, tell_culprits
from services.training.movement import Movement
from services.training.optimizer import HeadOnly, Optimizer, UpdateResult, add_sums
from services.training.ranks import Ranks
from services.wire.grids import GridItem, MicroBatch, MiniBatch
from value_service.losses import FitMoments, Moments, TraceFit, ValueLoss, summarize
from value_service.losses.measures import calibration_sums, trace_fit


@dataclass
class _Fits:
    """Moments of the first pass over the batch, over this rank's micro-batches."""

    tokens: FitMoments = field(default_factory=FitMoments)
    at_scoring: FitMoments = field(default_factory=FitMoments)
    by_trace: TraceFit = field(default_factory=TraceFit)
    values: Moments = field(default_factory=Moments)
    """of the values at all loss tokens"""


class Updater:
    """The critic's trainer, on every rank."""

    def __init__(
        self, critic: Critic, ranks: Ranks, mesh: Mesh, config: ValueConfig, *, movement_interval_steps: int = 1
    ) -> None:
        """Take the critic over.

        Args:
            critic: In its layout.
            ranks: The group.
            mesh: The layout.
            config: Its section.
            movement_interval_steps: Of `[monitor]`.
        """
        self._critic = critic
        self._ranks = ranks
        self._mesh = mesh
        self._config = config
        self._optimizer = Optimizer(
            critic,
            config.optim,
            ranks,
            warmup_updates=config.warmup.lr_updates,
            head_only=HeadOnly(config.warmup.head_only_updates, is_head),
        )
        self._movement = Movement(critic, ranks, interval_steps=movement_interval_steps, always=("head",))

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
        sums: dict[str, float] = {}
        num_skipped, grad_norm, fits = 0, 0.0, _Fits()
        self._step = item.header.step
        mini_batches = list(item.mini_batches())
        self._first_samples = first_samples(m for _, micro_batches in mini_batches for m in micro_batches)
        self._movement.begin(self._step)
        for update in range(self._config.updates_per_batch):
            self._fits = fits if update == 0 else None
            for mini_batch, micro_batches in mini_batches:
                result = self._update(mini_batch, micro_batches)
                num_skipped += not result.applied and mini_batch.tokens > 0
                if update == 0:
                    add_sums(sums, result.sums)
                    grad_norm = max(grad_norm, result.grad_norm)
        num_tokens = sum(mini_batch.tokens for mini_batch, _ in mini_batches)
        moved = self._movement.end()
        return (
            self._fit_row({"tokens": float(num_tokens)} | sums, fits)
            | {
                "value/grad_norm": grad_norm,
                "value/updates": self._optimizer.num_updates,
                "value/lr": self._optimizer.lr,
                "value/nonfinite": num_skipped,
                "value/head_norm": moved["head"].norm,
            }
            | {f"value/moved/{part}": one.relative for part, one in moved.items()}
        )

    @torch.no_grad()
    def measure(self, item: GridItem) -> tuple[FitMoments, TraceFit, dict[str, float]]:
        """Fit on a grid that trains nothing: this rank's moments and sums. Every rank calls it.

        Raises:
            ContractError: as of `train`.
        """
        self._loss = ValueLoss(item.header.loss_name, item.header.loss_constants, self._critic.head.points)
        fits, sums = _Fits(), dict[str, float]()
        self._fits = fits
        for mini_batch, micro_batches in item.mini_batches():
            for micro_batch in micro_batches:
                if micro_batch.is_dummy:
                    self._dummy_outputs()
                else:
                    add_sums(sums, self._loss_of(micro_batch, max(mini_batch.tokens, 1))[1])
        self._fits = None
        return fits.tokens, fits.by_trace, sums

    def after_step(self, step: int) -> None:
        """Nothing to publish."""

    def _update(self, mini_batch: MiniBatch, micro_batches: list[MicroBatch]) -> UpdateResult:
        denominator = max(mini_batch.tokens, 1)

        def loss_function(micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
            if micro_batch.is_dummy:
                return self._dummy_outputs().sum() * 0.0, {}
            return self._loss_of(micro_batch, denominator)

        return self._optimizer.update(
            micro_batches,
            loss_function,
            step=mini_batch.tokens > 0,
            blame=lambda micro_batch: self._blame(micro_batch, denominator),
        )

    def _blame(self, micro_batch: MicroBatch, denominator: int) -> str:
        """The samples of a micro-batch whose loss is not finite."""
        if micro_batch.is_dummy:
            self._dummy_outputs()
            return ""
        layout, arrays, outputs, positions = self._outputs(micro_batch)
        suspects: list[Suspect] = []
        first, start = self._first_samples[id(micro_batch)], 0
        for number, length in enumerate(layout.lengths):
            own = positions[(positions >= start) & (positions < start + length)]
            start += length
            if len(own):
                loss, _ = self._loss_at(own, layout, arrays, outputs, denominator)
                seen = {"returns": arrays["returns"][own], "outputs": outputs[own - 1 - layout.first_local]}
                suspects.append(Suspect(first + number, length, loss, seen))
        return tell_culprits(self._step, suspects)

    def _dummy_outputs(self) -> torch.Tensor:
        """A forward of one token, which joins the collectives of the other ranks' forwards."""
        ids = torch.zeros(1, dtype=torch.long, device=self._mesh.device)
        return self._critic.outputs(ids, PackedLayout.of([1], self._mesh.device, self._mesh))

    def _outputs(
        self, micro_batch: MicroBatch
    ) -> tuple[PackedLayout, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Layout, arrays on the device, the head's outputs [T / C, K], and the loss tokens [n] of this context rank."""
        device = self._mesh.device
        layout = PackedLayout.of(micro_batch.lengths.tolist(), device, self._mesh)
        arrays = {
            name: torch.from_numpy(array.copy()).to(device)
            for name, array in (micro_batch.arrays | micro_batch.sample_arrays).items()
        }
        outputs = self._critic.outputs(arrays["token_ids"].long(), layout)
        positions = arrays["loss_mask"].nonzero().flatten()  # never a first token: the row before is its own sample's
        return layout, arrays, outputs, positions[layout.holds(positions - 1)]

    def _loss_at(
        self,
        positions: torch.Tensor,
        layout: PackedLayout,
        arrays: dict[str, torch.Tensor],
        outputs: torch.Tensor,
        denominator: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self._loss(
            outputs[positions - 1 - layout.first_local],
            arrays["returns"][positions],
            torch.ones_like(positions, dtype=torch.bool),
            old_values=arrays["old_values"][positions],
            denominator=denominator,
        )

    def _loss_of(self, micro_batch: MicroBatch, denominator: int) -> tuple[torch.Tensor, dict[str, float]]:
        layout, arrays, outputs, positions = self._outputs(micro_batch)
        loss, sums = self._loss_at(positions, layout, arrays, outputs, denominator)
        own = {name: float(value) for name, value in sums.items()}
        if self._fits is not None:
            after = layout.gather(self._critic.head.values_of(outputs.detach()))  # [T], on every context rank
            if self._mesh.cp_rank == 0:
                lengths = torch.tensor(layout.lengths, device=self._mesh.device)
                own |= self._measure(self._fits, values_before_tokens(after, lengths)[0], arrays, lengths)
        return loss, own

    def _measure(
        self, fits: _Fits, values: torch.Tensor, arrays: dict[str, torch.Tensor], lengths: torch.Tensor
    ) -> dict[str, float]:
        """Add this micro-batch to the fits; returns the sums that no loss reports."""
        trained, acting, returns = arrays["loss_mask"].bool(), arrays["action_mask"].bool(), arrays["returns"]
        bootstrapped = torch.repeat_interleave(arrays["bootstrapped"].bool(), lengths)  # [T]
        mask = trained & ~bootstrapped
        totals = {
            "return_sum": float(returns[trained].double().sum()),
            "bootstrapped": float((trained & bootstrapped).sum()),
        }
        fits.at_scoring = fits.at_scoring.merge(FitMoments.of(returns[mask], arrays["old_values"][mask]))
        if not bool(torch.isfinite(values[acting]).all()):  # then the vote refuses the update
            return totals
        fits.tokens = fits.tokens.merge(FitMoments.of(returns[mask], values[mask]))
        fits.values = fits.values.merge(Moments.of(values[trained]))
        by_trace, sums = trace_fit(values, returns, acting, mask, lengths)
        fits.by_trace = fits.by_trace.merge(by_trace)
        low, high = self._loss.value_range
        return totals | sums | calibration_sums(values[mask], returns[mask], low=low, high=high)

    def _fit_row(self, sums: dict[str, float], fits: _Fits) -> dict[str, Any]:
        """What the first pass says, over all ranks."""
        tokens, at_scoring, means, first = (
            FitMoments.pooled(self._ranks.gather_f64(fit.to_list()))
            for fit in (fits.tokens, fits.at_scoring, fits.by_trace.means, fits.by_trace.first)
        )
        values = Moments()
        for flat in self._ranks.gather_f64(fits.values.to_list()):
            values = values.merge(Moments.from_list(flat))
        shares = self._ranks.gather_bytes(np.array(fits.by_trace.pairs, dtype="<f8").tobytes())
        pairs = np.frombuffer(b"".join(shares), dtype="<f8").reshape(-1, 2).tolist()
        return summarize(sums, tokens, at_scoring, TraceFit(means, first, tuple((y, v) for y, v in pairs)), values)
