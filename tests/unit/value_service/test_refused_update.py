"""A critic update that is refused says which sample was at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger

from services.config.train import ValueConfig
from services.model.head import Critic
from services.packing.grid import build_grid
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample
from tests import trainers
from tests.architectures import VOCABULARY, build
from tests.samples import make_sample


def grid(extreme: float) -> GridItem:
    """Four samples of 6 tokens in rows of two; one holds an extreme target."""
    samples: list[TrainingSample] = []
    rng = np.random.default_rng(0)
    for number in range(4):
        sample = make_sample([1] * 4, values=[0.0] * 4, trace_id=f"t{number}", prompt=2)
        sample.branch.token_ids = rng.integers(3, VOCABULARY, 6).astype(np.uint32)
        sample.returns = np.where(sample.branch.action_mask, extreme if number == 1 else 1.0, 0.0)
        samples.append(sample)
    (item,) = build_grid(
        samples,
        stream="critic",
        seq_len=12,
        num_data_ranks=1,
        run_id="run",
        epoch=1,
        step=4,
        policy_version=4,
        temperature=1.0,
        loss_name="mse",
        loss_constants={},
    )
    return item


def place(item: GridItem, extreme: float) -> tuple[int, int]:
    """Number of the guilty sample in its item, and of its micro-batch: all samples have 6 tokens, rows hold two."""
    number = int(np.flatnonzero(item.arrays["returns"] == np.float32(extreme))[0]) // 6
    return number, number // 2


def warnings_of(updater: Any, item: GridItem) -> list[str]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    try:
        updater.train(item)
    finally:
        logger.remove(sink)
    return [line for line in lines if "is skipped" in line]


@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_sample_is_named_by_its_number_in_the_item_in_every_one_of_k_updates(
    tmp_path: Path, num_updates: int
) -> None:
    critic = Critic(build(tmp_path, "qwen3"), head_init_std=0.1, seed=2)
    config = ValueConfig.model_validate({"optim": {"lr": 1e-2}, "updates_per_batch": num_updates})
    item = grid(3e38)
    number, micro_batch = place(item, 3e38)
    lines = warnings_of(trainers.updater_of(critic, config), item)
    assert len(lines) == num_updates
    for line in lines:
        assert (
            f"micro-batch {micro_batch} (step 4: sample {number} of 6 tokens, returns up to 3e+38, outputs up" in line
        )
        assert line.count("sample") == 1, "the other one of its row is not accused"


def test_a_critic_that_went_bad_accuses_its_outputs(tmp_path: Path) -> None:
    critic = Critic(build(tmp_path, "qwen3"), head_init_std=0.1, seed=2)
    with torch.no_grad():
        critic.head.bias.fill_(float("nan"))
    config = ValueConfig.model_validate({"optim": {"lr": 1e-2}})
    (line,) = warnings_of(trainers.updater_of(critic, config), grid(1.0))
    assert "returns up to 1, outputs up to nan" in line
