"""Grids made from credited samples: one item per data rank, with the loss denominators of every optimizer step.

Legend: S samples of an item, T tokens of a branch or of all S branches in a row.

Notable:
- The same samples are packed once per stream: policy and critic have their own lengths, ranks and masks.
- A sample without a loss token trains nothing in its stream and is left out. With none left the grid has no
  micro-batch, and its one mini-batch counts 0 tokens: the trainer takes no step.
- Denominators count over all data ranks. They are the same in every item, so the gradient does not depend on the plan.
- Arrays are zero off the action mask, whatever the samples hold there; nothing non-finite gets past here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import msgspec
import numpy as np

from services.packing.plan import pack
from services.wire.codec import digest_arrays
from services.wire.errors import ContractError, NonFiniteError
from services.wire.grids import STREAM_ARRAYS, Denominator, GridHeader, GridItem, MiniBatch, Stream
from services.wire.samples import TrainingSample


@dataclass(slots=True)
class _Row:
    """One sample as its stream sees it."""

    sample: TrainingSample
    index: int
    """position in the caller's list"""
    loss_mask: np.ndarray
    """[T] bool"""


def policy_loss_mask(sample: TrainingSample) -> np.ndarray:
    """The tokens of a sample that train the policy.

    Args:
        sample: Any sample.

    Returns:
        [T] bool: the sample's own policy mask where a filter set one, else the branch's loss mask.
    """
    return sample.branch.loss_mask if sample.policy_loss_mask is None else sample.policy_loss_mask


def value_loss_mask(sample: TrainingSample) -> np.ndarray:
    """The tokens of a sample that train the critic.

    Args:
        sample: Any sample.

    Returns:
        [T] bool: the sample's own mask where credit set one, else the branch's loss mask.
    """
    return sample.branch.loss_mask if sample.value_loss_mask is None else sample.value_loss_mask


def build_grid(
    samples: list[TrainingSample],
    *,
    stream: Stream,
    seq_len: int,
    num_data_ranks: int,
    run_id: str,
    epoch: int,
    step: int,
    policy_version: int,
    temperature: float,
    loss_name: str,
    loss_constants: dict[str, float],
    num_mini_batches: int = 1,
    pad_multiple: int = 1,
    cost: Callable[[int], float] | None = None,
    max_samples: int | None = None,
    denominator: Denominator = "token_mean",
    denominator_tokens: int = 0,
) -> list[GridItem]:
    """Pack credited samples for one stream.

    Args:
        samples: In batch order, groups together; not changed, and not referenced by the result.
        stream: "policy" takes log-probabilities, advantages and version spans; "critic" targets, old values
            and which samples' targets hold the critic's own value.
        seq_len: Tokens of a bin.
        num_data_ranks: Items to make.
        run_id: Identity of the run, for the header; so are the next four.
        epoch: Restart counter.
        step: Step within the run.
        policy_version: Version about to be trained.
        temperature: Sampling temperature.
        loss_name: Name the trainer looks its loss up by.
        loss_constants: The loss's constants.
        num_mini_batches: Optimizer steps to split the samples into, contiguously and at group borders where there are
            enough groups; never more than there are samples.
        pad_multiple: Every sample takes its length rounded up to a multiple of this in a bin.
        cost: What the data ranks are balanced by, a function of a sample's length; None: tokens.
        max_samples: Samples of a bin at most; None: no limit.
        denominator: What the loss is a mean of, for the header; see `GridHeader.divisor`.
        denominator_tokens: What stands for a sample's length with "constant".

    Returns:
        One item per data rank; `grid_digest` and `mini_batches` are the same in all.

    Raises:
        ValueError: an over-long sample (naming it, its length and the limit), an argument below 1, or a cost that is
            negative or not finite.
        ContractError: a sample without advantages, returns or values, or with a wrong length or mask.
        NonFiniteError: a number on the action mask that is not finite, in f32.
    """
    for name, number in (("num_mini_batches", num_mini_batches), ("pad_multiple", pad_multiple)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    _check_lengths(samples, stream, seq_len, pad_multiple)
    rows = _rows(samples, stream)
    rank_rows, mini_batches = _plan(
        _split(rows, num_mini_batches),
        seq_len=seq_len,
        num_data_ranks=num_data_ranks,
        pad_multiple=pad_multiple,
        cost=cost,
        max_samples=max_samples,
    )
    arrays_per_rank = [_arrays(micro_batches, stream) for micro_batches in rank_rows]
    header = GridHeader(
        run_id=run_id,
        epoch=epoch,
        stream=stream,
        step=step,
        policy_version=policy_version,
        data_rank=0,
        num_data_ranks=num_data_ranks,
        temperature=temperature,
        loss_name=loss_name,
        loss_constants=dict(loss_constants),
        mini_batches=mini_batches,
        digest="",
        grid_digest="",
        denominator=denominator,
        denominator_tokens=denominator_tokens,
    )
    digests = [digest_arrays(arrays) for arrays in arrays_per_rank]
    whole = _grid_digest(header, digests)
    return [
        GridItem(msgspec.structs.replace(header, data_rank=rank, digest=digest, grid_digest=whole), arrays)
        for rank, (digest, arrays) in enumerate(zip(digests, arrays_per_rank, strict=True))
    ]


def _check_lengths(samples: list[TrainingSample], stream: Stream, seq_len: int, pad_multiple: int) -> None:
    for index, sample in enumerate(samples):
        size = -(-sample.num_tokens // pad_multiple) * pad_multiple
        if size > seq_len:
            raise ValueError(
                f"sample {index} (trace {sample.trace_id}) takes {size} tokens of the {stream} grid, "
                f"over the limit of {seq_len}"
            )


def _rows(samples: list[TrainingSample], stream: Stream) -> list[_Row]:
    rows: list[_Row] = []
    for index, sample in enumerate(samples):
        mask = np.asarray(policy_loss_mask(sample) if stream == "policy" else value_loss_mask(sample)).astype(bool)
        if mask.shape != sample.branch.action_mask.shape:
            raise ContractError(f"trace {sample.trace_id}: loss mask has {len(mask)} entries, not {sample.num_tokens}")
        if (mask & ~sample.branch.action_mask).any():
            raise ContractError(f"trace {sample.trace_id}: loss mask is true off the action mask")
        if mask.any():
            rows.append(_Row(sample, index, mask))
    return rows


def _split(rows: list[_Row], num_parts: int) -> list[list[_Row]]:
    """Contiguous non-empty parts of about equal sample counts, cut between groups where there are enough groups."""
    if not rows:
        return [[]]
    units = [list(members) for _, members in groupby(rows, key=lambda row: row.sample.group_id)]
    if len(units) < num_parts:
        units = [[row] for row in rows]
    num_parts = min(num_parts, len(units))
    ends = np.cumsum([len(unit) for unit in units])  # samples up to and with each unit
    cuts = [0]
    for part in range(1, num_parts):
        target = part * len(rows) / num_parts
        # At least one unit before this cut, and one for each part after it.
        low, high = cuts[-1] + 1, len(units) - (num_parts - part)
        cuts.append(low + int(np.argmin(np.abs(ends[low - 1 : high] - target))))
    cuts.append(len(units))
    return [[row for unit in units[a:b] for row in unit] for a, b in pairwise(cuts)]


def _plan(
    parts: list[list[_Row]], *, num_data_ranks: int, **limits: Any
) -> tuple[list[list[list[_Row]]], list[MiniBatch]]:
    """Rows by [data_rank][micro_batch], mini-batches one after the other, and each mini-batch's denominators."""
    rank_rows: list[list[list[_Row]]] = [[] for _ in range(num_data_ranks)]
    mini_batches: list[MiniBatch] = []
    for part in parts:
        lengths = [row.sample.num_tokens for row in part]
        plan = pack(lengths, num_data_ranks=num_data_ranks, **limits)
        for rank, micro_batches in enumerate(plan):
            rank_rows[rank] += [[part[index] for index in members] for members in micro_batches]
        num_tokens = int(sum(row.loss_mask.sum() for row in part))
        mini_batches.append(MiniBatch(num_micro_batches=len(plan[0]), tokens=num_tokens, samples=len(part)))
    return rank_rows, mini_batches


def _arrays(micro_batches: list[list[_Row]], stream: Stream) -> dict[str, np.ndarray]:
    """The arrays of one item, by the names and dtypes of STREAM_ARRAYS."""
    dtypes = STREAM_ARRAYS[stream]
    rows = [row for members in micro_batches for row in members]
    columns: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}
    for row in rows:
        branch = row.sample.branch
        columns["token_ids"].append(np.asarray(branch.token_ids))
        columns["action_mask"].append(branch.action_mask)
        columns["loss_mask"].append(row.loss_mask)
        for name, numbers in _numbers(row.sample, stream).items():
            columns[name].append(_finite_f32(numbers, name, row))
        if stream == "policy":
            columns["span_counts"].append(np.array([len(branch.version_spans)]))
            columns["spans"].append(np.array(branch.version_spans, dtype=np.int64).reshape(-1))
        else:
            columns["bootstrapped"].append(np.array([row.sample.bootstrapped]))
    columns["sample_counts"] = [np.array([len(members) for members in micro_batches])]
    columns["lengths"] = [np.array([row.sample.num_tokens for row in rows])]
    return {
        name: np.concatenate([array.astype(dtype) for array in columns[name]] or [np.zeros(0, dtype)])
        for name, dtype in dtypes.items()
    }


def _numbers(sample: TrainingSample, stream: Stream) -> dict[str, np.ndarray | None]:
    if stream == "policy":
        return {"logprobs": sample.branch.logprobs, "advantages": sample.advantages}
    return {"returns": sample.returns, "old_values": sample.values}


def _finite_f32(numbers: np.ndarray | None, name: str, row: _Row) -> np.ndarray:
    """[T] f32, zero off the action mask."""
    sample = row.sample
    where = f"sample {row.index} (trace {sample.trace_id})"
    if numbers is None:
        raise ContractError(f"{where} has no {name}")
    if len(numbers) != sample.num_tokens:
        raise ContractError(f"{where}: {name} has {len(numbers)} entries for {sample.num_tokens} tokens")
    mask = sample.branch.action_mask
    out = np.zeros(len(numbers), dtype=np.float32)
    with np.errstate(over="ignore"):  # an overflow to inf is refused below, with its name
        out[mask] = np.asarray(numbers)[mask]
    if not np.isfinite(out).all():
        raise NonFiniteError(f"{where}: {name} holds a non-finite number on an action token")
    return out


def _grid_digest(header: GridHeader, digests: list[str]) -> str:
    """sha256 over the item digests and every header field that the ranks share."""
    shared = msgspec.msgpack.encode([header, digests], order="deterministic")
    return hashlib.sha256(shared).hexdigest()
