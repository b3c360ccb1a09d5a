"""From a local Hugging Face folder to a causal language model with packed attention.

Notable:
- No model-name guard: whatever `AutoModelForCausalLM` builds is taken; the self-test judges by result.
- `init = "random"` needs only a config: seeded random weights, for dry runs and benchmarks.
- Never reaches for the network and never runs code from the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.model.attention import IMPLEMENTATION
from services.model.experts import choose_experts
from services.model.layout import PackedLayout
from services.wire.errors import ConfigError

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(
    model_dir: Path | str,
    *,
    init: str = "pretrained",
    seed: int = 0,
    dtype: str = "float32",
    needs_output: bool = True,
) -> PreTrainedModel:
    """Load (or randomly initialise) a causal language model with packed attention, in eval mode.

    Args:
        model_dir: A local Hugging Face folder.
        init: "pretrained", or "random" for seeded random weights.
        seed: Of random weights.
        dtype: Of the parameters.
        needs_output: Whether the folder must hold the output head; a critic's may not.

    Raises:
        ConfigError: when the folder holds no model that transformers can build, or not all of its weights.
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
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                attn_implementation=IMPLEMENTATION,
                dtype=DTYPES[dtype],
                local_files_only=True,
                output_loading_info=True,
            )
            model, info = loaded
            _refuse_missing(path, model, set(info["missing_keys"]), needs_output=needs_output)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([f"model.path: {path} cannot be loaded: {str(error).splitlines()[0]}"]) from error
    choose_experts(model, DTYPES[dtype])
    return model.eval()


def _refuse_missing(path: Path, model: PreTrainedModel, missing: set[str], *, needs_output: bool) -> None:
    """What a folder lacks transformers fills with random numbers, and says so in a log line alone."""
    if not needs_output:
        output = model.get_output_embeddings()
        missing -= {
            name for name, parameter in model.named_parameters() if parameter is getattr(output, "weight", None)
        }
    if missing:
        raise ConfigError([f"model.path: {path} lacks {min(missing)} ({len(missing)} such) of {type(model).__name__}"])


def head_features(model: PreTrainedModel) -> int:
    """Width of the final hidden state, read from the output embedding (`lm_head.in_features`)."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError([f"model.path: {type(model).__name__} has no linear output embedding"])
    return head.in_features


def packed_logits(
    model: PreTrainedModel, token_ids: torch.Tensor, layout: PackedLayout, rows: torch.Tensor
) -> torch.Tensor:
    """Logits `[n, V]` of a packed row `[T]` at `rows [n]`, everything the architecture does to them included.

    All of `rows` must be this context rank's.
    """
    out = model(
        input_ids=layout.shard(token_ids)[None],
        position_ids=layout.position_ids,
        use_cache=False,
        logits_to_keep=rows - layout.first_local,
        packed=layout,
    )
    return out.logits[0]


def packed_hidden(backbone: nn.Module, token_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Final hidden states `[T / C, D]` of this context rank's stretch of a packed row `[T]`."""
    out = backbone(
        input_ids=layout.shard(token_ids)[None], position_ids=layout.position_ids, use_cache=False, packed=layout
    )
    return out.last_hidden_state[0]


def own_hidden(backbone: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Final hidden states `[T, D]` of one sequence `[T]` by the architecture's own attention."""
    config: Any = backbone.config
    try:
        config._attn_implementation = "eager"
        return backbone(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
    finally:
        config._attn_implementation = IMPLEMENTATION
