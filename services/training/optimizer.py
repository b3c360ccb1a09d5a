"""One optimizer step that all ranks take or none: AdamW, warmup, clipping by global norm, and a vote.

Notable:
- Losses arrive already divided by the header's global denominators, so gradients are summed over ranks, never averaged
  (law 1: one denominator).
- The schedule counts this optimizer's own updates, not the run's steps.
- A non-finite loss or gradient norm on any rank skips the step on every rank, weights untouched. Three in a row stop
  the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from services.config.train import OptimConfig
from services.training.ranks import Ranks
from services.wire.errors import NonFiniteError
from services.wire.grids import MicroBatch

MAX_SKIPPED_IN_A_ROW = 3

LossFunction = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]]


@dataclass
class UpdateResult:
    """What one optimizer step did."""

    applied: bool
    grad_norm: float
    """global norm before clipping"""
    sums: dict[str, float] = field(default_factory=dict)
    """metric sums over all ranks and micro-batches; names ending in `_max` are maxima"""


class Optimizer:
    """AdamW over the trainable parameters of one model, in step with the other ranks."""

    def __init__(self, model: nn.Module, config: OptimConfig, ranks: Ranks, *, warmup_updates: int) -> None:
        assert config.lr is not None, "the resolver fills the learning rate"
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._config = config
        self._ranks = ranks
        self._warmup_updates = warmup_updates
        self._lr = config.lr
        self._adam = torch.optim.AdamW(
            self._parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.num_updates = 0
        self._skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        if self.num_updates >= self._warmup_updates:
            return self._lr
        return self._lr * (self.num_updates + 1) / self._warmup_updates

    def update(
        self, micro_batches: Iterable[MicroBatch], loss_function: LossFunction, *, step: bool = True
    ) -> UpdateResult:
        """Accumulate over this rank's micro-batches, agree, and step.

        Args:
            micro_batches: this rank's share, dummies included.
            loss_function: (loss, metric sums) of one micro-batch.
            step: False runs everything but the step itself (a batch without a loss token).

        Raises:
            NonFiniteError: when this is the third skipped step in a row.
        """
        self._adam.zero_grad(set_to_none=True)
        finite = True
        sums: dict[str, float] = {}
        for micro_batch in micro_batches:
            loss, metrics = loss_function(micro_batch)
            finite = finite and bool(torch.isfinite(loss.detach()))
            loss.backward()
            add_sums(sums, metrics)
        self._ranks.sum_gradients(self._parameters)
        grad_norm = float(nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]))
        finite = self._ranks.all_true(finite and grad_norm < float("inf"))
        result = UpdateResult(applied=finite and step, grad_norm=grad_norm, sums=self._reduce(sums))
        if not finite:
            self._skip(grad_norm)
        elif step:
            self._apply(grad_norm)
        return result

    def _apply(self, grad_norm: float) -> None:
        self._skipped_in_a_row = 0
        nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, torch.tensor(grad_norm))
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        self.num_updates += 1

    def _skip(self, grad_norm: float) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} updates in a row had a non-finite loss or gradient (last norm {grad_norm}); "
                "the weights are those of the last finite update"
            )

    def _reduce(self, sums: dict[str, float]) -> dict[str, float]:
        """Totals over the ranks; a rank of dummies reports no name at all."""
        total: dict[str, float] = {}
        for row in self._ranks.gather_bytes(msgspec.msgpack.encode(sums)):
            add_sums(total, msgspec.msgpack.decode(row, type=dict[str, float]))
        return total


def add_sums(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add metric sums in place; names ending in `_max` are maxima."""
    for name, value in more.items():
        total[name] = max(total.get(name, value), value) if name.endswith("_max") else total.get(name, 0.0) + value
