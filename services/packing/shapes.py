"""The parameters of a model, by name and shape, without loading it: from its weights' headers or from its config.

Notable:
- A safetensors file begins with 8 bytes, the length of a JSON header that has every tensor's shape: exact, and cheap
  at any size. Without weights the shapes follow from `config.json`, for models built like Llama.
- Names are those in memory: the experts of a mixture are one tensor `[experts, ...]`, gate and up together. A tied
  output head is no parameter of its own.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config.model_path import missing_sizes, sizes_of, text_config
from services.wire.errors import ConfigError

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 261,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""Of the model that `tiny:TASK` makes, which may not be there yet."""
OUTPUT_HEAD = "lm_head.weight"
_BUFFERS = ("inv_freq", ".masked_bias")
_OTHER_TOWERS = frozenset({"visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower"})
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")
_FUSED = {"w1": "gate_up_proj", "w3": "gate_up_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"} | {
    "w2": "down_proj",
    "down_proj": "down_proj",
}
_QK_NORMS = ("qwen3", "gemma3")
_SANDWICH_NORMS = ("gemma2", "gemma3")


@dataclass(frozen=True)
class Parameter:
    """One tensor that a model trains."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The layer it is in; None outside of layers."""
        found = _LAYER.search(self.name)
        return None if found is None else int(found[1])

    @property
    def is_expert(self) -> bool:
        """Whether it holds all experts of a mixture, the first dimension."""
        return ".experts." in self.name


@dataclass(frozen=True)
class ModelShapes:
    """What the memory of a model depends on."""

    parameters: tuple[Parameter, ...]
    sizes: dict[str, int]
    """by the names of `model_sizes`"""
    experts_per_token: int = 0
    """0 where there is no mixture"""
    has_softcap: bool = False
    """Whether attention scores are capped, which no fused kernel does."""


def model_shapes(folder: Path | None) -> ModelShapes | None:
    """Everything about the model in a folder, or about the tiny model where there is none yet.

    Returns:
        None where `config.json` does not say the sizes.

    Raises:
        ConfigError: a file of weights that is none.
    """
    if folder is None:
        return _shapes_of(TINY_CONFIG, None)
    if missing_sizes(folder):
        return None
    return _shapes_of(text_config(folder), _from_headers(folder))


def _shapes_of(config: dict[str, Any], held: list[Parameter] | None) -> ModelShapes:
    is_tied = config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma"))
    parameters = list(_from_config(config)) if held is None else held
    return ModelShapes(
        parameters=tuple(p for p in parameters if not (is_tied and p.name == OUTPUT_HEAD)),
        sizes=sizes_of(config),
        experts_per_token=_num_experts(config) and int(config.get("num_experts_per_tok") or 0),
        has_softcap=bool(config.get("attn_logit_softcapping")),
    )


# ---------------------------------------------------------------------------------------------------------------------
# From the weights


def _from_headers(folder: Path) -> list[Parameter] | None:
    """None where there are no weights."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= _header(file)
    own = {name: shape for name, shape in shapes.items() if not name.endswith(_BUFFERS)}
    own = {name: shape for name, shape in own.items() if _OTHER_TOWERS.isdisjoint(name.split("."))}
    return [Parameter(name, shape) for name, shape in _fuse_experts(own).items()]


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if not 0 < length <= file.stat().st_size:
            raise ConfigError([f"model.path: {file} is no safetensors file"])
        header: dict[str, Any] = json.loads(opened.read(length))
    return {name: tuple(entry["shape"]) or (1,) for name, entry in header.items() if name != "__metadata__"}


def _fuse_experts(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Files have one matrix an expert, memory one tensor for all."""
    fused: dict[str, tuple[int, ...]] = {}
    rows: dict[str, dict[tuple[int, str], tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found = _EXPERT.match(name)
        if found is None or found[3] not in _FUSED:
            fused[name] = shape
        else:
            rows.setdefault(f"{found[1]}.{_FUSED[found[3]]}", {})[int(found[2]), found[3]] = shape
    for name, parts in rows.items():
        num_experts = len({number for number, _ in parts})
        width = next(iter(parts.values()))[1]
        fused[name] = (num_experts, sum(shape[0] for shape in parts.values()) // num_experts, width)
    return fused


# ---------------------------------------------------------------------------------------------------------------------
# From the config


def _from_config(config: dict[str, Any]) -> Iterator[Parameter]:
    """Embedding, layers, norm and head of a model built like Llama, Qwen or Gemma, dense or a mixture."""
    sizes = sizes_of(config)
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    yield Parameter("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(sizes["num_layers"]):
        prefix = f"model.layers.{layer}."
        inner = [*_attention(config, sizes), *_feed_forward(config, hidden, layer), *_norms(config, hidden)]
        yield from (Parameter(prefix + name, shape) for name, shape in inner)
    yield Parameter("model.norm.weight", (hidden,))
    yield Parameter(OUTPUT_HEAD, (vocab, hidden))


def _attention(config: dict[str, Any], sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_heads"] * head_dim, sizes["num_kv_heads"] * head_dim
    kind = str(config.get("model_type", ""))
    has_biases = bool(config.get("attention_bias"))
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (width, hidden)
        if has_biases or (kind.startswith("qwen2") and config.get("qkv_bias", True)):
            yield f"self_attn.{name}_proj.bias", (width,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if has_biases:
        yield "self_attn.o_proj.bias", (hidden,)
    if kind.startswith(_QK_NORMS):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)


def _feed_forward(config: dict[str, Any], hidden: int, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    num_experts, dense = _num_experts(config), int(config.get("intermediate_size") or 0)
    every = int(config.get("decoder_sparse_step") or 1)
    if not num_experts or (layer + 1) % every or layer in (config.get("mlp_only_layers") or []):
        yield from _gated("mlp.", hidden, dense, has_biases=bool(config.get("mlp_bias")))
        return
    width, shared = int(config.get("moe_intermediate_size") or dense), config.get("shared_expert_intermediate_size")
    yield "mlp.gate.weight", (num_experts, hidden)
    yield "mlp.experts.gate_up_proj", (num_experts, 2 * width, hidden)
    yield "mlp.experts.down_proj", (num_experts, hidden, width)
    if shared:
        yield from _gated("mlp.shared_expert.", hidden, int(shared), has_biases=False)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _gated(prefix: str, hidden: int, width: int, *, has_biases: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield f"{prefix}{name}_proj.weight", shape
        if has_biases:
            yield f"{prefix}{name}_proj.bias", shape[:1]


def _norms(config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if str(config.get("model_type", "")).startswith(_SANDWICH_NORMS):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield from ((f"{name}.weight", (hidden,)) for name in names)


def _num_experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)
