"""One policy step: one optimizer update per mini-batch of a grid, by the loss that the header names.

Notable:
- Log-probabilities are taken at the header's sampling temperature, in f32, at the loss tokens only, in chunks.
- The ratio is against the rollout's log-probabilities, or against those of one forward before the grid's first update
  (`policy.old_logprobs`): a choice, never a fallback.
- What a loss sum is divided by is in the header. KL and entropy terms take the same weights and the same divisor.
- The reference policy is the run's first model, frozen, in the policy's layout, and exists only where `policy.kl.coef`
  is above 0. Under LoRA it is the base beneath the adapters.
- A context rank takes the loss of those tokens whose preceding row it holds; sums over ranks make the whole.
- `policy/mismatch_*` compares trainer and engine on tokens that the trained version itself sampled: at zero staleness
  the two must agree, and what remains is the numerical gap between them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from policy_trainer.losses import LOSSES, entropy_loss, kl_loss, summarize
from policy_trainer.losses.common import sample_weights
from services.config.train import PolicyConfig
from services.model.backbone import Backbone
from services.model.layout import PackedLayout
from services.model.logprobs import PolicyModel
from services.model.lora import adapter_files, is_adapter_name, merged_state_dict, without_lora
from services.model.mesh import Mesh
from services.model.snapshot import save_snapshot, write_snapshot
from services.training.board import StatusBoard
from services.training.culprits import Suspect, first_samples, tell_culprits
from services.training.movement import Movement
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
    """[n] loss tokens of this context rank; never a first token, so the row before is its own sequence's"""
    weights: torch.Tensor
    """[n] 1 / loss tokens of its sample, of each"""
    owner: torch.Tensor
    """[n] its sample in the micro-batch, of each"""

    @staticmethod
    def of(micro_batch: MicroBatch, mesh: Mesh) -> _Row:
        device = mesh.device
        if micro_batch.is_dummy:
            ids = torch.zeros(2, dtype=torch.long, device=device)
            layout = PackedLayout.of([2], device, mesh)
            positions = torch.ones(1, dtype=torch.long, device=device)
            positions = positions[layout.holds(positions - 1)]
            ones = torch.ones(len(positions), device=device)
            return _Row({"token_ids": ids}, layout, positions, ones, ones.long())
        lengths = torch.from_numpy(micro_batch.lengths.astype("int64"))
        arrays = {name: torch.from_numpy(array.copy()).to(device) for name, array in micro_batch.arrays.items()}
        arrays["token_ids"] = arrays["token_ids"].long()
        layout = PackedLayout.of(lengths.tolist(), device, mesh)
        positions = arrays["loss_mask"].nonzero().flatten()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)[positions]
        weights = sample_weights(owner, len(lengths))
        own = layout.holds(positions - 1)
        return _Row(arrays, layout, positions[own], weights[own], owner[own])


@dataclass
class _Outputs:
    """What the models say about a row's loss tokens, [n] each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    reference: torch.Tensor | None
    """log-probabilities under the run's first model"""


class PolicyTrainer:
    """The policy's trainer, on every rank."""

    def __init__(
        self,
        policy: PolicyModel,
        backbone: Backbone,
        ranks: Ranks,
        board: StatusBoard,
        config: PolicyConfig,
        *,
        weights_dir: Path,
        tokenizer_from: Path,
        reference: PolicyModel | None = None,
        movement_interval_steps: int = 1,
    ) -> None:
        """Take the model over.

        Args:
            policy: In its layout.
            backbone: What `policy` was made from.
            ranks: The group.
            board: Where published versions are told.
            config: Its section.
            weights_dir: Where versions are published.
            tokenizer_from: Folder whose tokenizer goes with every version.
            reference: The run's first model in the same layout; given where `policy.kl.coef` is above 0 and there are
                no adapters, beneath which it would lie anyway.
            movement_interval_steps: Of `[monitor]`.
        """
        assert (reference is not None) == (config.kl.coef > 0 and config.lora is None)
        self._policy = policy
        self._backbone = backbone
        self._mesh = backbone.mesh
        self._ranks = ranks
        self._board = board
        self._weights_dir = weights_dir
        self._tokenizer_from = tokenizer_from
        self._config = config
        self._reference = reference
        self._optimizer = Optimizer(policy, config.optim, ranks, warmup_updates=config.warmup.lr_updates)
        self._movement = Movement(policy, ranks, interval_steps=movement_interval_steps)
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
        everything = [row for _, rows in mini_batches for row in rows]
        old_logprobs = self._old_logprobs(item, everything)
        numbers = first_samples(everything)
        self._movement.begin(item.header.step)
        for mini_batch, micro_batches in mini_batches:
            divisor = item.header.divisor(mini_batch)
            result = self._optimizer.update(
                micro_batches,
                lambda micro_batch, d=divisor: self._loss_of(micro_batch, item, d, old_logprobs[id(micro_batch)]),
                step=mini_batch.tokens > 0,
                blame=lambda micro_batch, d=divisor: self._blame(
                    micro_batch, item, d, old_logprobs[id(micro_batch)], first_sample=numbers[id(micro_batch)]
                ),
            )
            add_sums(sums, result.sums)
            tokens += mini_batch.tokens
            divisors += divisor
            num_skipped += not result.applied and mini_batch.tokens > 0
            grad_norm = max(grad_norm, result.grad_norm)
        current = sums.get("current_tokens", 0.0)
        moved = {f"policy/moved/{part}": one.relative for part, one in self._movement.end().items()}
        return (
            summarize(sums | {"denominator": divisors})
            | moved
            | {
                "policy/entropy": sums.get("entropy_sum", 0.0) / max(tokens, 1),
                "policy/grad_norm": grad_norm,
                "policy/lr": self._optimizer.lr,
                "policy/nonfinite": num_skipped,
                "policy/empty_batch": int(tokens == 0),
                "policy/mismatch_tokens": current,
                "policy/mismatch_log_ratio": sums.get("mismatch_log_ratio_sum", 0.0) / max(current, 1.0),
                "policy/mismatch_mean": sums.get("mismatch_sum", 0.0) / max(current, 1.0),
                "policy/mismatch_max": sums.get("mismatch_max", 0.0),
            }
        )

    def after_step(self, step: int) -> None:
        """Publish version step + 1: every rank gives its shards, rank 0 writes."""
        lora = self._config.lora
        only_adapter = lora is not None and lora.publish == "adapter"
        state = self._backbone.gather(self._policy, wanted=is_adapter_name if only_adapter else None)
        if self._ranks.rank == 0:
            path = self._write(step + 1, state, only_adapter=only_adapter)
            self._board.progress(published={"version": step + 1, "path": str(path)})

    def publish_again(self, version: int) -> None:
        """After a commit was loaded: its version as committed; what ran ahead of it never was. Every rank calls it."""
        if self._ranks.rank == 0:
            for path in self._weights_dir.glob("v[0-9]*"):
                if int(path.name[1:]) >= version:
                    shutil.rmtree(path)
        if version > 0:  # engines start with version 0 anyway
            self.after_step(version - 1)

    def _write(self, version: int, state: dict[str, torch.Tensor], *, only_adapter: bool) -> Path:
        model = self._policy.language_model
        if only_adapter:
            return write_snapshot(self._weights_dir, version, lambda part: adapter_files(state, model, part))
        whole = state if self._config.lora is None else merged_state_dict(state, model)
        return save_snapshot(
            self._backbone.skeleton, self._weights_dir, version, tokenizer_from=self._tokenizer_from, state=whole
        )

    def _old_logprobs(self, item: GridItem, micro_batches: list[MicroBatch]) -> dict[int, torch.Tensor | None]:
        """By `id`, each micro-batch's log-probabilities [n] before the first update; None where the rollout's count."""
        if self._config.old_logprobs == "rollout":
            return {id(m): None for m in micro_batches}
        with torch.no_grad():
            return {id(m): self._forward(self._policy, _Row.of(m, self._mesh), item)[0] for m in micro_batches}

    def _forward(
        self, model: PolicyModel, row: _Row, item: GridItem, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [n] at this rank's loss tokens of the row."""
        return model(
            row.arrays["token_ids"],
            row.layout,
            row.positions,
            temperature=item.header.temperature,
            entropy_gradient=entropy_gradient,
        )

    def _reference_logprobs(self, row: _Row, item: GridItem) -> torch.Tensor | None:
        """Log-probabilities [n] under the run's first model; None where no penalty asks for them."""
        if self._config.kl.coef == 0:
            return None
        with torch.no_grad():
            if self._reference is not None:
                return self._forward(self._reference, row, item)[0]
            with without_lora(self._policy.language_model):
                return self._forward(self._policy, row, item)[0]

    def _loss_of(
        self, micro_batch: MicroBatch, item: GridItem, divisor: float, old: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        row = _Row.of(micro_batch, self._mesh)
        outputs = self._outputs(row, item)
        logprobs = outputs.logprobs
        if micro_batch.is_dummy:
            return logprobs.sum() * 0.0, {}
        everywhere = torch.ones_like(logprobs, dtype=torch.bool)
        loss, sums = self._objective(row, item, divisor, old, outputs, everywhere)
        rollout = row.arrays["logprobs"][row.positions]
        if old is not None:  # the loss saw another ratio than that to the rollout
            sums["kl_rollout_sum"] = (rollout - logprobs.detach()).double().sum()
        own = {name: float(value) for name, value in sums.items()}
        return loss, own | self._mismatch(micro_batch, item, row, (logprobs.detach() - rollout).double())

    def _outputs(self, row: _Row, item: GridItem) -> _Outputs:
        entropy_gradient = self._config.entropy_coef > 0
        logprobs, entropies = self._forward(self._policy, row, item, entropy_gradient=entropy_gradient)
        return _Outputs(logprobs, entropies, self._reference_logprobs(row, item))

    def _objective(
        self, row: _Row, item: GridItem, divisor: float, old: torch.Tensor | None, outputs: _Outputs, mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The header's loss and what `[policy]` adds to it, at the loss tokens where `mask` [n] is true."""
        logprobs, reference = outputs.logprobs, outputs.reference
        rollout, advantages = (row.arrays[name][row.positions] for name in ("logprobs", "advantages"))
        weights = row.weights if item.header.denominator == "sequence_mean" else None
        loss, sums = LOSSES[item.header.loss_name](
            logprobs,
            rollout if old is None else old,
            advantages,
            mask,
            denominator=divisor,
            weights=weights,
            **item.header.loss_constants,
        )
        bonus, more = entropy_loss(outputs.entropies, mask, denominator=divisor, weights=weights)
        sums |= more
        if self._config.entropy_coef > 0:
            loss = loss + self._config.entropy_coef * bonus
        if reference is not None:
            kl = self._config.kl
            penalty, more = kl_loss(
                logprobs,
                reference,
                rollout,
                mask,
                kind=kl.type,
                unbiased=kl.unbiased,
                denominator=divisor,
                weights=weights,
            )
            loss, sums = loss + kl.coef * penalty, sums | more
        return loss, sums

    def _blame(
        self, micro_batch: MicroBatch, item: GridItem, divisor: float, old: torch.Tensor | None, *, first_sample: int
    ) -> str:
        """The samples of a micro-batch whose loss is not finite, from one more forward."""
        row = _Row.of(micro_batch, self._mesh)
        outputs = self._outputs(row, item)
        suspects: list[Suspect] = []
        for number, length in enumerate(micro_batch.lengths.tolist()):
            mask = row.owner == number
            if mask.any():
                loss, _ = self._objective(row, item, divisor, old, outputs, mask)
                seen = {name: row.arrays[name][row.positions][mask] for name in ("advantages", "logprobs")}
                seen["trained logprobs"] = outputs.logprobs[mask]
                suspects.append(Suspect(first_sample + number, length, loss, seen))
        return tell_culprits(item.header.step, suspects)

    def _mismatch(self, micro_batch: MicroBatch, item: GridItem, row: _Row, gap: torch.Tensor) -> dict[str, float]:
        """Sums over the loss tokens that the version in training sampled itself, of trainer - engine, `gap [n]`."""
        if self._optimizer.num_updates > self._updates_before:
            return {}  # an earlier mini-batch has moved the weights: they are no longer those that sampled
        current = self._sampled_by(item.header.policy_version, micro_batch, row.layout.num_tokens)[row.positions]
        gap = gap[current]
        return {
            "current_tokens": float(current.sum()),
            "mismatch_log_ratio_sum": float(gap.sum()),
            "mismatch_sum": float(gap.abs().sum()),
            "mismatch_max": float(gap.abs().max()) if len(gap) else 0.0,
        }

    def _sampled_by(self, version: int, micro_batch: MicroBatch, num_tokens: int) -> torch.Tensor:
        """[T] bool: tokens that policy `version` sampled."""
        own = torch.zeros(num_tokens, dtype=torch.bool, device=self._mesh.device)
        start = 0
        for length, spans in zip(micro_batch.lengths.tolist(), micro_batch.spans, strict=True):
            for first, end, span_version in spans:
                if span_version == version:
                    own[start + first : start + end] = True
            start += length
        return own
