"""Whole weights from a checkpoint and the LoRA adapter that was trained on it: W + (alpha / rank) B A.

Notable:
- vLLM's workers import this in an environment of their own: torch and safetensors are all it needs.
- An adapter folder is peft's: `adapter_model.safetensors` and `adapter_config.json`. What we never write (DoRA, other
  scales for some layers, biases, fused experts) is refused, for ignoring it would serve another model.
- Sums are f32, and so are the adapted weights that come out: whoever loads them rounds once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
}
"""Settings of an adapter that is B A and nothing else; None and an absent key mean the same."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than whole weights."""
    return (folder / WEIGHTS).is_file()


def merge_adapter(base: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Add an adapter to the weights that it was trained on.

    Args:
        base: The checkpoint's tensors by their names; not changed.
        folder: The adapter's.

    Returns:
        All tensors of the base, the adapted ones anew in f32.

    Raises:
        ValueError: the adapter is no plain LoRA, or does not fit the base.
    """
    config = json.loads((folder / CONFIG).read_text())
    for key, allowed in _PLAIN.items():
        if config.get(key) not in allowed and key in config:
            raise ValueError(f"adapter {folder}: {key} = {config[key]!r} is not supported")
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / WEIGHTS)
    merged = dict(base)
    for name in sorted(tensors):
        layer = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        a, b = (tensors.get(f"{_PREFIX}{layer}{ending}") for ending in (_A, _B))
        weight = base.get(f"{layer}.weight")
        if a is None or b is None or weight is None:
            raise ValueError(f"adapter {folder}: {name} is not one of a pair on a layer of the base")
        if (b.shape[0], a.shape[1]) != tuple(weight.shape) or not config["r"] == a.shape[0] == b.shape[1]:
            shapes = f"{list(b.shape)} by {list(a.shape)}"
            raise ValueError(f"adapter {folder}: {layer} is {list(weight.shape)} and cannot take {shapes}")
        if name.endswith(_A):
            merged[f"{layer}.weight"] = weight.float() + scale * (b.float() @ a.float())
    return merged
