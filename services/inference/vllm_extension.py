"""Runs inside vLLM's workers: load a weight snapshot, checked as a whole before anything is replaced; sum the weights.

Notable:
- vLLM imports this in its own environment (`--worker-extension-cls`), so it needs torch and safetensors alone.
- A folder with a LoRA adapter is added to the checkpoint that the engine started from, and loaded like any other.
- Called by `/collective_rpc` while the engine is paused: vLLM's parameters are rebuilt layer by layer, and a forward in
  the middle of that ends the engine.
- vLLM's own failed reload may leave half of the new weights, hence the checks against the checkpoint it started from.
- On CPU vLLM keeps a packed copy of the output head that a reload misses where the head is tied to the embedding: it
  would sample with the old head and report log-probabilities to match. It is packed again here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.inference.adapters import is_adapter, merge_adapter
from services.model.checksum import weights_checksum

TIED_NAME = "lm_head.weight"
"""May be absent where the embedding is tied to it."""


class SnapshotExtension:
    """Mixed into vLLM's worker; `model_runner` and `vllm_config` are the worker's."""

    model_runner: Any
    vllm_config: Any

    def load_snapshot(self, path: str, version: str) -> str:
        """Replace the weights by those of a Hugging Face folder, or by the start's with an adapter folder added.

        Args:
            path: the folder.
            version: the policy version it holds; only echoed, the label is set by `/update_weight_version`.

        Raises:
            ValueError: the snapshot does not fit or is not finite; nothing was replaced.
        """
        base = Path(self.vllm_config.model_config.model)
        tensors = merge_adapter(read_tensors(base), Path(path)) if is_adapter(Path(path)) else read_tensors(Path(path))
        check_tensors(tensors, checkpoint_shapes(base), path)
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        if TIED_NAME not in tensors:
            _pack_tied_heads(self.model_runner.get_model())
        return version

    def weights_checksum(self) -> str:
        """Sum what this worker has in memory of the model, to be compared before a sleep and after it."""
        return weights_checksum(self.model_runner.get_model())


def _pack_tied_heads(model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        ParallelLMHead,
    )

    module: Any
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def checkpoint_shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of a folder's tensors, from the files' headers."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return shapes


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, list[int]], path: str) -> None:
    """Compare a snapshot with the checkpoint that the engine started from.

    Raises:
        ValueError: naming the first missing, unknown, misshapen or non-finite tensor.
    """
    if not tensors:
        raise ValueError(f"snapshot {path} holds no safetensors file")
    missing, unknown = set(expected) - set(tensors) - {TIED_NAME}, set(tensors) - set(expected) - {TIED_NAME}
    if missing or unknown:
        raise ValueError(f"snapshot {path}: lacks {sorted(missing)[:3]}, has the unknown {sorted(unknown)[:3]}")
    for name, tensor in tensors.items():
        if name in expected and list(tensor.shape) != expected[name]:
            raise ValueError(f"snapshot {path}: {name} has shape {list(tensor.shape)}, not {expected[name]}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"snapshot {path}: {name} holds a non-finite number")
