"""One word for all weights: any bit, name or place that changes changes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.model.checksum import weights_checksum


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).to(torch.bfloat16), nn.LayerNorm(7))
    made.register_buffer("table", torch.arange(11.0), persistent=False)
    made.register_buffer("count", torch.tensor(3))
    return made


def test_equal_weights_have_equal_sums_whatever_memory_they_lie_in() -> None:
    """A transposed parameter, and one that begins in the middle of a word of its storage."""
    plain, moved = model(), model()
    assert weights_checksum(plain) == weights_checksum(moved)
    moved[0].weight.data = moved[0].weight.data.t().contiguous().t()
    moved[1].bias.data = torch.cat([torch.zeros(1, dtype=torch.bfloat16), moved[1].bias.data])[1:]
    assert moved[1].bias.storage_offset() == 1
    assert weights_checksum(plain) == weights_checksum(moved)


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "2.weight", "table", "count"])
def test_one_bit_of_any_tensor_changes_the_sum(name: str) -> None:
    changed = model()
    tensors = dict(changed.named_parameters()) | dict(changed.named_buffers())
    tensors[name].data.reshape(-1)[-1:].view(torch.uint8)[-1] ^= 1
    assert weights_checksum(changed) != weights_checksum(model())


def test_two_numbers_that_changed_places_change_the_sum() -> None:
    changed = model()
    changed[0].weight.data = changed[0].weight.data.flip(0)
    assert weights_checksum(changed) != weights_checksum(model())
