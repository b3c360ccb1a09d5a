"""An adapter folder becomes whole weights: by the merge alone, in the local engine, in vLLM's worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.config.train import LoraConfig, PolicyLoraConfig
from services.inference.adapters import is_adapter, merge_adapter
from services.inference.vllm_extension import SnapshotExtension
from services.inference.weights import read_snapshot, swap
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_logits
from services.model.lora import adapter_files, add_lora, merged_state_dict
from services.wire.errors import ContractError
from tests.architectures import build, sequences

ARCHITECTURES = ("llama", "gemma3", "qwen3-moe")
CONFIG = PolicyLoraConfig(rank=2, alpha=6.0, publish="adapter")
SETTINGS = {"peft_type": "LORA", "bias": "none", "r": 1, "lora_alpha": 3.0}
PAIR = {
    "base_model.model.up.lora_A.weight": torch.tensor([[1.0, 2.0, 0.0]]),  # [r, in]
    "base_model.model.up.lora_B.weight": torch.tensor([[1.0], [-1.0]]),  # [out, r]
}
BASE = {"up.weight": torch.ones(2, 3), "norm.weight": torch.ones(3)}
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def write(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def trained(tmp_path: Path, architecture: str, config: LoraConfig = CONFIG) -> tuple[Path, Path, dict[str, Any]]:
    """A base folder, an adapter folder written by the trainer, and the weights that it stands for."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    build(base, architecture).save_pretrained(base)
    folder.mkdir()
    model = add_lora(load_causal_lm(base), config, frozen=[], role="policy", seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapter_files(model.state_dict(), model, folder)
    return base, folder, merged_state_dict(model.state_dict(), model)


def test_the_merge_by_hand(tmp_path: Path) -> None:
    """Scale 3 / 1: 1 + 3 [1, 2, 0] in the first row, 1 - 3 [1, 2, 0] in the second."""
    folder = write(tmp_path / "a", PAIR)
    merged = merge_adapter(BASE, folder)
    assert merged["up.weight"].tolist() == [[4.0, 7.0, 1.0], [-2.0, -5.0, 1.0]]
    assert merged["norm.weight"] is BASE["norm.weight"] and torch.equal(BASE["up.weight"], torch.ones(2, 3))
    assert is_adapter(folder) and not is_adapter(tmp_path)


def test_sums_are_f32_whatever_the_checkpoint_is(tmp_path: Path) -> None:
    tiny = {name: tensor * 2**-6 for name, tensor in PAIR.items()}
    merged = merge_adapter({"up.weight": torch.ones(2, 3).bfloat16()}, write(tmp_path / "a", tiny))["up.weight"]
    assert merged.dtype == torch.float32 and float(merged[0, 0]) == 1 + 3 * 2**-12, "lost in bfloat16"


@pytest.mark.parametrize(
    ("tensors", "settings", "said"),
    [
        (PAIR, {"use_dora": True}, "use_dora = True is not supported"),
        (PAIR, {"use_rslora": True}, "use_rslora"),
        (PAIR, {"alpha_pattern": {"up": 1}}, "alpha_pattern"),
        (PAIR, {"target_parameters": ["experts.up"]}, "target_parameters"),
        (PAIR, {"r": 2}, "cannot take"),
        ({name: tensor for name, tensor in PAIR.items() if "lora_A" in name}, {}, "not one of a pair"),
        ({name.replace("up", "down"): tensor for name, tensor in PAIR.items()}, {}, "not one of a pair on a layer"),
        ({name: tensor.mT.contiguous() for name, tensor in PAIR.items()}, {}, r"\[2, 3\] and cannot take"),
        (PAIR | {"base_model.model.head.weight": torch.ones(1)}, {}, "head.weight is not one of a pair"),
    ],
)
def test_what_is_no_plain_adapter_of_the_base_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        merge_adapter(BASE, write(tmp_path / "a", tensors, **settings))


@each_architecture
def test_the_merge_gives_the_trainer_s_own_merged_weights(tmp_path: Path, architecture: str) -> None:
    base, folder, expected = trained(tmp_path, architecture)
    stored = load_file(base / "model.safetensors")
    merged = merge_adapter(stored, folder)
    assert set(merged) == set(stored)
    changed = {name for name in stored if not torch.equal(merged[name], stored[name])}
    assert changed and all(torch.equal(merged[name], expected[name]) for name in changed)


@each_architecture
def test_the_local_engine_takes_an_adapter_for_a_snapshot(tmp_path: Path, architecture: str) -> None:
    """Twice: the second is added to the checkpoint again, not to what the first left."""
    base, folder, expected = trained(tmp_path, architecture)
    served = load_causal_lm(base)
    for _ in range(2):
        swap(read_snapshot(served, folder))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in served.state_dict().items())
    (ids,) = sequences(7)
    plain = load_causal_lm(base)
    with torch.no_grad():
        new, old = (packed_logits(m, ids, PackedLayout.of([7]), torch.arange(7)) for m in (served, plain))
    assert not torch.allclose(new, old, atol=1e-2)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensors: tensors.pop(min(tensors)), "not one of a pair"),
        (lambda tensors: tensors[min(tensors)].fill_(float("nan")), "non-finite"),
    ],
)
def test_a_bad_adapter_is_refused_and_the_served_weights_stay(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    base, folder, _ = trained(tmp_path, "llama")
    tensors = load_file(folder / "adapter_model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    served = load_causal_lm(base)
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    with pytest.raises(ContractError, match=said):
        read_snapshot(served, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())


def test_whole_snapshots_of_fused_experts_are_still_converted_and_checked(tmp_path: Path) -> None:
    base, _, _ = trained(tmp_path, "qwen3-moe")
    served, other = load_causal_lm(base), build(tmp_path / "other", "qwen3-moe", seed=9)
    other.save_pretrained(tmp_path / "other")
    swap(read_snapshot(served, tmp_path / "other"))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in served.state_dict().items())
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    for change, said in (({"more.weight": torch.ones(1)}, "unknown tensor more.weight"), ({}, "lacks")):
        kept = {name: tensor for name, tensor in tensors.items() if change or "layers.0.mlp.gate" not in name}
        save_file(kept | change, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ContractError, match=said):
            read_snapshot(served, tmp_path / "other")


class Runner:
    """Stands for vLLM's model runner: takes hub names and tensors."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights_iterator)

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Module()


def worker(base: Path) -> tuple[SnapshotExtension, Runner]:
    extension, runner = SnapshotExtension(), Runner()
    extension.model_runner = runner
    extension.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(base)))
    return extension, runner


@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_a_worker_of_vllm_loads_the_merged_checkpoint_under_hub_names(tmp_path: Path, architecture: str) -> None:
    base, folder, expected = trained(tmp_path, architecture)
    extension, runner = worker(base)
    for _ in range(2):
        assert extension.load_snapshot(str(folder), "4") == "4"
        stored = load_file(base / "model.safetensors")
        assert set(runner.loaded) == set(stored)
        changed = [name for name in stored if not torch.equal(runner.loaded[name], stored[name])]
        assert len(changed) >= 8 and all(torch.equal(runner.loaded[name], expected[name]) for name in changed)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_worker_of_vllm_refuses_a_bad_adapter_before_anything_is_replaced(tmp_path: Path, part: str) -> None:
    base, folder, _ = trained(tmp_path, "llama")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = min(name for name in tensors if part in name)
    tensors[name] = tensors[name].fill_(float("inf"))
    save_file(tensors, folder / "adapter_model.safetensors")
    extension, runner = worker(base)
    with pytest.raises(ValueError, match="non-finite"):
        extension.load_snapshot(str(folder), "4")
    assert not runner.loaded
