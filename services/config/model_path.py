"""What can be known of `model.path` without loading a model.

FOLDER        a local Hugging Face folder
tiny:TASK     the 0.43 M model, made and warm-started on TASK at first use
dummy:DIR     random weights of the architecture in DIR/config.json, with DIR's tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.config.tasks import TASK_ARGS
from services.wire.errors import ConfigError

TINY_TASKS = tuple(TASK_ARGS)
TINY_MAX_POSITIONS = 512


def model_problem(path: str) -> tuple[str, str] | None:
    """What is wrong with `model.path`, and the fix; None where nothing is."""
    kind, colon, rest = path.partition(":")
    if colon and kind == "tiny":
        choices = ", ".join(f"tiny:{task}" for task in TINY_TASKS)
        return None if rest in TINY_TASKS else (f"there is no task {rest!r} for the tiny model", f"choose {choices}")
    is_dummy = bool(colon) and kind == "dummy"
    return folder_problem(Path(rest if is_dummy else path), needs_weights=not is_dummy)


def folder_problem(folder: Path, *, needs_weights: bool = True) -> tuple[str, str] | None:
    """What a local Hugging Face folder lacks, and the fix; None where nothing is missing."""
    if not folder.is_dir():
        return f"there is no folder {folder}", 'name a local Hugging Face folder, "tiny:TASK" or "dummy:CONFIG_DIR"'
    needed = ["config.json", "tokenizer.json"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        return f"{folder} has no {' and no '.join(missing)}", "complete the folder (save model and tokenizer there)"
    if _read_config(folder) is None:
        return f"{folder / 'config.json'} is not a JSON object", "restore the file"
    if needs_weights and not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors", f"save the weights there, or use dummy:{folder} for random ones"
    return None


def max_positions(path: str) -> int | None:
    """The longest sequence the model is made for; None where that is not written down."""
    folder = model_folder(path)
    if folder is None:
        return TINY_MAX_POSITIONS
    config = _read_config(folder)
    if config is None:
        return None
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        value = section.get("max_position_embeddings")
        if isinstance(value, int):
            return value
    return None


def model_folder(path: str) -> Path | None:
    """The folder that `model.path` names; None for a tiny model, which is made when it is needed."""
    kind, colon, rest = path.partition(":")
    if colon and kind == "tiny":
        return None
    return Path(rest if colon and kind == "dummy" else path)


def other_inputs(path: str) -> list[str]:
    """Parts of the model's `config.json` that are about images or sound; none where it reads text alone."""
    folder = model_folder(path)
    config = (_read_config(folder) or {}) if folder is not None else {}
    return [name for name in ("vision_config", "audio_config") if config.get(name)]


def missing_sizes(folder: Path) -> list[str]:
    """What `config.json` does not say of the sizes that a sequence's cost depends on."""
    return _missing(text_config(folder))


def _missing(config: dict[str, Any]) -> list[str]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in names if not _positive(config.get(name))]
    return missing if _active_width(config) else [*missing, "intermediate_size"]


def model_sizes(folder: Path) -> dict[str, int]:
    """The sizes that a sequence's cost depends on, by the argument names of `services.packing.cost.flop_cost`.

    Raises:
        ConfigError: `config.json` is missing, or does not say one of them.
    """
    config = text_config(folder)
    missing = _missing(config)
    if missing:
        raise ConfigError([f"model.path: {folder / 'config.json'} does not say {', '.join(missing)}"])
    return sizes_of(config)


def sizes_of(config: dict[str, Any]) -> dict[str, int]:
    """The sizes of `model_sizes` from a configuration that says all of them."""
    hidden, heads = _positive(config["hidden_size"]), _positive(config["num_attention_heads"])
    return {
        "hidden_size": hidden,
        "num_layers": _positive(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": _positive(config.get("num_key_value_heads")) or heads,
        "head_dim": _positive(config.get("head_dim")) or max(1, hidden // heads),
        "intermediate_size": _active_width(config),
        "vocab_size": _positive(config["vocab_size"]),
    }


def text_config(folder: Path) -> dict[str, Any]:
    """`config.json`, or the part of it that is about the language model; empty where there is none."""
    config = _read_config(folder) or {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _active_width(config: dict[str, Any]) -> int:
    """Width of the feed-forward part that one token passes; 0 where it is not written down."""
    per_token = _positive(config.get("num_experts_per_tok"))
    if not per_token:
        return _positive(config.get("intermediate_size"))
    one = _positive(config.get("moe_intermediate_size")) or _positive(config.get("intermediate_size"))
    return per_token * one + _positive(config.get("shared_expert_intermediate_size"))


def _positive(value: Any) -> int:
    """A positive integer as it is; 0 for everything else."""
    return value if isinstance(value, int) and value > 0 else 0


def _read_config(folder: Path) -> dict[str, object] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except ValueError:
        return None
    return config if isinstance(config, dict) else None
