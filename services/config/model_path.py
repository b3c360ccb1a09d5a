"""What can be known of `model.path` without loading a model.

FOLDER        a local Hugging Face folder
tiny:TASK     the 0.43 M model, made and warm-started on TASK at first use
dummy:DIR     random weights of the architecture in DIR/config.json, with DIR's tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path

from services.config.tasks import TASK_ARGS

TINY_TASKS = tuple(TASK_ARGS)
TINY_MAX_POSITIONS = 512


def model_problem(path: str) -> tuple[str, str] | None:
    """What is wrong with `model.path`, and the fix; None where nothing is."""
    kind, colon, rest = path.partition(":")
    if colon and kind == "tiny":
        choices = ", ".join(f"tiny:{task}" for task in TINY_TASKS)
        return None if rest in TINY_TASKS else (f"there is no task {rest!r} for the tiny model", f"choose {choices}")
    is_dummy = bool(colon) and kind == "dummy"
    folder = Path(rest if is_dummy else path)
    if not folder.is_dir():
        return f"there is no folder {folder}", 'name a local Hugging Face folder, "tiny:TASK" or "dummy:CONFIG_DIR"'
    needed = ["config.json", "tokenizer.json"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        return f"{folder} has no {' and no '.join(missing)}", "complete the folder (save model and tokenizer there)"
    if _read_config(folder) is None:
        return f"{folder / 'config.json'} is not a JSON object", "restore the file"
    if not is_dummy and not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors", f"save the weights there, or use dummy:{folder} for random ones"
    return None


def max_positions(path: str) -> int | None:
    """The longest sequence the model is made for; None where that is not written down."""
    kind, colon, rest = path.partition(":")
    if colon and kind == "tiny":
        return TINY_MAX_POSITIONS
    config = _read_config(Path(rest if colon and kind == "dummy" else path))
    if config is None:
        return None
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        value = section.get("max_position_embeddings")
        if isinstance(value, int):
            return value
    return None


def _read_config(folder: Path) -> dict[str, object] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except ValueError:
        return None
    return config if isinstance(config, dict) else None
