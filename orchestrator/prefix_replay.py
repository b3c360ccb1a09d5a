"""Traces whose prefix is a fixed prompt: where to cut an old trace, and what of the continued one trains.

Paper: arXiv 2603.21383 (PivotRL: continue from chosen turns of recorded traces).

Legend: T tokens of a branch.

Notable:
- A cut is the first token of a model turn, right after an observation: the prefix ends with what the model was asked.
- The prefix is prompt: nothing in it trains, its log-probabilities are not needed, its step rewards are spent. The
  number of action tokens, hence the adaptive lambda, counts the suffix; the first value of GAE is that at the cut.
- Whoever continues a prefix must have brought the environment into the state of the cut: `check_prefix` compares
  tokens, and a trace that does not continue its prefix is no replay.

Deviations:
- The turn is chosen by its mean entropy; without entropies by the mean of -log p of what was sampled.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from services.wire.errors import ContractError
from services.wire.samples import Branch, VersionSpan


def turn_boundaries(action_mask: np.ndarray) -> np.ndarray:
    """Where a branch may be cut: the first token of each model turn but the first.

    Args:
        action_mask: [T] bool.

    Returns:
        Positions, ascending; empty for a branch of one turn, whose only prefix is its prompt.
    """
    return np.flatnonzero(action_mask[1:] & ~action_mask[:-1])[1:] + 1 if len(action_mask) else np.zeros(0, np.int64)


def cut_at(branch: Branch, index: int) -> int:
    """Check an index from the data.

    Args:
        branch: A recorded branch.
        index: Length of the prefix.

    Returns:
        `index`.

    Raises:
        ContractError: naming the boundaries, where the index is none of them.
    """
    boundaries = turn_boundaries(branch.action_mask).tolist()
    if index not in boundaries:
        raise ContractError(f"cut {index} is no turn boundary of the branch; those are {boundaries}")
    return index


def cut_by_entropy(branch: Branch, entropies: np.ndarray | None = None) -> int | None:
    """The boundary before the turn whose tokens are the least certain.

    Args:
        branch: A recorded branch.
        entropies: [T] nats, read on action tokens; None takes -log p of the sampled tokens.

    Returns:
        Length of the prefix; the earliest of equal turns; None for a branch of one turn.

    Raises:
        ContractError: entropies of another length, or not finite on an action token.
    """
    mask = branch.action_mask
    numbers = -branch.logprobs.astype(np.float64) if entropies is None else np.asarray(entropies, dtype=np.float64)
    if numbers.shape != mask.shape:
        raise ContractError(f"entropies has {len(numbers)} entries for {len(mask)} tokens")
    if not np.isfinite(numbers[mask]).all():
        raise ContractError("entropies holds a non-finite number on an action token")
    boundaries = turn_boundaries(mask)
    if not len(boundaries):
        return None
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))[1:] + 1  # of the same turns
    means = [numbers[start:end].mean() for start, end in zip(boundaries, ends, strict=True)]
    return int(boundaries[int(np.argmax(means))])


def check_prefix(branch: Branch, prefix_ids: np.ndarray) -> None:
    """Refuse a branch that does not continue a prefix.

    Args:
        branch: A branch that was rolled out from the prefix.
        prefix_ids: Token ids.

    Raises:
        ContractError: naming the first token that differs, or that the branch ends within the prefix.
    """
    length = len(prefix_ids)
    if len(branch.token_ids) <= length:
        raise ContractError(f"the branch has {len(branch.token_ids)} tokens, not more than its prefix of {length}")
    differs = np.flatnonzero(branch.token_ids[:length] != prefix_ids)
    if len(differs):
        raise ContractError(f"the branch leaves its prefix at token {differs[0]} of {length}")


def suffix_only(branch: Branch, cut: int) -> Branch:
    """The branch with everything before the cut as prompt.

    Args:
        branch: A whole branch, prefix and continuation.
        cut: Length of the prefix, at least 1.

    Returns:
        A new branch; arrays that change are copies, the others are shared.

    Raises:
        ContractError: a cut that leaves no prefix, or no action token.
    """
    if not 1 <= cut < len(branch.token_ids) or not branch.action_mask[cut:].any():
        raise ContractError(f"cut {cut} leaves no prefix or no action token of a branch of {len(branch.token_ids)}")
    is_suffix = np.arange(len(branch.token_ids)) >= cut  # [T]
    step_rewards = branch.step_rewards
    return dataclasses.replace(
        branch,
        action_mask=branch.action_mask & is_suffix,
        loss_mask=branch.loss_mask & is_suffix,
        logprobs=np.where(is_suffix, branch.logprobs, 0.0).astype(np.float32),
        version_spans=[VersionSpan(max(s.start, cut), s.end, s.version) for s in branch.version_spans if s.end > cut],
        step_rewards=None if step_rewards is None else np.where(is_suffix, step_rewards, 0.0),
    )
