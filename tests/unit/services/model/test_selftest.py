"""The start-up check refuses what cannot be packed, by result and not by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from services.model.load import load_causal_lm
from services.model.selftest import check_packing
from services.wire.errors import ConfigError
from tests.architectures import LEAKY, PACKABLE, VOCABULARY, build, config_dir
from tests.trainers import hidden_of


@pytest.mark.parametrize("name", PACKABLE)
def test_what_can_be_packed_passes_with_room_to_spare(name: str, tmp_path: Path) -> None:
    assert check_packing(hidden_of(build(tmp_path, name)), VOCABULARY, name=name) < 1e-5


@pytest.mark.parametrize("name", LEAKY)
def test_layers_that_cannot_be_packed_are_a_configuration_error(name: str, tmp_path: Path) -> None:
    model = load_causal_lm(config_dir(tmp_path, name), init="random", seed=1)
    with pytest.raises(ConfigError, match=r"model\.path: .*(cannot be packed|not supported)") as caught:
        check_packing(hidden_of(model), VOCABULARY, name="it")
    assert caught.value.exit_code == 78


def one_sequence(module, query, key, value, attention_mask, scaling=None, **_):
    """An attention that takes the whole row for one sequence, as a plain fused kernel does."""
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def test_a_model_whose_attention_was_swapped_is_refused(tmp_path: Path) -> None:
    AttentionInterface.register("one_sequence", one_sequence)
    AttentionMaskInterface.register("one_sequence", lambda *_, **__: None)
    model = build(tmp_path, "llama")
    model.config._attn_implementation = "one_sequence"
    with pytest.raises(ConfigError, match="cannot be packed"):
        check_packing(hidden_of(model), VOCABULARY, name="it")


def test_a_single_leaking_layer_is_found(tmp_path: Path) -> None:
    """One layer adds a little of the token before, across the boundary of sequences."""
    model = build(tmp_path, "qwen3")
    layer = model.base_model.layers[0].mlp
    forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward
    layer.forward = lambda x: forward(x + 0.01 * x.roll(1, dims=1))
    with pytest.raises(ConfigError, match="packed and alone"):
        check_packing(hidden_of(model), VOCABULARY, name="it")


def test_a_model_that_gives_nan_is_refused(tmp_path: Path) -> None:
    model = build(tmp_path, "llama")
    with torch.no_grad():
        model.base_model.norm.weight[0] = float("nan")
    with pytest.raises(ConfigError):
        check_packing(hidden_of(model), VOCABULARY, name="it")


def test_the_check_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = build(tmp_path, "gemma3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation, state = model.config._attn_implementation, torch.get_rng_state()
    check_packing(hidden_of(model), VOCABULARY, name="it")
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
