"""Weights as an atomic folder that transformers and vLLM read: safetensors with hub names, config, tokenizer, manifest.

Notable:
- Written beside its final name and renamed into place, so a reader sees a whole snapshot or none.
- `save_pretrained` writes hub names (fused experts are split again), which a raw state dict would not.
- The manifest names every file with size and sha256; `verify_snapshot` refuses what does not match.
- Imports no torch: whoever only verifies need not pay for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.runtime.durable import rename_dir
from services.wire.errors import ContractError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
MANIFEST = "manifest.json"


def snapshot_dir(weights_dir: Path, version: int) -> Path:
    """`weights/v000012` for version 12."""
    return weights_dir / f"v{version:06d}"


def save_snapshot(
    model: PreTrainedModel,
    weights_dir: Path,
    version: int,
    *,
    tokenizer_from: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write version `version` and return its folder.

    Args:
        model: The architecture; may be on the meta device where `state` is given.
        weights_dir: Where versions are kept.
        version: Policy version.
        tokenizer_from: Folder whose tokenizer files are copied.
        state: All parameters by the model's names; None = the model's own.

    Raises:
        CannotWrite: when the disk does not take it; nothing is left under the final name.
    """

    def write(part: Path) -> None:
        model.save_pretrained(part, state_dict=state)
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, part / name)

    return write_snapshot(weights_dir, version, write)


def write_snapshot(weights_dir: Path, version: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder, add the manifest and give it its final name.

    Raises:
        CannotWrite: when the disk does not take it; nothing is left under the final name.
    """
    target = snapshot_dir(weights_dir, version)
    part = weights_dir / f".{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    files = {path.name: _describe(path) for path in sorted(part.iterdir())}
    (part / MANIFEST).write_text(json.dumps({"version": version, "files": files}, indent=1))
    rename_dir(part, target)
    return target


def verify_snapshot(path: Path) -> int:
    """Check every file against the manifest and return the version.

    Raises:
        ContractError: naming the file that is missing or differs.
    """
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        raise ContractError(f"{path} has no {MANIFEST}")
    manifest = json.loads(manifest_path.read_text())
    for name, description in manifest["files"].items():
        file = path / name
        if not file.is_file() or _describe(file) != description:
            raise ContractError(f"{file} is missing or differs from its manifest")
    return int(manifest["version"])


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}
