"""What of a model is divided among ranks, and what is refused; `tests/processes` shows that it computes the same."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from services.model.experts import divide_experts, fused_experts
from services.wire.errors import ConfigError
from tests.architectures import build, config_dir

NUM_EXPERTS = 4


@pytest.fixture
def mixture(tmp_path: Path) -> Any:
    """Two layers of four experts, hidden width 32, 24 within an expert."""
    return build(tmp_path, "qwen3-moe")


def test_each_rank_keeps_its_own_experts_and_nothing_else_changes(mixture: Any) -> None:
    whole = {name: parameter.detach().clone() for name, parameter in mixture.named_parameters()}
    kinds, keys = [type(module) for module in mixture.modules()], list(mixture.state_dict())
    divided = divide_experts(mixture, ep_rank=1, ep_size=2, group=None)
    assert divided == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
    ]
    assert [type(module) for module in mixture.modules()] == kinds
    assert list(mixture.state_dict()) == keys
    for name, parameter in mixture.named_parameters():
        assert torch.equal(parameter, whole[name][2:] if name in divided else whole[name])
    local = mixture.get_parameter(divided[0])
    assert local.shape == (2, 48, 32)
    assert local.untyped_storage().nbytes() == 2 * 48 * 32 * 4  # the other rank's half is not kept


def test_a_model_without_memory_is_divided_by_shape(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(config_dir(tmp_path, "qwen3-moe"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    divided = divide_experts(model, ep_rank=3, ep_size=4, group=None)
    assert [tuple(model.get_parameter(name).shape) for name in divided[:2]] == [(1, 48, 32), (1, 32, 24)]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_frozen_expert_stays_frozen(mixture: Any) -> None:
    frozen = mixture.get_parameter("model.layers.0.mlp.experts.down_proj")
    frozen.requires_grad_(False)
    divide_experts(mixture, ep_rank=0, ep_size=2, group=None)
    assert [name for name, parameter in mixture.named_parameters() if not parameter.requires_grad] == [
        "model.layers.0.mlp.experts.down_proj"
    ]


def test_biases_of_experts_are_divided_with_them(tmp_path: Path) -> None:
    """gpt-oss: [experts, width] beside [experts, width, width], and a router that keeps all of its rows."""
    config = transformers.AutoConfig.from_pretrained(config_dir(tmp_path, "attention sinks"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    divided = divide_experts(model, ep_rank=0, ep_size=2, group=None)
    names = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert [name.rsplit(".", 1)[-1] for name in divided] == names * 2
    assert {len(model.get_parameter(name)) for name in divided} == {1}
    assert len(model.get_parameter("model.layers.0.mlp.router.weight")) == 2


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss", "nemotron_h", "deepseek_v4"]
)
def test_every_architectures_fused_experts_are_found_by_their_structure(name: str) -> None:
    """The class that transformers itself lets choose an implementation, whatever it is called."""
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    marked = [
        kind
        for _, kind in inspect.getmembers(modeling, inspect.isclass)
        if issubclass(kind, nn.Module) and kind.__module__ == modeling.__name__ and hasattr(kind, "_apply_gate")
    ]
    assert len(marked) == 1
    (config_kind,) = (
        kind for _, kind in inspect.getmembers(modeling, inspect.isclass) if kind.__name__.endswith("Config")
    )
    with torch.device("meta"):
        experts = marked[0](config_kind())
    assert [kind for _, kind in fused_experts(nn.Sequential(nn.Linear(2, 2), experts))] == [experts]


def test_one_rank_changes_nothing(mixture: Any) -> None:
    before = {name: id(parameter) for name, parameter in mixture.named_parameters()}
    assert divide_experts(mixture, ep_rank=0, ep_size=1, group=None) == []
    assert {name: id(parameter) for name, parameter in mixture.named_parameters()} == before
    assert not any("forward" in vars(module) for module in mixture.modules())


def test_a_dense_model_is_refused_and_one_rank_is_no_reason_to(tmp_path: Path) -> None:
    model = build(tmp_path, "llama")
    with pytest.raises(ConfigError) as caught:
        divide_experts(model, ep_rank=0, ep_size=2, group=None)
    assert caught.value.problems == [
        "policy.model.ep: LlamaForCausalLM has no mixture of experts to divide by 2",
    ]
    assert divide_experts(model, ep_rank=0, ep_size=1, group=None) == []


def test_a_number_of_ranks_that_does_not_divide_the_experts_is_refused_before_anything_is_divided(mixture: Any) -> None:
    """Once for both layers, and under the key that asked."""
    with pytest.raises(ConfigError) as caught:
        divide_experts(mixture, ep_rank=0, ep_size=3, group=None, key="value.model.ep")
    assert caught.value.problems == ["value.model.ep: 4 experts cannot be divided by 3"]
    assert {len(p) for _, module in fused_experts(mixture) for p in module.parameters()} == {NUM_EXPERTS}


def test_a_parameter_that_all_experts_share_is_refused(mixture: Any) -> None:
    """Its gradient would be summed with the experts' and so over too few ranks."""
    for _, module in fused_experts(mixture):
        module.add_module("norm", nn.LayerNorm(32, bias=False))
    with pytest.raises(ConfigError) as caught:
        divide_experts(mixture, ep_rank=0, ep_size=2, group=None)
    assert caught.value.problems == [
        "policy.model.ep: Qwen3MoeExperts keeps norm.weight for all experts together, which cannot be divided"
    ]
