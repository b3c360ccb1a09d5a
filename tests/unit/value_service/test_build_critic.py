"""From `[value.loss]` to a head: what the critic outputs, what its grid's header says, and that the two fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.config.context import RunContext
from services.config.schema import Config
from services.model.attention import PackedLayout
from tests.architectures import config_dir, sequences
from value_service.losses import ValueLoss
from value_service.main import build_critic


def config_of(folder: Path, loss: dict) -> Config:
    return Config.model_validate(
        {
            "model": {"path": f"dummy:{folder}"},
            "algorithm": {"type": "sao"},
            "env": [{"type": "add"}],
            "value": {"loss": loss},
        }
    )


@pytest.mark.parametrize(
    ("loss", "num_outputs", "value"),
    [
        ({"type": "mse"}, 1, 0.0),
        ({"type": "two_hot", "bins": 11, "pad": 0}, 11, 0.5),
        ({"type": "hl_gauss", "range": [-1.0, 3.0]}, 57, 1.0),
    ],
)
def test_the_head_fits_the_header_and_starts_in_the_middle_of_its_range(
    loss: dict, num_outputs: int, value: float, tmp_path: Path
) -> None:
    config = config_of(config_dir(tmp_path, "llama"), loss)
    assert config.value is not None
    url = "http://127.0.0.1:1"
    context = RunContext(
        run_id="run",
        epoch=1,
        dir=str(tmp_path),
        model_dir=str(tmp_path),
        model_init="random",
        inference_urls=[url],
        policy_url=url,
        orchestrator_url=url,
        policy_grid_url=url,
    )
    critic, _ = build_critic(config, context)
    assert critic.head.weight.shape == (num_outputs, 32)
    header_loss = ValueLoss(config.value.loss.type, config.value.loss.loss_constants(), critic.head.points)
    if header_loss.support is not None:
        assert header_loss.value_range == tuple(loss.get("range", [0.0, 1.0]))
    with torch.no_grad():
        values = critic(sequences(6)[0], PackedLayout.of([6]))
    assert values.tolist() == pytest.approx([value] * 6, abs=1e-6)
