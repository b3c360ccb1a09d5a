"""Tiny configurations of many architectures, as folders that the loader reads like any other."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.model.load import load_causal_lm

VOCABULARY = 61
WINDOW = 4
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}

PACKABLE = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 with a window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.4, "embedding_multiplier": 2.0}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}
LEAKY = {
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "short convolutions": ("Lfm2Config", {**_SHAPE, "layer_types": ["conv", "full_attention"]}),
    "position biases of its own": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "attention sinks": (
        "GptOssConfig",
        {**_SHAPE, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW},
    ),
}


def config_dir(folder: Path, name: str) -> Path:
    """A folder with only a config.json."""
    kind, changes = PACKABLE[name] if name in PACKABLE else LEAKY[name]
    settings = changes if name in LEAKY else {**_SHAPE, **changes}
    getattr(transformers, kind)(**settings).save_pretrained(folder)
    return folder


def build(folder: Path, name: str, *, seed: int = 1) -> PreTrainedModel:
    """A random model whose hidden states are far from each other, loaded as a run loads it."""
    model = load_causal_lm(config_dir(folder, name), init="random", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def own_attention(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The same weights with transformers' own attention."""
    config = AutoConfig.from_pretrained(folder)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def sequences(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
