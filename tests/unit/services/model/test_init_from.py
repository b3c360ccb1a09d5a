"""A critic that starts from a folder: the head is loaded or made, never in silence, and nothing foreign passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from safetensors.torch import load_file, save_file

from services.config.exported import tokenizer_sha256
from services.config.train import ClassificationConfig, HlGaussConfig, MseConfig, TwoHotConfig, ValueConfig
from services.model.backbone import load_backbone
from services.model.head import Critic
from services.model.init_from import critic_source
from services.model.mesh import Mesh
from services.model.tiny import byte_tokenizer
from services.wire.errors import ConfigError
from tests.architectures import config_dir
from tests.exports import FACTS, POINTS, base_of, bytes_of, critic_of, our_values, state_of, write_critic
from value_service.losses.support import Support

LOSS = TwoHotConfig(type="two_hot", bins=5, range=[-1.0, 1.0], pad=1)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged."""
    found: list[str] = []
    number = logger.add(lambda message: found.append(str(message).strip()), format="{message}")
    yield found
    logger.remove(number)


def start(init_from: Path | str | None, model_dir: Path, loss: Any = LOSS, *, gamma: float = 0.9) -> Critic:
    """A critic as the value service builds it."""
    value = ValueConfig(init_from=None if init_from is None else str(init_from), loss=loss)
    source = critic_source(value, model_dir=model_dir, model_init="pretrained", gamma=gamma)
    backbone = load_backbone(source.folder, value.model, Mesh(), role="value", init=source.init)
    points = None
    if isinstance(loss, ClassificationConfig):
        points = Support(*loss.range, loss.bins, loss.pad).points.tolist()
    critic = Critic(backbone.model, head_init_std=0.02, seed=7, points=points)
    source.fill_head(critic.head, Mesh())
    return critic


def problem_of(init_from: Path | str, model_dir: Path, loss: Any = LOSS) -> str:
    with pytest.raises(ConfigError) as caught:
        start(init_from, model_dir, loss)
    (problem,) = caught.value.problems
    return problem


# ---------------------------------------------------------------------------------------------------------------------
# What comes along


@pytest.mark.parametrize("points", [None, POINTS], ids=["scalar", "classes"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2", "gemma3", "granite"])
def test_export_import_export_is_equal_byte_for_byte(tmp_path: Path, name: str, points: list[float] | None) -> None:
    """C02. Both forms of the folder, tied and untied output heads, fused experts."""
    base = base_of(tmp_path / "base", name)
    critic = critic_of(base, points=points)
    with torch.no_grad():
        for parameter in critic.backbone.parameters():
            parameter.add_(0.01)  # as if it had trained: no longer the base
    first = write_critic(critic, base, tmp_path / "first")
    again = start(first, base, MseConfig() if points is None else LOSS)
    before, after = state_of(critic), state_of(again)
    assert set(before) == set(after) and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(our_values(critic), our_values(again))
    second = write_critic(again, first, tmp_path / "second")
    assert bytes_of(first) == bytes_of(second)
    third = write_critic(again, base, tmp_path / "third")
    assert bytes_of(first) == bytes_of(third)


def test_one_line_says_that_a_head_was_loaded_and_its_norm(tmp_path: Path, lines: list[str]) -> None:
    base = base_of(tmp_path / "base", "llama")
    critic = critic_of(base)
    with torch.no_grad():
        critic.head.weight.zero_()
        critic.head.weight[2, 5] = 3.0
        critic.head.bias.zero_()
        critic.head.bias[1] = 4.0
    folder = write_critic(critic, base, tmp_path / "critic")
    start(folder, base)
    assert lines == [f"critic from {folder}: value head loaded (from {FACTS['source']}), norm 5"]


def test_a_language_model_gets_the_run_s_own_head(tmp_path: Path, lines: list[str]) -> None:
    """Scenario: another checkpoint of the same shape. Result: its backbone, and the head that a seed makes."""
    base, other = base_of(tmp_path / "base", "llama"), base_of(tmp_path / "other", "llama")
    tensors = {name: tensor + 0.5 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    critic, plain = start(other, base), start(None, base)
    assert torch.equal(critic.backbone.norm.weight, plain.backbone.norm.weight + 0.5)  # pyright: ignore
    assert torch.equal(critic.head.weight, plain.head.weight) and critic.head.weight.std() > 0.01
    norm = float(plain.head.weight.detach().norm())
    assert lines == [f"critic from {other}: value head made, for the folder has none, norm {norm:.6g}"]


def test_without_the_key_nothing_is_said(tmp_path: Path, lines: list[str]) -> None:
    start(None, base_of(tmp_path / "base", "llama"))
    assert lines == []


def test_the_two_classification_losses_share_a_head(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base), base, tmp_path / "critic")
    critic = start(folder, base, HlGaussConfig(type="hl_gauss", bins=5, range=[-1.0, 1.0], pad=1))
    assert torch.equal(critic.head.weight, critic_of(base).head.weight)


def test_another_gamma_is_a_warning(tmp_path: Path, lines: list[str]) -> None:
    base = base_of(tmp_path / "base", "llama")
    start(write_critic(critic_of(base), base, tmp_path / "critic"), base, gamma=1.0)
    assert lines[0] == "value.init_from learned returns with gamma 0.9; this run has 1" and len(lines) == 2


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (MseConfig(), "head for 5 bins on [-1, 1], 1 more beyond either end, value.loss wants a scalar"),
        (
            TwoHotConfig(type="two_hot", bins=51),
            "1 more beyond either end, value.loss wants 51 bins on [0, 1], 3 more beyond either end",
        ),
        (TwoHotConfig(type="two_hot", bins=5, range=[-1.0, 1.0], pad=2), "wants 5 bins on [-1, 1], 2 more beyond"),
        (TwoHotConfig(type="two_hot", bins=5, range=[0.0, 1.0], pad=1), "wants 5 bins on [0, 1], 1 more beyond"),
    ],
)
def test_another_support_is_refused_with_both(tmp_path: Path, loss: Any, said: str) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base), base, tmp_path / "critic")
    problem = problem_of(folder, base, loss)
    assert problem.startswith("value.init_from: ") and said in problem


def test_a_scalar_critic_is_refused_where_classes_are_wanted(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base, points=None), base, tmp_path / "critic")
    problem = problem_of(folder, base)
    assert "a head for a scalar, value.loss wants 5 bins" in problem and 'value.loss.type = "mse"' in problem


def test_another_architecture_or_size_is_refused_with_both(tmp_path: Path) -> None:
    base, other = base_of(tmp_path / "base", "llama"), base_of(tmp_path / "other", "qwen2")
    folder = write_critic(critic_of(other), other, tmp_path / "critic")
    assert "has model_type qwen2, model.path has llama" in problem_of(folder, base)
    assert "has model_type qwen2, model.path has llama" in problem_of(other, base)
    wide = config_dir(tmp_path / "wide", "llama")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    byte_tokenizer().save_pretrained(wide)
    folder = write_critic(critic_of(base), base, tmp_path / "narrow")
    assert "has hidden_size 32, model.path has 64" in problem_of(folder, wide)


def test_another_tokenizer_is_refused_with_both_hashes(tmp_path: Path) -> None:
    """And only its meaning counts: a tokenizer saved with another layout and padding is the same."""
    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base), base, tmp_path / "critic")
    content = json.loads((base / "tokenizer.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps(content | {"padding": {"direction": "Right"}}, indent=7))
    start(folder, base)
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (base / "tokenizer.json").write_text(json.dumps(content))
    own, ours = (tokenizer_sha256(d)[:12] for d in (folder, base))
    assert f"has the tokenizer {own}, model.path has {ours} (sha256)" in problem_of(folder, base)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert f"was exported with tokenizer {own}, its tokenizer.json is " in problem_of(folder, base)


@pytest.mark.parametrize("head", ["score.weight", "v_head.summary.weight"])
def test_a_head_that_is_not_ours_is_refused(tmp_path: Path, head: str) -> None:
    """C03: a reward model's head is not made anew in silence."""
    base, other = base_of(tmp_path / "base", "llama"), base_of(tmp_path / "other", "llama")
    tensors = load_file(other / "model.safetensors") | {head: torch.ones(1, 32)}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert f"has a head ({head} [1, 32]) and no counterpoint.json" in problem_of(other, base)


def _without_bias(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _with_facts(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "counterpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_bias, "head of shapes [7, 32] and None, not [7, 32] and [7]"),
        (_with_facts(support={"low": -1.0}), "is damaged: support"),
        (_with_facts(format=2), "is damaged: format"),
        (_with_facts(values="value at t = state before token t"), "is damaged: values"),
        (_with_facts(points=[0.0] * 7), "has points [0.0, 0.0"),
        (lambda folder: (folder / "counterpoint.json").write_text("{"), "is damaged: "),
        (lambda folder: (folder / "counterpoint.json").unlink(), "has a head (score."),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "is damaged: "),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base), base, tmp_path / "critic")
    damage(folder)
    problem = problem_of(folder, base)
    assert problem.startswith("value.init_from: ") and said in problem, problem


def test_a_backbone_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base), base, tmp_path / "critic")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{folder} lacks model.layers.1.mlp.down_proj.weight (1 such)" in problem_of(folder, base)


@pytest.mark.parametrize("name", ["tiny:add", "dummy:somewhere", "nowhere"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    problem = problem_of(name, base_of(tmp_path / "base", "llama"))
    assert "there is no folder nowhere" in problem or f"{name} is no folder; fix: delete it" in problem
