"""Samples that made a loss non-finite, told by their number in the grid item and by what went in."""

from __future__ import annotations

import numpy as np
import torch

from services.training.culprits import Suspect, first_samples, tell_culprits
from services.wire.grids import MicroBatch


def suspect(number: int, loss: float, returns: list[float]) -> Suspect:
    return Suspect(number, 9, torch.tensor(loss), {"returns": torch.tensor(returns)})


def micro_batch(num_samples: int) -> MicroBatch:
    return MicroBatch(lengths=np.full(num_samples, 3, dtype="<u4"), arrays={}, spans=[])


def test_samples_are_numbered_through_the_item_and_a_dummy_has_none() -> None:
    rows = [micro_batch(2), micro_batch(0), micro_batch(3), micro_batch(1)]
    assert [first_samples(rows)[id(row)] for row in rows] == [0, 2, 2, 5]


def test_the_guilty_are_told_with_the_largest_magnitude_that_went_in() -> None:
    rows = [
        suspect(3, 0.5, [1.0]),
        suspect(4, float("inf"), [0.0, -3e38, 1.0]),
        suspect(5, float("nan"), [1.0, np.nan]),
    ]
    assert tell_culprits(7, rows) == (
        "step 7: sample 4 of 9 tokens, returns up to 3e+38 and sample 5 of 9 tokens, returns up to nan"
    )


def test_of_many_guilty_the_rest_are_counted() -> None:
    told = tell_culprits(0, [suspect(number, float("inf"), [1.0]) for number in range(5)])
    assert told.startswith("step 0: sample 0") and "sample 1" in told and told.endswith("and 3 more")


def test_where_only_the_sum_overflows_the_largest_is_told() -> None:
    rows = [suspect(0, 2e38, [1.0]), suspect(1, -3e38, [2.0]), suspect(2, 1e38, [3.0])]
    assert tell_culprits(0, rows) == "step 0: sample 1 of 9 tokens, returns up to 2"


def test_a_rank_without_a_loss_token_has_nothing_to_tell() -> None:
    assert tell_culprits(0, []) == ""
