"""Whitening: one affine map for the whole batch, and what it does when there is nothing to scale by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithms.whiten import whiten


def arrays(*rows):
    return [np.array(row, dtype=np.float64) for row in rows]


def masks(*rows):
    return [np.array(row, dtype=bool) for row in rows]


def test_whitening_spans_all_branches():
    whitened = whiten(arrays([1, 3], [5, 7]), masks([1, 1], [1, 1]))
    np.testing.assert_allclose(np.concatenate(whitened), [-1.161895, -0.387298, 0.387298, 1.161895], atol=1e-6)


def test_numbers_off_the_mask_neither_count_nor_come_out():
    (whitened,) = whiten(arrays([1, math.nan, 3, 1e9]), masks([1, 0, 1, 0]))
    np.testing.assert_allclose(whitened, [-math.sqrt(0.5), 0, math.sqrt(0.5), 0], atol=1e-12)


def test_a_single_valid_token_passes_unchanged():
    (whitened,) = whiten(arrays([3, 9, 60000]), masks([1, 0, 0]))
    assert whitened.tolist() == [3, 0, 0]


def test_no_valid_token_gives_zeros():
    (whitened,) = whiten(arrays([3, 9]), masks([0, 0]))
    assert whitened.tolist() == [0, 0]
    assert whiten([], []) == []


@pytest.mark.parametrize("level", [0.0, 0.1, -1e6])
def test_equal_advantages_become_zeros(level):
    (whitened,) = whiten([np.full(7, level)], [np.ones(7, dtype=bool)])
    np.testing.assert_allclose(whitened, 0.0, atol=1e-9)


def test_counted_tokens_make_the_map_and_the_mask_receives_it():
    """A prefix shared by two branches counts once, but both copies get the same advantage."""
    whitened = whiten(arrays([1, 3], [1, 5]), masks([1, 1], [1, 1]), counted=masks([1, 1], [0, 1]))
    flat = np.array([1.0, 3.0, 5.0])
    expected = (flat - flat.mean()) / flat.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(whitened), [*expected[:2], expected[0], expected[2]], atol=1e-12)


def test_inputs_are_not_changed():
    given_arrays = arrays([1, 2, 3])
    whiten(given_arrays, masks([1, 1, 0]))
    assert given_arrays[0].tolist() == [1, 2, 3]


def test_a_non_finite_advantage_is_refused():
    with pytest.raises(ValueError, match="advantages"):
        whiten(arrays([1, math.inf]), masks([1, 1]))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        whiten(arrays([1.0]), [])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=2, max_size=6), st.randoms())
def test_any_order_and_any_grouping_gives_the_same_numbers(rows, random):
    flat = np.concatenate([np.array(row) for row in rows])
    (whole,) = whiten([flat], [np.ones(len(flat), dtype=bool)])
    order = list(range(len(rows)))
    random.shuffle(order)
    parts = whiten(arrays(*[rows[i] for i in order]), [np.ones(len(rows[i]), dtype=bool) for i in order])
    back = np.concatenate([parts[order.index(i)] for i in range(len(rows))])
    np.testing.assert_allclose(back, whole, rtol=1e-6, atol=1e-6)
