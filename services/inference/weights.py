"""Read a weight snapshot for a loaded model: everything is checked before anything is swapped.

Notable:
- A snapshot is a Hugging Face folder: safetensors with hub names. Names, shapes and finiteness are checked on the whole
  of it first (and the manifest's sums, where it has one), so a bad snapshot leaves the served weights as they were.
- Tied weights may appear under any of their names, but once at least.
- A snapshot may be a LoRA adapter alone: it is added to the checkpoint that the model was loaded from.
- Where hub names differ from the names in memory (fused experts), transformers' own loader converts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from services.inference.adapters import is_adapter, merge_adapter
from services.model.attention import IMPLEMENTATION
from services.model.snapshot import MANIFEST, verify_snapshot
from services.wire.errors import ContractError

StagedWeights = list[tuple[torch.Tensor, torch.Tensor]]
"""(tensor of the model, its new content), one pair per storage."""


def read_snapshot(model: PreTrainedModel, path: Path) -> StagedWeights:
    """Read and check a snapshot without touching the model.

    Raises:
        ContractError: naming the first thing wrong: no or unreadable files, a missing, unknown, misshapen or
            non-finite tensor.
    """
    if (path / MANIFEST).is_file():
        verify_snapshot(path)
    tensors = _with_adapter(model, path) if is_adapter(path) else _tensors(path)
    own = model.state_dict()
    if not set(tensors) <= set(own):
        tensors = _converted(model, tensors, path)
    staged = [(own[names[0]], _only(tensors, names, own[names[0]], path)) for names in _storages(own)]
    return staged


@torch.inference_mode()
def swap(staged: StagedWeights) -> None:
    """Copy checked weights into the model."""
    for target, new in staged:
        target.copy_(new)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ContractError(f"snapshot {path} holds no safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ContractError(f"snapshot file {file} cannot be read: {error}") from error
    return tensors


def _with_adapter(model: PreTrainedModel, path: Path) -> dict[str, torch.Tensor]:
    """The weights that the model was loaded from, an adapter added."""
    try:
        return merge_adapter(_tensors(Path(str(model.name_or_path))), path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ContractError(f"snapshot {path} cannot be added to {model.name_or_path}: {error}") from error


def _storages(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names grouped by the storage they share."""
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    return list(groups.values())


def _only(tensors: dict[str, torch.Tensor], names: list[str], like: torch.Tensor, path: Path) -> torch.Tensor:
    """The one content of a storage, checked."""
    found = [name for name in names if name in tensors]
    if not found:
        raise ContractError(f"snapshot {path} lacks {names[0]}")
    tensor = tensors[found[0]]
    if tensor.shape != like.shape:
        raise ContractError(f"snapshot {path}: {found[0]} has shape {list(tensor.shape)}, not {list(like.shape)}")
    if not torch.isfinite(tensor).all():
        raise ContractError(f"snapshot {path}: {found[0]} holds a non-finite number")
    for other in found[1:]:
        if not torch.equal(tensor, tensors[other]):
            raise ContractError(f"snapshot {path}: {other} is tied to {found[0]} but differs from it")
    return tensor


def _converted(model: PreTrainedModel, tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The snapshot under the names in memory, through transformers' loader.

    Raises:
        ContractError: on a name the architecture does not know.
    """
    try:
        result: Any = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(tensors),
            attn_implementation=IMPLEMENTATION,
            dtype=model.dtype,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ContractError(f"snapshot {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    loaded, info = result
    for problem, word in (("unexpected_keys", "has the unknown tensor"), ("missing_keys", "lacks")):
        if info[problem]:
            raise ContractError(f"snapshot {path} {word} {min(info[problem])}")
    if info["mismatched_keys"]:
        raise ContractError(f"snapshot {path}: {min(info['mismatched_keys'])[0]} has another shape")
    return loaded.state_dict()
