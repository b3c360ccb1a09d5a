"""First-fit-decreasing and spreading give what their definitions say, sample by sample."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.packing.bins import first_fit_decreasing, spread

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=40)
LIMITS = st.sampled_from([1, 2, 5, 40])


def has_room(members, sizes, size, seq_len, max_samples):
    return len(members) < max_samples and sum(sizes[i] for i in members) + size <= seq_len


@settings(deadline=None, max_examples=200)
@given(SIZES, st.integers(20, 60), LIMITS)
def test_first_fit_puts_each_sample_into_the_first_bin_with_room(sizes, seq_len, max_samples):
    bins = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for members in bins:
            if has_room(members, sizes, sizes[index], seq_len, max_samples):
                members.append(index)
                break
        else:
            bins.append([index])
    assert first_fit_decreasing(np.array(sizes), seq_len, max_samples) == bins


@settings(deadline=None, max_examples=300)
@given(SIZES, st.data(), st.integers(20, 60), st.integers(1, 12), LIMITS)
def test_spreading_puts_each_sample_onto_the_cheapest_bin_with_room(sizes, data, seq_len, num_bins, max_samples):
    """Also where costs have nothing to do with sizes, and where some are 0."""
    count = len(sizes)
    costs = data.draw(st.one_of(st.just(sizes), st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    bins = [[] for _ in range(num_bins)]
    for index in sorted(range(count), key=lambda i: (-costs[i], -sizes[i], i)):
        with_room = [members for members in bins if has_room(members, sizes, sizes[index], seq_len, max_samples)]
        if not with_room:
            bins = None
            break
        min(with_room, key=lambda members: sum(costs[i] for i in members)).append(index)
    assert spread(np.array(sizes), np.array(costs, float), seq_len, num_bins, max_samples) == bins
