"""Names and shapes of a model's parameters, without loading it, are those of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedModel

from services.model.load import load_causal_lm
from services.model.tiny import tiny_config
from services.packing.shapes import TINY_CONFIG, Parameter, model_shapes
from services.wire.errors import ConfigError
from tests.architectures import _SHAPE, PACKABLE, config_dir

MIXTURES = {
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
}


def folder_of(folder: Path, name: str) -> Path:
    if name in PACKABLE:
        return config_dir(folder, name)
    kind, changes = MIXTURES[name]
    getattr(transformers, kind)(**{**_SHAPE, **changes}).save_pretrained(folder)
    return folder


def real(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def known(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = model_shapes(folder)
    assert shapes is not None
    return {parameter.name: parameter.shape for parameter in shapes.parameters}


@pytest.mark.parametrize("name", [*PACKABLE, *MIXTURES])
def test_the_config_alone_gives_every_parameter_of_the_model(name: str, tmp_path: Path) -> None:
    assert known(folder_of(tmp_path, name)) == real(load_causal_lm(tmp_path, init="random"))


@pytest.mark.parametrize("name", [*PACKABLE, "qwen2-moe", "biases"])
def test_the_weights_headers_give_the_same_experts_fused_as_in_memory(name: str, tmp_path: Path) -> None:
    """Several files, as large models have them."""
    model = load_causal_lm(folder_of(tmp_path, name), init="random")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert known(tmp_path) == real(model)


def test_names_of_the_files_may_differ_from_those_in_memory_but_no_element_is_lost(tmp_path: Path) -> None:
    """Mixtral's files call the experts' matrices w1, w2 and w3."""
    model = load_causal_lm(folder_of(tmp_path, "mixtral"), init="random")
    model.save_pretrained(tmp_path)
    assert sorted(known(tmp_path).values()) == sorted(real(model).values())


def test_headers_are_believed_before_the_config(tmp_path: Path) -> None:
    model = load_causal_lm(config_dir(tmp_path, "llama"), init="random")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 1000}))
    assert known(tmp_path) == real(model)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    config_dir(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_text("version https: a pointer instead of the weights")
    with pytest.raises(ConfigError, match=r"model\.safetensors is no safetensors file"):
        model_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="no safetensors file"):
        model_shapes(tmp_path)


def test_the_tiny_model_is_known_before_it_is_made() -> None:
    config = tiny_config()
    assert {name: getattr(config, name) for name in TINY_CONFIG} == TINY_CONFIG
    shapes = model_shapes(None)
    assert shapes is not None and sum(parameter.size for parameter in shapes.parameters) == 427_264


def test_a_model_whose_sizes_are_not_written_down_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_shapes(tmp_path) is None


def test_a_parameter_knows_its_layer_and_whether_it_holds_experts() -> None:
    expert = Parameter("model.layers.12.mlp.experts.down_proj", (4, 32, 24))
    assert (expert.size, expert.layer, expert.is_expert) == (4 * 32 * 24, 12, True)
    shared = Parameter("model.layers.0.mlp.shared_expert.down_proj.weight", (32, 40))
    assert (shared.layer, shared.is_expert) == (0, False)
    assert Parameter("model.norm.weight", (32,)).layer is None
