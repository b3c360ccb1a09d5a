"""Grids from samples: denominators, masks, mini-batches, digests, and what may not pass."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.losses import LOSSES
from services.packing.grid import build_grid
from services.wire.codec import decode_item, digest_arrays, encode_item
from services.wire.errors import ContractError, NonFiniteError
from services.wire.grids import STREAM_ARRAYS
from services.wire.samples import VersionSpan
from tests.samples import make_sample
from value_service.losses.mse import mse_loss

HEADER = {
    "seq_len": 16,
    "num_data_ranks": 2,
    "run_id": "run",
    "epoch": 0,
    "step": 3,
    "policy_version": 3,
    "temperature": 1.0,
    "loss_name": "dis",
    "loss_constants": {"eps_low": 0.3, "eps_high": 5.0},
}


def credited(mask, *, trace_id="t", seed=0, **kwargs):
    """A sample with random values, advantages and returns on its action tokens."""
    rng = np.random.default_rng(seed)
    sample = make_sample(mask, trace_id=trace_id, values=rng.normal(size=len(mask)), **kwargs)
    on = sample.branch.action_mask
    sample.advantages = np.where(on, rng.normal(size=len(on)), 0.0)
    sample.returns = np.where(on, rng.normal(size=len(on)), 0.0)
    sample.branch.logprobs = np.where(on, -rng.random(len(on)), 0.0).astype(np.float32)
    sample.branch.token_ids = rng.integers(0, 256, size=len(on)).astype(np.uint32)
    return sample


def batch(count=5, group_size=1):
    masks = [[1] * (1 + i % 5) + [0] * (i % 3) + [1] for i in range(count)]
    return [credited(m, trace_id=f"t{i}", seed=i, group_id=f"g{i // group_size}") for i, m in enumerate(masks)]


def build(samples, stream="policy", **kwargs):
    return build_grid(samples, stream=stream, **(HEADER | kwargs))


def loss_tokens(samples):
    return sum(int(sample.branch.loss_mask.sum()) for sample in samples)


def sample_ids(items):
    """Token ids of every sample in the items, as a sorted list of tuples."""
    found = []
    for item in items:
        start = 0
        for length in item.arrays["lengths"].tolist():
            found.append(tuple(item.arrays["token_ids"][start : start + length].tolist()))
            start += length
    return sorted(found)


@pytest.mark.parametrize("stream", ["policy", "critic"])
@pytest.mark.parametrize("num_data_ranks", [1, 2, 3, 8])
def test_every_rank_gets_one_item_of_equal_shape(stream, num_data_ranks):
    samples = batch()
    items = build(samples, stream, num_data_ranks=num_data_ranks)
    assert [item.header.data_rank for item in items] == list(range(num_data_ranks))
    assert len({len(item.arrays["sample_counts"]) for item in items}) == 1
    assert sample_ids(items) == sorted(tuple(sample.branch.token_ids.tolist()) for sample in samples)
    for item in items:
        assert {name: array.dtype.str for name, array in item.arrays.items()} == STREAM_ARRAYS[stream]
        num_tokens = int(item.arrays["lengths"].sum())
        for name in set(STREAM_ARRAYS[stream]) & {"token_ids", "action_mask", "loss_mask", "advantages", "returns"}:
            assert len(item.arrays[name]) == num_tokens


@pytest.mark.parametrize("stream", ["policy", "critic"])
def test_an_item_survives_the_codec(stream):
    for item in build(batch(), stream):
        frames = [bytes(frame) for frame in encode_item(item)]
        decoded = decode_item(frames, max_bytes=2**20)
        assert decoded.header == item.header
        for name, array in item.arrays.items():
            np.testing.assert_array_equal(decoded.arrays[name], array)


def test_denominators_count_over_all_ranks():
    samples = batch()
    for num_data_ranks in (1, 2, 8):
        for item in build(samples, num_data_ranks=num_data_ranks):
            (mini_batch,) = item.header.mini_batches
            assert (mini_batch.tokens, mini_batch.samples) == (loss_tokens(samples), 5)


def test_both_streams_carry_the_same_loss_tokens_in_their_own_layouts():
    samples = batch()
    policy = build(samples, "policy", num_data_ranks=2)
    critic = build(samples, "critic", num_data_ranks=3, seq_len=32)
    assert sum(int(item.arrays["loss_mask"].sum()) for item in policy) == loss_tokens(samples)
    assert sum(int(item.arrays["loss_mask"].sum()) for item in critic) == loss_tokens(samples)


def test_the_critic_grid_says_which_samples_hold_the_critic_s_own_value():
    """In the order the samples were packed in, whatever that is; the policy's grid has no such array."""
    samples = batch(5)
    for sample, cut in zip(samples, [True, False, True, False, False], strict=True):
        sample.bootstrapped = cut
    expected = {tuple(sample.branch.token_ids.tolist()): int(sample.bootstrapped) for sample in samples}
    found = {}
    for item in build(samples, "critic"):
        starts = np.cumsum(item.arrays["lengths"]) - item.arrays["lengths"]
        for start, length, flag in zip(starts, item.arrays["lengths"], item.arrays["bootstrapped"], strict=True):
            found[tuple(item.arrays["token_ids"][start : start + length].tolist())] = int(flag)
    assert found == expected
    assert "bootstrapped" not in build(samples, "policy")[0].arrays


def test_a_filter_on_the_policy_mask_leaves_the_critic_alone():
    samples = batch(2)
    samples[0].policy_loss_mask = np.zeros(samples[0].num_tokens, dtype=bool)
    policy, critic = build(samples, "policy"), build(samples, "critic")
    assert policy[0].header.mini_batches[0].samples == 1
    assert policy[0].header.mini_batches[0].tokens == int(samples[1].branch.loss_mask.sum())
    assert sample_ids(policy) == [tuple(samples[1].branch.token_ids.tolist())]
    assert critic[0].header.mini_batches[0].tokens == loss_tokens(samples)


@pytest.mark.parametrize("stream", ["policy", "critic"])
def test_a_batch_without_loss_tokens_is_a_grid_without_micro_batches(stream):
    for samples in ([], [credited([0, 0])], [credited([1, 1], loss_mask=[0, 0])]):
        items = build(samples, stream, num_mini_batches=3)
        assert len(items) == 2
        for item in items:
            (mini_batch,) = item.header.mini_batches
            assert (mini_batch.num_micro_batches, mini_batch.tokens, mini_batch.samples) == (0, 0, 0)
            assert [micro for _, micro in item.mini_batches()] == [[]]


def test_dummies_are_flagged_by_their_sample_count():
    items = build(batch(1), num_data_ranks=3)
    micro_batches = [next(iter(item.mini_batches()))[1] for item in items]
    assert [len(micro) for micro in micro_batches] == [1, 1, 1]
    assert [micro[0].is_dummy for micro in micro_batches] == [False, True, True]


def test_version_spans_travel_with_their_sample():
    sample = credited([1, 1, 0, 1])
    sample.branch.version_spans = [VersionSpan(1, 2, 4), VersionSpan(2, 3, 5), VersionSpan(4, 5, 5)]
    (item,) = build([sample, *batch(1)], num_data_ranks=1)
    spans = [spans for _, micro in item.mini_batches() for m in micro for spans in m.spans]
    assert [(1, 2, 4), (2, 3, 5), (4, 5, 5)] in spans
    assert len(spans) == 2


def test_numbers_off_the_action_mask_never_travel():
    """Whatever the samples hold there, even NaN."""
    sample = credited([1, 0, 1])
    off = ~sample.branch.action_mask
    for array in (sample.advantages, sample.returns, sample.values, sample.branch.logprobs):
        array[off] = math.nan
    for stream, names in (("policy", ("logprobs", "advantages")), ("critic", ("returns", "old_values"))):
        (item,) = build([sample], stream, num_data_ranks=1)
        for name in names:
            assert not item.arrays[name][off].any()
            assert item.arrays[name][~off].all()


def test_samples_are_neither_changed_nor_shared():
    samples = batch()
    before = [digest_arrays({"advantages": s.advantages.astype("<f4"), "logprobs": s.branch.logprobs}) for s in samples]
    items = build(samples)
    for item in items:
        for array in item.arrays.values():
            array.fill(0)
    after = [digest_arrays({"advantages": s.advantages.astype("<f4"), "logprobs": s.branch.logprobs}) for s in samples]
    assert before == after


@pytest.mark.parametrize(
    ("stream", "field"),
    [("policy", "advantages"), ("policy", "logprobs"), ("critic", "returns"), ("critic", "old_values")],
)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e300])
def test_a_non_finite_number_on_an_action_token_is_refused_with_its_trace(stream, field, bad):
    """1e300 is finite in f64 and infinite on the wire."""
    sample = credited([1, 1], trace_id="bad")
    target = {"logprobs": sample.branch, "old_values": sample}.get(field, sample)
    name = {"old_values": "values"}.get(field, field)
    array = np.array(getattr(target, name), dtype=np.float64)
    array[1] = bad
    setattr(target, name, array)
    with pytest.raises(NonFiniteError, match=rf"sample 1 \(trace bad\): {field}"):
        build([*batch(1), sample], stream)


@pytest.mark.parametrize(
    ("stream", "name", "field"),
    [("policy", "advantages", "advantages"), ("critic", "returns", "returns"), ("critic", "values", "old_values")],
)
def test_a_missing_or_short_array_is_refused(stream, name, field):
    sample = credited([1, 1])
    setattr(sample, name, getattr(sample, name)[:-1])
    with pytest.raises(ContractError, match=f"{field} has 2 entries for 3 tokens"):
        build([sample], stream)
    setattr(sample, name, None)
    with pytest.raises(ContractError, match=f"has no {field}"):
        build([sample], stream)


def test_a_loss_mask_off_the_action_mask_is_refused():
    sample = credited([1, 0, 1])
    sample.policy_loss_mask = np.array([False, True, True, True])
    with pytest.raises(ContractError, match="off the action mask"):
        build([sample])
    sample.policy_loss_mask = np.array([True])
    with pytest.raises(ContractError, match="loss mask has 1 entries"):
        build([sample])


@pytest.mark.parametrize(("kwargs", "size"), [({}, 21), ({"pad_multiple": 16}, 32)])
def test_an_over_long_sample_is_refused_with_its_index_and_trace(kwargs, size):
    sample = credited([1] * 20, trace_id="long")
    with pytest.raises(ValueError, match=rf"sample 1 \(trace long\) takes {size} tokens of the policy grid.*limit of"):
        build([credited([1]), sample], **kwargs)


@pytest.mark.parametrize("field", ["num_mini_batches", "num_data_ranks", "pad_multiple"])
def test_an_argument_below_one_is_refused(field):
    with pytest.raises(ValueError, match=field):
        build(batch(), **{field: 0})


# mini-batches ---------------------------------------------------------------------------------------------------------


def groups_of(items):
    """Group ids per mini-batch, over all ranks; a sample's first token id names its group in these tests."""
    parts = []
    for iterators in zip(*(item.mini_batches() for item in items), strict=True):
        ids = set()
        for _, micro_batches in iterators:
            for micro_batch in micro_batches:
                starts = np.cumsum(micro_batch.lengths).astype(np.int64) - micro_batch.lengths
                ids |= set(micro_batch.arrays["token_ids"][starts].tolist())
        parts.append(ids)
    return parts


def named_groups(sizes):
    samples = []
    for group, size in enumerate(sizes):
        for i in range(size):
            sample = credited([1, 1], trace_id=f"{group}-{i}", group_id=f"g{group}")
            sample.branch.token_ids[0] = group
            samples.append(sample)
    return samples


def test_mini_batches_keep_groups_whole():
    items = build(named_groups([2, 2, 2, 2]), num_mini_batches=2)
    assert groups_of(items) == [{0, 1}, {2, 3}]
    assert [m.tokens for m in items[0].header.mini_batches] == [8, 8]
    assert [m.samples for m in items[0].header.mini_batches] == [4, 4]


def test_mini_batches_of_unequal_groups_are_cut_at_the_nearest_border():
    items = build(named_groups([1, 1, 6, 1, 1]), num_mini_batches=2)
    assert groups_of(items) in ([{0, 1}, {2, 3, 4}], [{0, 1, 2}, {3, 4}])
    items = build(named_groups([9, 1, 1]), num_mini_batches=3)
    assert groups_of(items) == [{0}, {1}, {2}]


def test_fewer_groups_than_mini_batches_are_split():
    items = build(named_groups([4]), num_mini_batches=2)
    assert [m.samples for m in items[0].header.mini_batches] == [2, 2]


def test_there_are_never_more_mini_batches_than_samples():
    items = build(named_groups([1, 1]), num_mini_batches=5)
    assert [m.samples for m in items[0].header.mini_batches] == [1, 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 3))
def test_any_split_keeps_every_sample_once_and_every_part_non_empty(sizes, num_mini_batches, num_data_ranks):
    samples = named_groups(sizes)
    items = build(samples, num_mini_batches=num_mini_batches, num_data_ranks=num_data_ranks)
    header = items[0].header
    assert sum(m.samples for m in header.mini_batches) == len(samples)
    assert all(m.samples > 0 for m in header.mini_batches)
    assert len(header.mini_batches) == min(num_mini_batches, len(samples))
    if len(sizes) >= num_mini_batches:  # enough groups, so none is cut
        parts = groups_of(items)
        assert sum(len(part) for part in parts) == len(sizes)


# digests --------------------------------------------------------------------------------------------------------------


def test_digests_are_of_the_content():
    items = build(batch())
    again = build(batch())
    assert [item.header for item in items] == [item.header for item in again]
    assert len({item.header.grid_digest for item in items}) == 1
    for item in items:
        assert item.header.digest == digest_arrays(item.arrays)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "other"},
        {"epoch": 1},
        {"step": 4},
        {"policy_version": 4},
        {"temperature": 0.5},
        {"loss_name": "ppo_clip"},
        {"loss_constants": {"eps_low": 0.3, "eps_high": 4.0}},
        {"num_mini_batches": 2},
    ],
)
def test_the_grid_digest_covers_what_the_ranks_share(change):
    assert build(batch())[0].header.grid_digest != build(batch(), **change)[0].header.grid_digest


def test_the_grid_digest_covers_every_rank_s_arrays():
    samples = batch()
    before = build(samples)[0].header.grid_digest
    samples[-1].advantages = samples[-1].advantages + samples[-1].branch.action_mask
    assert build(samples)[0].header.grid_digest != before


def test_the_header_does_not_share_the_caller_s_constants():
    constants = {"eps_low": 0.3}
    items = build(batch(), loss_constants=constants)
    constants["eps_low"] = 9.0
    assert items[0].header.loss_constants == {"eps_low": 0.3}
    assert msgspec.to_builtins(items[0].header)["stream"] == "policy"


# one denominator ------------------------------------------------------------------------------------------------------


def toy_gradient(items, stream):
    """Gradient of a per-token-id table over all ranks and micro-batches: what a trainer's all-reduce(SUM) gives."""
    torch.manual_seed(0)
    table = torch.randn(256, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for item in items:
        for mini_batch, micro_batches in item.mini_batches():
            for micro_batch in micro_batches:
                arrays = {name: torch.from_numpy(a.astype(np.float64)) for name, a in micro_batch.arrays.items()}
                output = table[arrays["token_ids"].long()]
                if stream == "critic":
                    loss, _ = mse_loss(output, arrays["returns"], arrays["loss_mask"], denominator=mini_batch.tokens)
                else:
                    loss, _ = LOSSES[item.header.loss_name](
                        arrays["logprobs"] + 0.1 * output,
                        arrays["logprobs"],
                        arrays["advantages"],
                        arrays["loss_mask"],
                        denominator=mini_batch.tokens,
                        **item.header.loss_constants,
                    )
                loss.backward()
                total += loss.detach()
    return total, table.grad


@pytest.mark.parametrize("stream", ["policy", "critic"])
@pytest.mark.parametrize(("seq_len", "num_data_ranks"), [(10, 1), (16, 2), (64, 3), (10, 16)])
def test_loss_and_gradient_do_not_depend_on_the_packing(stream, seq_len, num_data_ranks):
    samples = batch(12)
    loss, grad = toy_gradient(build(samples, stream, seq_len=512, num_data_ranks=1), stream)
    other_loss, other_grad = toy_gradient(
        build(samples, stream, seq_len=seq_len, num_data_ranks=num_data_ranks), stream
    )
    torch.testing.assert_close(other_loss, loss, atol=1e-14, rtol=1e-13)
    torch.testing.assert_close(other_grad, grad, atol=1e-14, rtol=1e-13)
