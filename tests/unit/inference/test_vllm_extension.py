"""The worker extension's checks, which run before vLLM replaces anything."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.inference.vllm_extension import check_tensors, checkpoint_shapes, read_tensors

GOOD = {"embed.weight": torch.ones(3, 2), "norm.weight": torch.ones(2)}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, list[int]]:
    save_file(GOOD, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path).keys() == GOOD.keys()
    return checkpoint_shapes(tmp_path)


def test_a_snapshot_like_the_checkpoint_passes_with_or_without_its_tied_head(expected: dict[str, list[int]]) -> None:
    check_tensors(GOOD, expected, "s")
    check_tensors(GOOD | {"lm_head.weight": torch.ones(3, 2)}, expected, "s")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "no safetensors"),
        ({"embed.weight": torch.ones(3, 2)}, "lacks"),
        (GOOD | {"more.weight": torch.ones(1)}, "unknown"),
        (GOOD | {"norm.weight": torch.ones(3)}, "shape"),
        (GOOD | {"norm.weight": torch.tensor([1.0, math.inf])}, "non-finite"),
    ],
)
def test_anything_else_is_refused(expected: dict[str, list[int]], bad: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensors(bad, expected, "s")
