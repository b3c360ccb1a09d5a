"""A grid item: what one data rank trains in one step, as a header and named flat arrays.

Legend: M micro-batches of this rank, S samples, T tokens, N version spans; all concatenated in order.

Notable:
- A grid is `[data_rank][micro_batch]`. Every data rank has the same number of micro-batches; `sample_counts[m] == 0`
  marks a dummy, which the trainer makes fresh (short, fully masked), so it can alias nothing.
- Loss denominators are in the header, one set per optimizer step, equal on all ranks (law 1).
- `digest` identifies this item's content; `grid_digest` the whole grid's, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from services.wire.errors import ContractError

Stream = Literal["policy", "critic"]

COMMON_ARRAYS: dict[str, str] = {
    "sample_counts": "<u4",  # [M] samples per micro-batch
    "lengths": "<u4",  # [S] tokens per sample
    "token_ids": "<u4",  # [T]
    "action_mask": "|u1",  # [T]
    "loss_mask": "|u1",  # [T]
}
STREAM_ARRAYS: dict[Stream, dict[str, str]] = {
    "policy": COMMON_ARRAYS
    | {
        "logprobs": "<f4",  # [T] rollout log-probabilities
        "advantages": "<f4",  # [T]
        "span_counts": "<u4",  # [S] version spans per sample
        "spans": "<u4",  # [3 N] start, end, version
    },
    "critic": COMMON_ARRAYS
    | {
        "returns": "<f4",  # [T] value targets
        "old_values": "<f4",  # [T] values at scoring time
        "bootstrapped": "|u1",  # [S] 1 where the targets hold the critic's own value
    },
}
TOKEN_ARRAYS = ("token_ids", "action_mask", "loss_mask", "logprobs", "advantages", "returns", "old_values")
SAMPLE_ARRAYS = ("bootstrapped",)
"""Besides those that say where a sample lies, its tokens and its spans."""


class MiniBatch(msgspec.Struct, frozen=True):
    """One optimizer step of a grid: how many micro-batches a rank runs, and the global loss denominators."""

    num_micro_batches: int
    tokens: int
    """loss tokens over all data ranks"""
    samples: int
    """samples with at least one loss token, over all data ranks"""


Denominator = Literal["token_mean", "sequence_mean", "constant"]
"""What a loss is a mean of: see `GridHeader.divisor`."""


class GridHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a trainer must know about a grid item before it touches an array."""

    run_id: str
    epoch: int
    stream: Stream
    step: int
    policy_version: int
    data_rank: int
    num_data_ranks: int
    temperature: float
    loss_name: str
    loss_constants: dict[str, float]
    mini_batches: list[MiniBatch]
    digest: str
    grid_digest: str
    denominator: Denominator = "token_mean"
    denominator_tokens: int = 0
    """what stands for a sample's length with "constant"; unused otherwise"""

    def divisor(self, mini_batch: MiniBatch) -> float:
        """What an optimizer step's loss sum over all ranks is divided by, at least 1.

        token_mean: all loss tokens. sequence_mean: samples, where a token counts 1 / (loss tokens of its sample).
        constant: samples times `denominator_tokens`, whatever their lengths.

        Raises:
            ContractError: "constant" without its number.
        """
        if self.denominator == "token_mean":
            return max(mini_batch.tokens, 1)
        if self.denominator == "sequence_mean":
            return max(mini_batch.samples, 1)
        if self.denominator_tokens < 1:
            raise ContractError(f"a constant denominator of {self.denominator_tokens} tokens a sample")
        return max(mini_batch.samples, 1) * self.denominator_tokens

    @property
    def key(self) -> tuple[int, str, int, int]:
        """(epoch, stream, step, data rank): what a receiver is idempotent on."""
        return (self.epoch, self.stream, self.step, self.data_rank)


@dataclass(slots=True)
class MicroBatch:
    """Views of one micro-batch; a dummy has S_m = 0.

    Example: two samples of 4 and 3 tokens in the critic's stream: lengths [4, 3], arrays["returns"] of 7 entries,
    sample_arrays {"bootstrapped": [0, 1]}, spans [].
    """

    lengths: np.ndarray
    """[S_m]"""
    arrays: dict[str, np.ndarray]
    """the stream's TOKEN_ARRAYS, [T_m] each"""
    spans: list[list[tuple[int, int, int]]]
    """version spans by sample; empty in the critic's stream"""
    sample_arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """the stream's SAMPLE_ARRAYS, [S_m] each"""

    @property
    def is_dummy(self) -> bool:
        """True where this rank only fills the count."""
        return len(self.lengths) == 0


@dataclass(slots=True)
class GridItem:
    """A header and its arrays, by the names of STREAM_ARRAYS."""

    header: GridHeader
    arrays: dict[str, np.ndarray]

    def mini_batches(self) -> Iterator[tuple[MiniBatch, list[MicroBatch]]]:
        """Yield each optimizer step's denominators with this rank's micro-batches."""
        micro_batches = self._micro_batches()
        for mini_batch in self.header.mini_batches:
            yield mini_batch, [next(micro_batches) for _ in range(mini_batch.num_micro_batches)]

    def _micro_batches(self) -> Iterator[MicroBatch]:
        lengths = self.arrays["lengths"]
        sample = token = span = 0
        token_arrays = {name: self.arrays[name] for name in TOKEN_ARRAYS if name in self.arrays}
        sample_arrays = {name: self.arrays[name] for name in SAMPLE_ARRAYS if name in self.arrays}
        for count in self.arrays["sample_counts"].tolist():
            own_lengths = lengths[sample : sample + count]
            num_tokens = int(own_lengths.sum())
            spans: list[list[tuple[int, int, int]]] = []
            if "spans" in self.arrays:
                for num_spans in self.arrays["span_counts"][sample : sample + count].tolist():
                    rows = self.arrays["spans"][3 * span : 3 * (span + num_spans)].reshape(-1, 3)
                    spans.append([(int(a), int(b), int(v)) for a, b, v in rows])
                    span += num_spans
            yield MicroBatch(
                lengths=own_lengths,
                arrays={name: array[token : token + num_tokens] for name, array in token_arrays.items()},
                spans=spans,
                sample_arrays={name: array[sample : sample + count] for name, array in sample_arrays.items()},
            )
            sample += count
            token += num_tokens
