"""Packing: nothing lost, nothing over the limit, ranks alike, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.packing.plan import pack


def members(plan):
    return sorted(index for rank in plan for micro_batch in rank for index in micro_batch)


def loads(plan, lengths):
    return [sum(lengths[index] for micro_batch in rank for index in micro_batch) for rank in plan]


def check(plan, lengths, seq_len, num_data_ranks, pad_multiple=1):
    assert len(plan) == num_data_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert members(plan) == list(range(len(lengths)))
    for rank in plan:
        for micro_batch in rank:
            assert sum(math.ceil(lengths[i] / pad_multiple) * pad_multiple for i in micro_batch) <= seq_len


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


@pytest.mark.parametrize("field", ["seq_len", "num_data_ranks", "pad_multiple"])
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
