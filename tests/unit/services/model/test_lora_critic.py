"""A critic's adapters and head: what is saved comes back bit for bit, and what does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.config.train import LoraConfig, OptimConfig
from services.model.head import Critic
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_hidden
from services.model.lora import add_lora, load_lora_state, lora_state
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks
from services.wire.errors import ContractError
from services.wire.grids import MicroBatch
from tests.architectures import build, sequences

LENGTHS = (5, 1, 7)
IDS, LAYOUT = torch.cat(sequences(*LENGTHS)), PackedLayout.of(LENGTHS)
MICRO_BATCH = MicroBatch(lengths=np.array(LENGTHS, dtype="<u4"), arrays={}, spans=[])
SMALL = LoraConfig(rank=2, alpha=6.0)
WITH_EXPERTS = LoraConfig(rank=2, alpha=6.0, targets=["all-linear", "experts"])


def saved(folder: Path, architecture: str) -> Path:
    build(folder, architecture).save_pretrained(folder)
    return folder


def critic_of(base: Path, *, seed: int, config: LoraConfig = SMALL) -> Critic:
    critic = Critic(load_causal_lm(base), head_init_std=0.1, seed=seed, points=[0, 0.5, 1])
    add_lora(critic.backbone, config, frozen=["layers.0.self_attn"], role="value", seed=seed)  # pyright: ignore[reportArgumentType]
    return critic


@pytest.mark.parametrize(("architecture", "config"), [("llama", SMALL), ("qwen3-moe", WITH_EXPERTS)])
def test_a_critic_s_adapters_and_head_come_back_bit_for_bit(
    tmp_path: Path, architecture: str, config: LoraConfig
) -> None:
    """Scenario: train, save, build another critic with another seed, load. Result: the very same values."""
    base = saved(tmp_path / "base", architecture)
    critic = critic_of(base, seed=0, config=config)
    optimizer = Optimizer(critic, OptimConfig(lr=0.05), Ranks(), warmup_updates=0)
    start = lora_state(critic)
    for _ in range(2):
        optimizer.update([MICRO_BATCH], lambda _: ((critic(IDS, LAYOUT) - 1.0).square().sum(), {}))
    save_file(lora_state(critic), tmp_path / "critic.safetensors")
    state = load_file(tmp_path / "critic.safetensors")
    assert {"head.weight", "head.bias", "head.points"} <= set(state)
    assert all(not torch.equal(state[name], start[name]) for name in start if name != "head.points")
    other = critic_of(base, seed=1, config=config)
    with torch.no_grad():
        values = critic(IDS, LAYOUT)
        assert not torch.allclose(other(IDS, LAYOUT), values, atol=1e-3)
        load_lora_state(other, state)
        assert torch.equal(other(IDS, LAYOUT), values)


def test_a_critic_scores_its_base_exactly_before_the_first_update(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    plain, critic = load_causal_lm(base).base_model, critic_of(base, seed=0)
    with torch.no_grad():
        assert torch.equal(packed_hidden(critic.backbone, IDS, LAYOUT), packed_hidden(plain, IDS, LAYOUT))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("head.bias"), "lacks head.bias"),
        (lambda state: state.update({"more": torch.ones(1)}), "has the unknown more"),
        (lambda state: state.update({"head.bias": torch.ones(4)}), r"head.bias has shape \[4\], not \[3\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_replaced(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    critic = critic_of(saved(tmp_path / "base", "llama"), seed=0)
    before = lora_state(critic)
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(ContractError, match=said):
        load_lora_state(critic, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in lora_state(critic).items())
