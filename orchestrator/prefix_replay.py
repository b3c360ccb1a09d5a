"""Where a recorded trace may be cut so that its prefix becomes a prompt, and what was said up to the cut.

Paper: arXiv 2603.21383 (PivotRL: continue from chosen turns of recorded traces).

Legend: T tokens of a recorded branch.

Notable:
- A cut is the first token of a model turn, right after an observation: the prefix ends with what the model was asked.
- The prefix is prompt: nothing in it trains, its log-probabilities are not needed. The number of action tokens, hence
  the adaptive lambda, counts the suffix; the first value of GAE is that at the cut.
- Whoever continues a prefix must have brought the environment into the state of the cut: `check_prefix` compares what
  it said on the way with what is recorded.

Deviations:
- The turn is chosen by its mean entropy; without entropies by the mean of -log p of what was sampled. The paper looks
  for turns whose local rollouts end differently, which takes rollouts from every turn.
- Turns with nothing between them are one turn: the action mask cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from services.wire.errors import ContractError


def turn_boundaries(action_mask: np.ndarray) -> np.ndarray:
    """Where a branch may be cut: the first token of each model turn but the first.

    Args:
        action_mask: [T] bool.

    Returns:
        Positions, ascending; empty for a branch of one turn, whose only prefix is its prompt.
    """
    return np.flatnonzero(action_mask[1:] & ~action_mask[:-1])[1:] + 1 if len(action_mask) else np.zeros(0, np.int64)


def cut_at(action_mask: np.ndarray, index: int) -> int:
    """Check an index from the data.

    Args:
        action_mask: [T] bool.
        index: Length of the prefix.

    Returns:
        `index`.

    Raises:
        ContractError: naming the boundaries, where the index is none of them.
    """
    boundaries = turn_boundaries(action_mask).tolist()
    if index not in boundaries:
        raise ContractError(f"cut {index} is no turn boundary; those are {boundaries}")
    return index


def cut_by_entropy(action_mask: np.ndarray, entropies: np.ndarray) -> int:
    """The boundary before the turn whose tokens are the least certain.

    Args:
        action_mask: [T] bool.
        entropies: [T] nats, read on action tokens; -log p of the sampled tokens will do.

    Returns:
        Length of the prefix; the earliest of equal turns.

    Raises:
        ContractError: no boundary, entropies of another length, or not finite on an action token.
    """
    if entropies.shape != action_mask.shape:
        raise ContractError(f"{len(entropies)} entropies for {len(action_mask)} tokens")
    if not np.isfinite(entropies[action_mask]).all():
        raise ContractError("a non-finite entropy on an action token")
    boundaries = turn_boundaries(action_mask)
    if not len(boundaries):
        raise ContractError("there is no second turn to cut before")
    ends = np.flatnonzero(action_mask & ~np.append(action_mask[1:], False))[1:] + 1  # of the same turns
    means = [entropies[start:end].mean() for start, end in zip(boundaries, ends, strict=True)]
    return int(boundaries[int(np.argmax(means))])


def segments_of(token_ids: Sequence[int], action_mask: np.ndarray) -> list[list[int]]:
    """Prompt, turn, observation, turn, observation ... of a prefix.

    Args:
        token_ids: [T], the prefix.
        action_mask: [T] bool, of the prefix; false at its first and its last token.

    Returns:
        Runs of equal mask, in order: an odd number, every second one a model turn.
    """
    edges = [0, *(np.flatnonzero(action_mask[1:] != action_mask[:-1]) + 1).tolist(), len(action_mask)]
    return [list(token_ids[start:end]) for start, end in pairwise(edges)]


def check_prefix(said: Sequence[int], prefix_ids: Sequence[int]) -> None:
    """Refuse a restored episode that is not where the recorded one was.

    Args:
        said: Prompt, turns and observations up to the cut, as the environment has just said them.
        prefix_ids: The same, as they are recorded.

    Raises:
        ContractError: naming the first token that differs, or the lengths where one is the other's beginning.
    """
    for position, (now, then) in enumerate(zip(said, prefix_ids, strict=False)):
        if now != then:
            raise ContractError(f"token {position} of {len(prefix_ids)} is {now}, recorded was {then}")
    if len(said) != len(prefix_ids):
        raise ContractError(f"{len(said)} tokens, recorded were {len(prefix_ids)}")
