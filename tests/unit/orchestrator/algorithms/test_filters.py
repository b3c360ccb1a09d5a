"""Filters and pruning: they reach the policy's grid and no further."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.algorithms import build
from services.config.algorithm import EvpoConfig, GrpoConfig, PpoConfig, SaoConfig
from services.packing.grid import build_grid
from tests.samples import make_sample


def group(*rewards, group_id="g0"):
    return [
        make_sample([1, 1], reward=reward, trace_id=f"{group_id}-{i}", group_id=group_id, values=[0.5, 0.5])
        for i, reward in enumerate(rewards)
    ]


def tokens(samples, stream):
    """Loss tokens of a stream's only mini-batch."""
    items = build_grid(
        samples,
        stream=stream,
        seq_len=8,
        num_data_ranks=1,
        run_id="r",
        epoch=0,
        step=0,
        policy_version=0,
        temperature=1.0,
        loss_name="x",
        loss_constants={},
    )
    return items[0].header.mini_batches[0].tokens


def test_groups_of_equal_rewards_train_the_critic_only():
    """All right, all wrong, mixed."""
    right, wrong, mixed = group(1.0, 1.0), group(0.0, 0.0, group_id="g1"), group(1.0, 0.0, group_id="g2")
    metrics = build(PpoConfig(type="ppo", filter_equal_rewards=True)).credit([right, wrong, mixed])
    samples = [*right, *wrong, *mixed]
    assert metrics["credit/filtered_groups"] == 2
    assert (tokens(samples, "policy"), tokens(samples, "critic")) == (4, 12)
    assert mixed[0].policy_loss_mask is None
    assert all(sample.branch.loss_mask.sum() == 2 for sample in samples), "branches stay whole"


def test_a_group_of_one_trace_is_never_filtered():
    """Nor is one trace with two branches of the same reward."""
    alone, branched = group(1.0), group(1.0, 1.0, group_id="g1")
    branched[1].trace_id = branched[0].trace_id
    metrics = build(SaoConfig(type="sao", filter_equal_rewards=True)).credit([alone, branched])
    assert metrics["credit/filtered_groups"] == 0
    assert tokens([*alone, *branched], "policy") == 6


def test_whitening_counts_what_still_trains():
    flat, mixed = group(1.0, 1.0), group(1.0, 0.0, group_id="g1")
    build(PpoConfig(type="ppo", filter_equal_rewards=True)).credit([flat, mixed])
    counted = np.concatenate([sample.advantages[1:] for sample in mixed])
    assert counted.mean() == pytest.approx(0, abs=1e-12) and counted.std(ddof=1) == pytest.approx(1)


def test_tokens_without_an_advantage_leave_the_policy_s_loss():
    """The critic predicts the outcome exactly at one token."""
    sample = make_sample([1, 1, 1], reward=1.0, values=[0.5, 1.0, 0.25])
    config = PpoConfig(type="ppo", whiten=False, prune_zero_advantages=True)
    metrics = build(config).credit([[sample]])
    assert metrics["credit/pruned_tokens"] == 1
    assert sample.policy_loss_mask.tolist() == [False, True, False, True]
    assert (tokens([sample], "policy"), tokens([sample], "critic")) == (2, 3)


def test_pruning_keeps_what_a_filter_took():
    flat, mixed = group(1.0, 1.0), group(1.0, 0.0, group_id="g1")
    config = GrpoConfig(type="grpo", filter_equal_rewards=True, prune_zero_advantages=True)
    metrics = build(config).credit([flat, mixed])
    assert (metrics["credit/filtered_groups"], metrics["credit/pruned_tokens"]) == (1, 0)
    assert tokens([*flat, *mixed], "policy") == 4


def test_pruning_a_flat_group_of_grpo_drops_it():
    flat, mixed = group(1.0, 1.0), group(1.0, 0.0, group_id="g1")
    metrics = build(GrpoConfig(type="grpo", prune_zero_advantages=True)).credit([flat, mixed])
    assert metrics["credit/pruned_tokens"] == 4
    assert tokens([*flat, *mixed], "policy") == 4


def test_a_batch_that_is_filtered_whole_takes_no_policy_step():
    samples = group(1.0, 1.0)
    build(EvpoConfig(type="evpo", filter_equal_rewards=True)).credit([samples])
    assert (tokens(samples, "policy"), tokens(samples, "critic")) == (0, 4)


def test_without_filters_the_masks_stay_unset():
    samples = group(1.0, 1.0)
    metrics = build(GrpoConfig(type="grpo")).credit([samples])
    assert all(sample.policy_loss_mask is None and sample.value_loss_mask is None for sample in samples)
    assert not {"credit/filtered_groups", "credit/pruned_tokens"} & set(metrics)


def test_crediting_again_starts_from_whole_masks():
    """Advantages of refreshed values are pruned by themselves; targets and the critic's mask stay."""
    sample = make_sample([1, 1], reward=1.0, values=[1.0, 0.5])
    config = PpoConfig(type="ppo", whiten=False, prune_zero_advantages=True, value_lambda=0.5, granularity="step_last")
    algorithm = build(config.model_copy(update={"granularity": "token"}))
    algorithm.credit([[sample]])
    assert sample.policy_loss_mask.tolist() == [False, False, True]
    targets = sample.returns.tobytes()
    sample.values = np.array([0.0, 0.5, 1.0])
    algorithm.credit_policy_again([[sample]])
    assert sample.policy_loss_mask.tolist() == [False, True, False]
    assert sample.advantages.tolist() == [0, 0.5, 0]
    assert sample.returns.tobytes() == targets
