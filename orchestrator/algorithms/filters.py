"""What leaves the policy's loss: groups that teach nothing, tokens without an advantage.

Notable:
- Only `policy_loss_mask` changes, and with it the policy's denominator. Branches and the critic's grid stay whole.
"""

from __future__ import annotations

import numpy as np

from orchestrator.algorithms.groups import are_equal, branch_scores, scores_of_traces
from services.packing.grid import policy_loss_mask
from services.wire.samples import TrainingSample


def filter_equal_rewards(groups: list[list[TrainingSample]]) -> int:
    """Mask groups of two or more traces whose scores are all equal.

    Args:
        groups: The batch; a group of one trace has nothing to be equal to and stays.

    Returns:
        Number of groups masked.

    Raises:
        NonFiniteError: a reward is not finite.
    """
    num_filtered = 0
    for group in groups:
        scores = branch_scores(group)
        if len(scores_of_traces(group, scores)) >= 2 and are_equal(scores):
            num_filtered += 1
            for sample in group:
                sample.policy_loss_mask = np.zeros(sample.num_tokens, dtype=bool)
    return num_filtered


def prune_zero_advantages(samples: list[TrainingSample]) -> int:
    """Mask tokens whose advantage is exactly 0.

    Args:
        samples: Credited samples.

    Returns:
        Number of tokens that trained before and do not now.
    """
    num_pruned = 0
    for sample in samples:
        if sample.advantages is not None:
            mask = policy_loss_mask(sample)
            kept = mask & (sample.advantages != 0)
            num_pruned += int(mask.sum() - kept.sum())
            sample.policy_loss_mask = kept
    return num_pruned
