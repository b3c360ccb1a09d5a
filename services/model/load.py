"""From a local Hugging Face folder to a causal language model with packed attention.

Notable:
- No model-name guard: whatever `AutoModelForCausalLM` builds is taken; the self-test judges by result.
- `init = "random"` needs only a config: seeded random weights, for dry runs and benchmarks.
- Never reaches for the network and never runs code from the folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.model.attention import IMPLEMENTATION, PackedLayout
from services.wire.errors import ConfigError

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(
    model_dir: Path | str, *, init: str = "pretrained", seed: int = 0, dtype: str = "float32"
) -> PreTrainedModel:
    """Load (or randomly initialise) a causal language model with packed attention, in eval mode.

    Raises:
        ConfigError: when the folder holds no model that transformers can build.
    """
    path = Path(model_dir)
    if not (path / "config.json").is_file():
        raise ConfigError([f"model.path: {path} holds no config.json"])
    try:
        if init == "random":
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(
                    config, attn_implementation=IMPLEMENTATION, dtype=torch.float32
                ).to(DTYPES[dtype])  # the same numbers whatever the type, but for rounding
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, attn_implementation=IMPLEMENTATION, dtype=DTYPES[dtype], local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([f"model.path: {path} cannot be loaded: {str(error).splitlines()[0]}"]) from error
    return model.eval()


def head_features(model: PreTrainedModel) -> int:
    """Width of the final hidden state, read from the output embedding (`lm_head.in_features`)."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError([f"model.path: {type(model).__name__} has no linear output embedding"])
    return head.in_features


def packed_logits(
    model: PreTrainedModel, token_ids: torch.Tensor, layout: PackedLayout, positions: torch.Tensor
) -> torch.Tensor:
    """Logits `[n, V]` of a packed row `[T]` at `positions [n]`, everything the architecture does to them included."""
    out = model(
        input_ids=token_ids[None],
        position_ids=layout.position_ids,
        use_cache=False,
        logits_to_keep=positions,
        packed=layout,
    )
    return out.logits[0]


def packed_hidden(backbone: nn.Module, token_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Final hidden states `[T, D]` of a packed row `[T]`."""
    out = backbone(input_ids=token_ids[None], position_ids=layout.position_ids, use_cache=False, packed=layout)
    return out.last_hidden_state[0]
