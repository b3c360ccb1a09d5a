"""Tokens that several branches of a trace share: one advantage and one target for all copies.

Notable:
- A shared token trains in the first branch that holds it; its copies have the loss mask off. So a token is shared by
  branch i, which trains it, and a later branch j of the same trace, if both agree on all tokens up to it and j holds it
  as an action that does not train.
- The mean over branches is the tree's own backup. The first branch's number is biased towards that branch where the
  branches' rewards differ.
- Only the copy that trains is changed: nobody reads the others.
"""

from __future__ import annotations

import numpy as np

from services.wire.samples import TrainingSample


def average_shared_nodes(samples: list[TrainingSample]) -> None:
    """Replace advantages and returns of shared tokens by their mean over the branches that hold them.

    Args:
        samples: Credited samples, a trace's branches in order; changed ones get new arrays.
    """
    traces: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        traces.setdefault(sample.trace_id, []).append(sample)
    for trace in traces.values():
        if len(trace) > 1:
            _average(trace, "advantages")
            _average(trace, "returns")


def _average(trace: list[TrainingSample], name: str) -> None:
    credited = [getattr(sample, name) for sample in trace]
    if any(array is None for array in credited):
        return
    for index, sample in enumerate(trace):
        total = np.array(credited[index], dtype=np.float64)  # [T]
        count = np.ones(len(total))
        for other, numbers in zip(trace[index + 1 :], credited[index + 1 :], strict=True):
            shared = _shared(sample, other)  # [common]
            total[: len(shared)][shared] += numbers[: len(shared)][shared]
            count[: len(shared)][shared] += 1.0
        setattr(sample, name, total / count)


def _shared(sample: TrainingSample, other: TrainingSample) -> np.ndarray:
    """[common] bool over the first tokens on which two branches agree: trained in one, held by the other."""
    first, second = sample.branch, other.branch
    length = min(sample.num_tokens, other.num_tokens)
    differs = np.flatnonzero(first.token_ids[:length] != second.token_ids[:length])
    common = int(differs[0]) if len(differs) else length
    return first.loss_mask[:common] & second.action_mask[:common] & ~second.loss_mask[:common]
