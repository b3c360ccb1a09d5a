"""One optimizer step that all ranks take or none: AdamW, warmup, clipping by global norm, and a vote.

Notable:
- Losses arrive already divided by the header's global denominators, so gradients are summed over ranks, never averaged
  (law 1: one denominator). Those of sharded parameters arrive summed; those of replicated ones are summed here.
- A sharded parameter is a DTensor, and each of its elements lives on exactly one rank. A plain parameter in a group of
  several ranks is a replica. All that follows works on plain local tensors.
- The norm is summed in f64 and in rank order: one number, the same on every rank, counting replicas once.
- The schedule counts this optimizer's own updates, not the run's steps.
- A non-finite loss or gradient norm on any rank skips the step on every rank, weights untouched, and says what it was.
  Three in a row stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from loguru import logger
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from services.config.train import OptimConfig
from services.training.moments import PIECE_BYTES, Moments
from services.training.ranks import Ranks
from services.wire.errors import ContractError, NonFiniteError
from services.wire.grids import MicroBatch

MAX_SKIPPED_IN_A_ROW = 3
NAMES_TOLD = 3
"""Parameters named one by one where gradients are not finite."""
CLIP_EPS = 1e-6
"""Added to the norm that gradients are scaled by, as in torch's own clipping."""

LossFunction = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]]
Blame = Callable[[MicroBatch], str]
"""Names the sample of a micro-batch whose loss is not finite; may run a forward, empty where it cannot tell."""


@dataclass(frozen=True)
class HeadOnly:
    """A phase at the start in which only some parameters train."""

    num_updates: int
    """of the optimizer's own updates"""
    is_head: Callable[[str], bool]
    """by parameter name"""


@dataclass
class UpdateResult:
    """What one optimizer step did."""

    applied: bool
    grad_norm: float
    """global norm before clipping, of the parameters that train now"""
    sums: dict[str, float] = field(default_factory=dict)
    """metric sums over all ranks and micro-batches; names ending in `_max` are maxima"""
    problem: str = ""
    """what was not finite, and where; the same on all ranks"""


@dataclass(frozen=True)
class _Vote:
    """What all ranks know of an update before they take it."""

    grad_norm: float
    suspect: int | None
    """first micro-batch with a non-finite loss on any rank"""

    @property
    def finite(self) -> bool:
        return self.suspect is None and math.isfinite(self.grad_norm)


class Optimizer:
    """AdamW over the trainable parameters of one model, in step with the other ranks."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        ranks: Ranks,
        *,
        warmup_updates: int,
        head_only: HeadOnly | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Take the parameters that require a gradient, sharded or not.

        Args:
            model: Its parameters keep their names and local shapes from here on.
            config: `[policy.optim]` or `[value.optim]`, resolved.
            ranks: The group.
            warmup_updates: Own updates over which the learning rate rises.
            head_only: Parameters that train alone at first; the others, their moments and their count of steps are not
                touched in that phase.
            piece_bytes: Parameters stepped at a time.
        """
        assert config.lr is not None, "the resolver fills the learning rate"
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward without a backward, the root's parameters are still whole
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(trainable), list(trainable.values())
        self._config = config
        self._ranks = ranks
        self._warmup_updates = warmup_updates
        self._lr = config.lr
        self._head_only = head_only
        if head_only is not None:
            assert any(head_only.is_head(name) for name in self._names), "no parameter is of the head"
        local = {name: _local(p) for name, p in trainable.items()}
        self._moments = Moments(local, config, piece_bytes=piece_bytes)
        self.num_updates = 0
        self._skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        if self.num_updates >= self._warmup_updates:
            return self._lr
        return self._lr * (self.num_updates + 1) / self._warmup_updates

    def update(
        self,
        micro_batches: Iterable[MicroBatch],
        loss_function: LossFunction,
        *,
        step: bool = True,
        blame: Blame | None = None,
    ) -> UpdateResult:
        """Accumulate over this rank's micro-batches, agree, and step.

        Args:
            micro_batches: this rank's share, dummies included; equally many on all ranks.
            loss_function: (loss, metric sums) of one micro-batch.
            step: False runs everything but the step itself (a batch without a loss token).
            blame: asked after a non-finite loss, on every rank about the micro-batch of the same number, so that its
                collectives meet.

        Raises:
            NonFiniteError: when this is the third skipped step in a row.
        """
        self.release_gradients()
        micro_batches, losses = list(micro_batches), list[torch.Tensor]()
        sums: dict[str, float] = {}
        for micro_batch in micro_batches:
            loss, metrics = loss_function(micro_batch)
            losses.append(loss.detach())
            loss.backward()
            add_sums(sums, metrics)
        gradients = self._local_gradients()
        squares, bad_losses = _sums_of_squares(gradients), _non_finite(losses)
        vote = self._vote(squares, bad_losses)
        result = UpdateResult(vote.finite and step, vote.grad_norm, self._reduce(sums))
        if not vote.finite:
            mine = self._problem_here(squares, bad_losses, self._culprit(vote, micro_batches, blame))
            result.problem = self._problem(mine)
            self._skip(vote.grad_norm, result.problem)
        elif step:
            self._apply(gradients, vote.grad_norm)
        return result

    def state_dict(self) -> dict[str, Any]:
        """This rank's part as copies in host memory: `num_updates`, `skipped_in_a_row`, `moments` by parameter name."""
        return {
            "num_updates": self.num_updates,
            "skipped_in_a_row": self._skipped_in_a_row,
            "moments": self._moments.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` of the same layout was taken, bit for bit.

        Raises:
            ContractError: naming what is missing, unknown or of another shape; nothing has changed then.
        """
        for key in ("num_updates", "skipped_in_a_row", "moments"):
            if key not in state:
                raise ContractError(f"optimizer state has no {key}")
        self._moments.load_state_dict(state["moments"])
        self.num_updates = int(state["num_updates"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Its own tensors that live on `device`, by name."""
        return self._moments.tensors(device)

    def release_gradients(self) -> None:
        """Let the last update's gradients go; the next one makes its own."""
        for parameter in self._parameters:
            parameter.grad = None

    def _active(self) -> list[int]:
        """Indices of the parameters that this update trains; the same on all ranks."""
        phase = self._head_only
        if phase is None or self.num_updates >= phase.num_updates:
            return list(range(len(self._names)))
        return [index for index, name in enumerate(self._names) if phase.is_head(name)]

    @torch.no_grad()
    def _local_gradients(self) -> dict[int, torch.Tensor]:
        """By parameter index, what this rank holds of the gradients' sums over all ranks."""
        active = self._active()
        replicated = [self._parameters[index] for index in active if not self._is_sharded(index)]
        if replicated:  # on all ranks or on none
            self._ranks.sum_gradients(replicated)
        gradients = {}
        for index in active:
            gradient = self._parameters[index].grad
            if gradient is None:  # no token of any rank came by: zero, as law 5 has it
                gradients[index] = torch.zeros_like(_local(self._parameters[index]))
            else:
                gradients[index] = _local(gradient)
        return gradients

    def _is_sharded(self, index: int) -> bool:
        return isinstance(self._parameters[index], DTensor)

    def _vote(self, squares: Mapping[int, float], bad_losses: Mapping[int, float]) -> _Vote:
        """The global norm, and whose loss is not finite, from one gather."""
        sharded = sum(square for index, square in squares.items() if self._is_sharded(index))
        replicated = sum(square for index, square in squares.items() if not self._is_sharded(index))
        rows = self._ranks.gather_f64([sharded, replicated, min(bad_losses, default=-1)])
        total = sum(row[0] for row in rows) + rows[0][1]
        return _Vote(math.sqrt(total), min((int(row[2]) for row in rows if row[2] >= 0), default=None))

    @torch.no_grad()
    def _apply(self, gradients: Mapping[int, torch.Tensor], grad_norm: float) -> None:
        self._skipped_in_a_row = 0
        factor = self._config.max_grad_norm / (grad_norm + CLIP_EPS)
        if factor < 1:
            for gradient in gradients.values():
                gradient.mul_(factor)
        self._moments.step([_local(p) for p in self._parameters], gradients, lr=self.lr)
        self.num_updates += 1

    @torch.no_grad()
    def _culprit(self, vote: _Vote, micro_batches: Sequence[MicroBatch], blame: Blame | None) -> tuple[int, str]:
        """The suspected micro-batch and what is known of its sample; every rank looks at the same number or none."""
        if vote.suspect is None or blame is None or vote.suspect >= len(micro_batches):
            return -1, ""
        return vote.suspect, blame(micro_batches[vote.suspect])

    def _problem_here(
        self, squares: Mapping[int, float], bad_losses: Mapping[int, float], culprit: tuple[int, str]
    ) -> str:
        """What is not finite on this rank; empty where all is well."""
        told = []
        for number, loss in bad_losses.items():
            sample = f" ({culprit[1]})" if culprit[1] and number == culprit[0] else ""
            told.append(f"loss is {loss} at micro-batch {number}{sample}")
        names = [self._names[index] for index, square in squares.items() if not math.isfinite(square)]
        if names:
            more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
            told.append(f"gradient is not finite in {', '.join(names[:NAMES_TOLD])}{more}")
        return ", ".join(told)

    def _problem(self, mine: str) -> str:
        """What all ranks have to tell, those with a bad loss first: summed gradients are bad everywhere."""
        rows = enumerate(row.decode() for row in self._ranks.gather_bytes(mine.encode()))
        told = sorted(((rank, text) for rank, text in rows if text), key=lambda row: not row[1].startswith("loss"))
        return "; ".join(f"rank {rank}: {text}" for rank, text in told)

    def _skip(self, grad_norm: float, problem: str) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} updates in a row had a non-finite loss or gradient (last norm {grad_norm}; "
                f"{problem}); the weights are those of the last finite update"
            )
        if self._ranks.rank == 0:
            logger.warning(
                "update {} is skipped, {} in a row: {}", self.num_updates + 1, self._skipped_in_a_row, problem
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


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory; a plain tensor is its own."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    assert all(placement.is_shard() for placement in tensor.placements), "an element on two ranks would count twice"
    return tensor.to_local()


def _sums_of_squares(tensors: Mapping[int, torch.Tensor]) -> dict[int, float]:
    """Of each tensor, in f64, with one wait for the device."""
    if not tensors:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()])
    return dict(zip(tensors, norms.square().tolist(), strict=True))


def _non_finite(losses: Sequence[torch.Tensor]) -> dict[int, float]:
    """The losses that are not finite, by number of the micro-batch."""
    values = torch.stack(list(losses)).tolist() if losses else []
    return {number: value for number, value in enumerate(values) if not math.isfinite(value)}
