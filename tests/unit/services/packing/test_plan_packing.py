"""Packing: nothing lost, nothing over the limit, ranks alike, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.packing.cost import flop_cost
from services.packing.plan import pack


def members(plan):
    return sorted(index for rank in plan for micro_batch in rank for index in micro_batch)


def loads(plan, lengths):
    return [sum(lengths[index] for micro_batch in rank for index in micro_batch) for rank in plan]


def max_over_mean(plan, costs):
    per_rank = loads(plan, costs)
    return max(per_rank) / (sum(per_rank) / len(plan))


def check(plan, lengths, seq_len, num_data_ranks, pad_multiple=1, max_samples=None):
    assert len(plan) == num_data_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert members(plan) == list(range(len(lengths)))
    for rank in plan:
        for micro_batch in rank:
            assert sum(math.ceil(lengths[i] / pad_multiple) * pad_multiple for i in micro_batch) <= seq_len
            assert max_samples is None or len(micro_batch) <= max_samples


def test_one_rank_fills_its_bins():
    plan = pack([5, 3, 4, 4], seq_len=8, num_data_ranks=1)
    check(plan, [5, 3, 4, 4], 8, 1)
    assert len(plan[0]) == 2


def test_206_samples_on_4_ranks_differ_by_at_most_one():
    for seq_len in (8, 32, 1024):
        plan = pack([1] * 206, seq_len=seq_len, num_data_ranks=4)
        check(plan, [1] * 206, seq_len, 4)
        assert sorted(loads(plan, [1] * 206), reverse=True) == [52, 52, 51, 51]


def test_fewer_samples_than_ranks_gives_real_bins_and_dummies():
    plan = pack([3, 2, 1], seq_len=8, num_data_ranks=4)
    check(plan, [3, 2, 1], 8, 4)
    assert sorted(len(rank[0]) for rank in plan) == [0, 1, 1, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_rank_has_the_same_number_of_micro_batches(count):
    lengths = [6] * count
    plan = pack(lengths, seq_len=8, num_data_ranks=4)
    check(plan, lengths, 8, 4)
    assert len(plan[0]) == math.ceil(count / 4)


def test_no_sample_means_no_micro_batch():
    assert pack([], seq_len=8, num_data_ranks=3) == [[], [], []]


def test_bursty_ranks_are_levelled():
    plan = pack([8] + [1] * 8, seq_len=8, num_data_ranks=2)
    check(plan, [8] + [1] * 8, 8, 2)
    assert loads(plan, [8] + [1] * 8) == [8, 8]
    assert len(plan[0]) == 1
    plan = pack([8, 8, 8, 1], seq_len=8, num_data_ranks=2)
    check(plan, [8, 8, 8, 1], 8, 2)
    assert len(plan[0]) == 2


def test_dummies_come_last_on_their_rank():
    plan = pack([8] * 5, seq_len=8, num_data_ranks=4)
    for rank in plan:
        emptiness = [not micro_batch for micro_batch in rank]
        assert emptiness == sorted(emptiness)


def test_the_heaviest_bin_of_a_round_goes_to_the_lightest_rank():
    plan = pack([10, 9, 8, 7], seq_len=10, num_data_ranks=2)
    assert loads(plan, [10, 9, 8, 7]) == [17, 17]


def test_where_spreading_gets_stuck_the_first_fit_bins_are_dealt():
    """6+4 and 5+3+2 fill two bins exactly; levelled one by one, 6+3 and 5+4 leave no room for the 2."""
    lengths = [6, 5, 4, 3, 2]
    plan = pack(lengths, seq_len=10, num_data_ranks=2)
    check(plan, lengths, 10, 2)
    assert plan == [[[0, 2]], [[1, 3, 4]]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_data_ranks", [2, 4, 8])
def test_tokens_are_balanced_over_ranks_on_bursty_lengths(seed, num_data_ranks):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(2048, np.exp(rng.normal(5, 1.2, size=256)).astype(int) + 8).tolist()
    plan = pack(lengths, seq_len=2048, num_data_ranks=num_data_ranks)
    check(plan, lengths, 2048, num_data_ranks)
    tokens = loads(plan, lengths)
    assert max(tokens) / (sum(tokens) / num_data_ranks) < 1.3


@pytest.mark.parametrize("cost", [lambda n: n * n, [25.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
def test_ranks_are_balanced_by_the_given_cost(cost):
    """One sample of length 5 costs as much as 25 of length 1, so it stays alone."""
    lengths = [5, 1, 1, 1, 1, 1]
    plan = pack(lengths, seq_len=10, num_data_ranks=2, cost=cost)
    check(plan, lengths, 10, 2)
    assert sorted(members([rank]) for rank in plan) == [[0], [1, 2, 3, 4, 5]]


def test_lengths_are_rounded_up_to_the_multiple():
    plan = pack([5, 5], seq_len=15, num_data_ranks=1, pad_multiple=4)
    check(plan, [5, 5], 15, 1, pad_multiple=4)
    assert len(plan[0]) == 2


@pytest.mark.parametrize(("pad_multiple", "limit"), [(1, 8), (4, 11)])
def test_an_over_long_sample_is_refused_with_its_index_length_and_limit(pad_multiple, limit):
    with pytest.raises(ValueError, match=rf"sample 1 has length 9.* limit of {limit}"):
        pack([4, 9, 2], seq_len=limit, num_data_ranks=2, pad_multiple=pad_multiple)


@pytest.mark.parametrize("length", [0, -3])
def test_an_empty_sample_is_refused(length):
    with pytest.raises(ValueError, match="sample 1"):
        pack([4, length], seq_len=8, num_data_ranks=2)


@pytest.mark.parametrize("field", ["seq_len", "num_data_ranks", "pad_multiple", "max_samples"])
def test_an_argument_below_one_is_refused(field):
    with pytest.raises(ValueError, match=field):
        pack([1], **{"seq_len": 8, "num_data_ranks": 1, "pad_multiple": 1, field: 0})


@pytest.mark.parametrize("cost", [[1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_a_bad_cost_is_refused(cost):
    with pytest.raises(ValueError, match="cost"):
        pack([1, 1], seq_len=8, num_data_ranks=1, cost=cost)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("num_data_ranks", [1, 8])
@pytest.mark.parametrize("shape", ["equal", "half", "mixed"])
def test_4096_samples_are_packed_in_time(shape, num_data_ranks):
    rng = np.random.default_rng(0)
    lengths = {"equal": [1000] * 4096, "half": [513] * 4096, "mixed": rng.integers(1, 1024, 4096).tolist()}[shape]
    check(pack(lengths, seq_len=1024, num_data_ranks=num_data_ranks), lengths, 1024, num_data_ranks)


# balance --------------------------------------------------------------------------------------------------------------

ATTENTION = flop_cost(2560, 36, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=9728, vocab_size=151_936)
"""A dense model of 4 B parameters: attention costs as much as all matrices from some 27,000 tokens on."""


def lengths_of(shape, count):
    rng = np.random.default_rng(count)
    return {
        "uniform": rng.integers(64, 8193, count),
        "lognormal": np.clip(np.exp(rng.normal(6.5, 1.0, count)), 16, 16_384).astype(int),
        "bimodal": np.where(rng.random(count) < 0.1, rng.integers(8000, 16_000, count), rng.integers(50, 600, count)),
        "equal": np.full(count, 1000),
    }[shape].tolist()


@pytest.mark.parametrize("cost", [None, ATTENTION], ids=["tokens", "flops"])
@pytest.mark.parametrize("shape", ["uniform", "lognormal", "bimodal", "equal"])
def test_8192_samples_on_64_ranks_leave_the_heaviest_at_most_2_per_mille_above_the_mean(shape, cost):
    lengths = lengths_of(shape, 8192)
    seq_len = max(2 * max(lengths), sum(lengths) // 480)
    plan = pack(lengths, seq_len=seq_len, num_data_ranks=64, cost=cost)
    check(plan, lengths, seq_len, 64)
    assert max_over_mean(plan, [(cost or float)(length) for length in lengths]) <= 1.002


@pytest.mark.parametrize("cost", [None, ATTENTION], ids=["tokens", "flops"])
@pytest.mark.parametrize("low", [1, 8193, 15_000])
def test_512_bins_on_64_ranks_leave_the_heaviest_at_most_2_per_mille_above_the_mean(low, cost):
    """Eight bins a rank, one sample in each: nothing small is left to fill up with."""
    lengths = np.random.default_rng(low).integers(low, 16_385, 512).tolist()
    plan = pack(lengths, seq_len=16_384, num_data_ranks=64, cost=cost, max_samples=1)
    check(plan, lengths, 16_384, 64, max_samples=1)
    assert len(plan[0]) == 8
    assert max_over_mean(plan, [(cost or float)(length) for length in lengths]) <= 1.002


def test_balance_by_tokens_is_no_balance_by_flops():
    """Long samples on half of the ranks: equal in tokens, a tenth more in FLOPs."""
    lengths = [16_384] * 4 + [256] * 1024
    costs = [ATTENTION(length) for length in lengths]
    by_tokens = pack(lengths, seq_len=131_072, num_data_ranks=8)
    by_flops = pack(lengths, seq_len=131_072, num_data_ranks=8, cost=ATTENTION)
    assert max_over_mean(by_tokens, lengths) < 1.001 and max_over_mean(by_tokens, costs) > 1.05
    assert max_over_mean(by_flops, costs) < 1.002
    check(by_flops, lengths, 131_072, 8)


def test_samples_change_places_where_whole_bins_cannot_level_the_ranks():
    """One bin a rank: longest first leaves 5+3+3, 5+3 and 4+4, of which the best is 5+4, 5+4 and 3+3+3."""
    lengths = [5, 5, 4, 4, 3, 3, 3]
    plan = pack(lengths, seq_len=40, num_data_ranks=3)
    check(plan, lengths, 40, 3)
    assert loads(plan, lengths) == [9, 9, 9]


def test_micro_batches_of_a_rank_go_from_heavy_to_light():
    lengths = np.random.default_rng(0).integers(1, 101, 60).tolist()
    for rank in pack(lengths, seq_len=100, num_data_ranks=4):
        tokens = [sum(lengths[i] for i in micro_batch) for micro_batch in rank]
        assert tokens == sorted(tokens, reverse=True)


def test_a_bin_takes_no_more_samples_than_it_may():
    plan = pack([1] * 10, seq_len=100, num_data_ranks=2, max_samples=2)
    check(plan, [1] * 10, 100, 2, max_samples=2)
    assert len(plan[0]) == 3


def test_more_ranks_than_samples_of_unlike_cost_stays_one_sample_a_rank():
    plan = pack([5, 4, 3], seq_len=16, num_data_ranks=64, cost=ATTENTION)
    check(plan, [5, 4, 3], 16, 64)
    assert sorted(map(len, (rank[0] for rank in plan)), reverse=True)[:4] == [1, 1, 1, 0]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("num_data_ranks", [8, 64])
@pytest.mark.parametrize("power", [1, 2, 6])
def test_the_search_for_swaps_ends_where_no_balance_can_be_had(num_data_ranks, power):
    """A few samples cost as much as all others, and bins that are all but full leave no room to move any."""
    lengths = lengths_of("lognormal", 512)
    seq_len = max(max(lengths), int(sum(lengths) / num_data_ranks * 1.01))
    plan = pack(lengths, seq_len=seq_len, num_data_ranks=num_data_ranks, cost=lambda n: float(n) ** power)
    check(plan, lengths, seq_len, num_data_ranks)


@pytest.mark.timeout(10)
def test_a_search_that_would_take_too_long_is_cut_short():
    """By the square, 98 % full: some thousands of pairs would still help a little."""
    lengths = lengths_of("lognormal", 8192)
    seq_len = int(sum(lengths) / 512 * 1.02)
    plan = pack(lengths, seq_len=seq_len, num_data_ranks=64, cost=lambda n: float(n * n))
    check(plan, lengths, seq_len, 64)
    assert max_over_mean(plan, [n * n for n in lengths]) < 1.5


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=80),
    st.integers(100, 300),
    st.integers(1, 12),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, ATTENTION, lambda n: n**3]),
)
def test_any_plan_keeps_all_limits_and_no_rank_is_more_than_a_bin_above_the_mean(
    lengths, seq_len, num_data_ranks, max_samples, cost
):
    kwargs = {"seq_len": seq_len, "num_data_ranks": num_data_ranks, "max_samples": max_samples, "cost": cost}
    plan = pack(lengths, **kwargs)
    check(plan, lengths, seq_len, num_data_ranks, max_samples=max_samples)
    assert plan == pack(tuple(lengths), **kwargs) == pack(np.array(lengths), **kwargs)
    costs = [(cost or float)(length) for length in lengths]
    heaviest_bin = max(sum(costs[i] for i in micro_batch) for rank in plan for micro_batch in rank)
    assert max(loads(plan, costs)) <= sum(costs) / num_data_ranks + heaviest_bin + 1e-6


@settings(deadline=None, max_examples=50)
@given(st.permutations(list(range(1, 31))), st.integers(1, 5))
def test_the_order_of_samples_does_not_change_the_loads(lengths, num_data_ranks):
    plan = pack(lengths, seq_len=60, num_data_ranks=num_data_ranks)
    in_order = pack(sorted(lengths), seq_len=60, num_data_ranks=num_data_ranks)
    assert loads(plan, lengths) == loads(in_order, sorted(lengths))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 30), max_size=60),
    st.integers(30, 70),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([None, lambda n: n * n, lambda n: 0.0]),
)
def test_no_sample_is_lost_repeated_or_cut(lengths, seq_len, num_data_ranks, pad_multiple, cost):
    kwargs = {"seq_len": seq_len, "num_data_ranks": num_data_ranks, "pad_multiple": pad_multiple, "cost": cost}
    plan = pack(lengths, **kwargs)
    check(plan, lengths, seq_len, num_data_ranks, pad_multiple)
    assert plan == pack(list(lengths), **kwargs)
    if lengths:
        # Any two first-fit bins together exceed one bin, which bounds their number by twice the least possible.
        rounded = sum(math.ceil(n / pad_multiple) * pad_multiple for n in lengths)
        assert len(plan[0]) <= math.ceil((2 * rounded / seq_len + 1) / num_data_ranks)
