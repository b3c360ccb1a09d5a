"""Prefix replay: where a trace may be cut, and what was said up to the cut."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prefix_replay import check_prefix, cut_at, cut_by_entropy, segments_of, turn_boundaries
from services.wire.errors import ContractError

MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=bool)
"""One prompt token; turns at 1-2, 4 and 7-8."""


def mask_of(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=bool)


def test_a_trace_is_cut_after_an_observation():
    assert turn_boundaries(MASK).tolist() == [4, 7]
    assert turn_boundaries(mask_of([0, 1, 1, 0])).tolist() == []
    assert turn_boundaries(np.zeros(0, dtype=bool)).tolist() == []


def test_an_index_from_the_data_must_be_a_turn_boundary():
    assert cut_at(MASK, 7) == 7
    for index in (-1, 0, 1, 3, 5, 8, 9):
        with pytest.raises(ContractError, match=rf"cut {index} is no turn boundary; those are \[4, 7\]"):
            cut_at(MASK, index)


def test_the_least_certain_turn_is_replayed():
    """By mean, not by sum or length: two tokens of 1 nat against one of 1.5. The first turn is never the choice."""
    assert cut_by_entropy(MASK, np.array([0, 9, 9, 99, 1.5, 99, 99, 1, 1])) == 4
    assert cut_by_entropy(MASK, np.array([0, 9, 9, 99, 0.5, 99, 99, 1, 1])) == 7
    assert cut_by_entropy(MASK, np.ones(9)) == 4, "the earliest of equals"
    with pytest.raises(ContractError, match="no second turn"):
        cut_by_entropy(mask_of([0, 1, 1, 0]), np.ones(4))


@pytest.mark.parametrize("bad", [np.ones(8), np.array([0, 1, 1, 0, math.nan, 0, 0, 1, 1])])
def test_entropies_that_do_not_fit_are_refused(bad):
    with pytest.raises(ContractError, match="entrop"):
        cut_by_entropy(MASK, bad)


def test_a_prefix_falls_into_what_was_said_by_whom():
    assert segments_of([10, 11, 12, 13, 14, 15, 16], MASK[:7]) == [[10], [11, 12], [13], [14], [15, 16]]


def test_a_restored_episode_that_says_something_else_is_refused_at_the_token():
    check_prefix([1, 2, 3], [1, 2, 3])
    with pytest.raises(ContractError, match="token 1 of 3 is 9, recorded was 2"):
        check_prefix([1, 9, 3], [1, 2, 3])
    for said in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(ContractError, match=f"{len(said)} tokens, recorded were 3"):
            check_prefix(said, [1, 2, 3])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_every_prefix_ends_with_an_observation_and_its_segments_make_it_up(mask):
    whole = np.array([False, *mask])
    token_ids = list(range(100, 100 + len(whole)))
    boundaries = turn_boundaries(whole)
    assert len(boundaries) == max(0, sum(np.diff(whole.astype(int)) == 1) - 1)
    for cut in boundaries:
        assert whole[cut] and not whole[cut - 1]
        segments = segments_of(token_ids[:cut], whole[:cut])
        assert list(chain(*segments)) == token_ids[:cut] and len(segments) % 2 == 1
        for number, segment in enumerate(segments):
            assert {bool(whole[token - 100]) for token in segment} == {number % 2 == 1}
