"""Nodes that branches share: one advantage and one target, the first branch's or the mean."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.algorithms import build
from services.config.algorithm import GrpoConfig, SaoConfig
from tests.samples import make_sample


def branch(reward, values, *, loss_mask=None, trace_id="a", tokens=None, mask=(1, 1, 0, 1)):
    sample = make_sample(list(mask), reward=reward, values=values, loss_mask=loss_mask, trace_id=trace_id)
    if tokens is not None:
        sample.branch.token_ids = np.array(tokens, dtype=np.uint32)
    return sample


def tree():
    """Two leaves, rewards 1 and 0, below a node of two action tokens; values 0.5 in the node, 0.75 and 0.25 below."""
    return (
        branch(1.0, [0.5, 0.5, 0, 0.75], tokens=[0, 1, 2, 3, 4]),
        branch(0.0, [0.5, 0.5, 0, 0.25], tokens=[0, 1, 2, 9, 8], loss_mask=[0, 0, 0, 1]),
    )


def credit(samples, shared_nodes, **kwargs):
    config = SaoConfig(type="sao", alpha=1e12, shared_nodes=shared_nodes, **kwargs)
    return build(config).credit([list(samples)])


def test_the_first_branch_speaks_for_a_shared_node_by_default():
    first, second = tree()
    credit((first, second), "first")
    np.testing.assert_allclose(first.advantages, [0, 0.5, 0.5, 0, 0.25], atol=1e-9)
    assert first.returns.tolist() == [0, 1, 1, 0, 1]
    np.testing.assert_allclose(second.advantages[-1], -0.25)


def test_or_the_mean_over_branches_does():
    """The tree's own backup: the node leads to 1 and to 0."""
    first, second = tree()
    credit((first, second), "mean")
    np.testing.assert_allclose(first.advantages, [0, 0, 0, 0, 0.25], atol=1e-9)
    assert first.returns.tolist() == [0, 0.5, 0.5, 0, 1]
    assert second.returns[-1] == 0.0


def test_the_suffix_is_the_same_either_way():
    for shared_nodes in ("first", "mean"):
        first, second = tree()
        credit((first, second), shared_nodes)
        assert (first.advantages[-1], second.advantages[-1]) == (0.25, -0.25)


def test_three_branches_with_nested_nodes():
    """The first token is shared by all three, the second by two."""
    samples = [
        branch(3.0, [0] * 3, mask=(1, 1, 1), tokens=[0, 1, 2, 3]),
        branch(0.0, [0] * 3, mask=(1, 1, 1), tokens=[0, 1, 2, 4], loss_mask=[0, 0, 1]),
        branch(0.0, [0] * 3, mask=(1, 1, 1), tokens=[0, 1, 5, 6], loss_mask=[0, 1, 1]),
    ]
    credit(samples, "mean")
    assert samples[0].returns.tolist() == [0, 1.0, 1.5, 3.0]


def test_equal_tokens_that_both_train_are_two_nodes():
    """Sampled twice, not shared; and branches of other traces are never shared."""
    twice = [branch(1.0, [0] * 4), branch(0.0, [0] * 4)]
    others = [branch(1.0, [0] * 4, trace_id="a"), branch(0.0, [0] * 4, trace_id="b", loss_mask=[0, 0, 0, 1])]
    for samples in (twice, others):
        credit(samples, "mean")
        assert samples[0].returns.tolist() == [0, 1, 1, 0, 1]


def test_grpo_knows_shared_nodes_too():
    first, second = tree()
    other = branch(1.0, [0] * 4, trace_id="b")
    config = GrpoConfig(type="grpo", shared_nodes="mean", std_normalize=False)
    build(config).credit([[first, second, other]])
    assert first.advantages.tolist() == pytest.approx([0, -0.25, -0.25, 0, 0.25])
    assert first.returns is None


def test_inputs_are_not_changed():
    samples = tree()
    kept = [array for s in samples for array in (s.values, s.branch.loss_mask, s.branch.token_ids, s.branch.logprobs)]
    before = [array.tobytes() for array in kept]
    credit(samples, "mean")
    assert before == [array.tobytes() for array in kept]
