"""Snapshots: whole or absent, readable by others, and refused when a byte differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_logits
from services.model.snapshot import MANIFEST, save_snapshot, snapshot_dir, verify_snapshot
from services.model.tiny import byte_tokenizer
from services.wire.errors import CannotWrite, ContractError
from tests.architectures import build, sequences


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a tokenizer and no weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(source: Path) -> PreTrainedModel:
    return build(source, "llama")


@pytest.fixture
def snapshot(tmp_path: Path, source: Path, model: PreTrainedModel) -> Path:
    return save_snapshot(model, tmp_path / "weights", 12, tokenizer_from=source)


def test_a_snapshot_has_its_name_its_version_and_nothing_beside_it(snapshot: Path) -> None:
    assert snapshot.name == "v000012" == snapshot_dir(snapshot.parent, 12).name
    assert verify_snapshot(snapshot) == 12
    assert [path.name for path in snapshot.parent.iterdir()] == ["v000012"]
    named = set(json.loads((snapshot / MANIFEST).read_text())["files"])
    assert named == {path.name for path in snapshot.iterdir()} - {MANIFEST}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= named


def test_a_snapshot_is_an_ordinary_folder_with_the_same_weights(snapshot: Path, model: PreTrainedModel) -> None:
    plain = AutoModelForCausalLM.from_pretrained(snapshot)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])
    ours = load_causal_lm(snapshot)
    (ids,), positions = sequences(7), torch.arange(7)
    with torch.no_grad():
        before, after = (packed_logits(m, ids, PackedLayout.of([7]), positions) for m in (model, ours))
    assert torch.equal(before, after)


def test_experts_get_their_hub_names_and_come_back_equal(tmp_path: Path, source: Path) -> None:
    from safetensors import safe_open

    model = build(source, "qwen3-moe")
    path = save_snapshot(model, tmp_path / "weights", 1, tokenizer_from=source)
    with safe_open(path / "model.safetensors", "pt") as file:
        assert any("experts.3.down_proj.weight" in name for name in file.keys())  # noqa: SIM118
    again = load_causal_lm(path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_file_is_refused_by_name(snapshot: Path, name: str, damage: str) -> None:
    path = snapshot / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(ContractError, match=name):
        verify_snapshot(snapshot)


def test_a_folder_without_a_manifest_is_no_snapshot(snapshot: Path) -> None:
    (snapshot / MANIFEST).unlink()
    with pytest.raises(ContractError, match=MANIFEST):
        verify_snapshot(snapshot)


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path, source: Path, model: PreTrainedModel) -> None:
    part = tmp_path / "weights" / ".v000003.part"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half")
    (part / "of an older layout").write_text("x")
    path = save_snapshot(model, tmp_path / "weights", 3, tokenizer_from=source)
    assert verify_snapshot(path) == 3 and not part.exists()
    assert not (path / "of an older layout").exists()


def test_a_version_that_exists_is_never_mixed_with_another(
    tmp_path: Path, source: Path, snapshot: Path, model: PreTrainedModel
) -> None:
    before = (snapshot / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(CannotWrite, match="v000012"):
        save_snapshot(model, tmp_path / "weights", 12, tokenizer_from=source)
    assert (snapshot / "model.safetensors").read_bytes() == before and verify_snapshot(snapshot) == 12


def test_to_verify_a_snapshot_needs_no_torch() -> None:
    code = "import sys, services.model.snapshot; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
