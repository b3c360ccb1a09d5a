"""A policy step that is refused says which sample was at fault, whatever the loss is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger

from services.config.train import PolicyConfig
from services.packing.grid import build_grid
from services.wire.errors import NonFiniteError
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample
from tests import trainers
from tests.architectures import VOCABULARY, build
from tests.samples import make_sample

DIS = {"eps_low": 0.99, "eps_high": 1e6}


def grid(*, parts: int = 1) -> GridItem:
    """Four samples of 6 tokens in rows of two; the advantages of one, finite in f32, are too large for a loss."""
    samples: list[TrainingSample] = []
    rng = np.random.default_rng(0)
    for number in range(4):
        sample = make_sample([1] * 4, trace_id=f"t{number}", group_id=f"g{number}", prompt=2)
        sample.branch.token_ids = rng.integers(3, VOCABULARY, 6).astype(np.uint32)
        sample.branch.logprobs = np.where(sample.branch.action_mask, -4.0, 0.0).astype(np.float32)  # a ratio about 1
        sample.advantages = np.where(sample.branch.action_mask, 3e38 if number == 2 else 1.0, 0.0)
        samples.append(sample)
    (item,) = build_grid(
        samples,
        stream="policy",
        seq_len=12,
        num_data_ranks=1,
        run_id="run",
        epoch=1,
        step=4,
        policy_version=4,
        temperature=1.0,
        loss_name="dis",
        loss_constants=DIS,
        num_mini_batches=parts,
    )
    return item


def place(item: GridItem) -> tuple[int, int]:
    """Number of the guilty sample in its item, and of its micro-batch in the mini-batch."""
    start = number = 0
    for _, micro_batches in item.mini_batches():
        for index, micro_batch in enumerate(micro_batches):
            for _ in micro_batch.lengths:
                if item.arrays["advantages"][start : start + 6].max() > 1e38:
                    return number, index
                number, start = number + 1, start + 6
    raise AssertionError("nobody is guilty")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{}, {"old_logprobs": "recomputed"}, {"kl": {"coef": 0.1}}, {"entropy_coef": 0.01}],
    ids=["plain", "recomputed", "kl", "entropy"],
)
def test_the_sample_is_named_by_its_number_in_the_item(tmp_path: Path, settings: dict[str, Any], parts: int) -> None:
    model = build(tmp_path, "qwen3")
    trainer = trainers.trainer_of(model, PolicyConfig.model_validate({"optim": {"lr": 1e-3}} | settings))
    item = grid(parts=parts)
    number, micro_batch = place(item)
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    try:
        row = trainer.train(item)
    finally:
        logger.remove(sink)
    assert row["policy/nonfinite"] == 1 and trainer.optimizer.num_updates == parts - 1
    (line,) = [line for line in lines if "is skipped" in line]
    assert f"micro-batch {micro_batch} (step 4: sample {number} of 6 tokens, advantages up to 3e+38, logprobs" in line
    assert line.count("sample") == 1, "the other one of its row is not accused"


def test_three_refused_steps_end_it_with_the_sample_and_the_weights_as_they_were(tmp_path: Path) -> None:
    model = build(tmp_path, "qwen3")
    trainer = trainers.trainer_of(model, PolicyConfig.model_validate({"optim": {"lr": 1e-3}}))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        trainer.train(grid())
    with pytest.raises(NonFiniteError, match=rf"step 4: sample {place(grid())[0]} of 6 tokens"):
        trainer.train(grid())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
