"""`freeze`, `[policy.lora]`, `[value.lora]`: their defaults, and what is refused before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import from_toml, to_toml
from services.config.train import LoraConfig, PolicyLoraConfig
from services.wire.errors import ConfigError

BASE = """\
[model]
path = "tiny:add"
[algorithm]
type = "ppo"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "base.toml"
    file.write_text(BASE)
    return file


def only_problem(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve([path], overrides)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_everything_trains_whole_unless_said_otherwise(path: Path) -> None:
    config = resolve([path]).config
    assert config.value is not None
    assert (config.policy.lora, config.policy.freeze, config.value.lora, config.value.freeze) == (None, [], None, [])
    assert config.value.warmup.head_only_updates == 0


def test_naming_a_lora_table_turns_it_on_with_its_defaults(path: Path) -> None:
    settings = [("policy.lora.rank", "8"), ("value.lora", "{}"), ("value.freeze", '["attention", "layers.0"]')]
    config = resolve([path], settings).config
    assert config.value is not None
    assert config.policy.lora == PolicyLoraConfig(rank=8, alpha=32.0, targets=["all-linear"], publish="merged")
    assert config.value.lora == LoraConfig(rank=16, alpha=32.0, targets=["all-linear"])
    assert from_toml(to_toml(config)) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([("value.freeze", '["layers..0"]')], ("value.freeze", "'layers..0' is no name of a part")),
        ([("policy.freeze", '[""]')], ("policy.freeze", "'' is no name of a part")),
        ([("policy.lora.targets", '["q_proj", "mlp."]')], ("policy.lora.targets", "'mlp.' is no name")),
        ([("value.lora.targets", "[]")], ("value.lora.targets", "no layer is named", "all-linear")),
        (
            [("value.lora.targets", '["q_proj", "self_attn.k_proj"]'), ("value.freeze", '["attention", "q_proj"]')],
            ("value.lora.targets", "value.freeze holds all of them"),
        ),
    ],
)
def test_names_that_cannot_be_meant_are_refused(
    path: Path, settings: list[tuple[str, str]], said: tuple[str, ...]
) -> None:
    problem = only_problem(path, *settings)
    assert all(text in problem for text in said), problem


@pytest.mark.parametrize(
    ("targets", "freeze"),
    [
        ('["all-linear"]', '["attention"]'),
        ('["q_proj"]', '["attention"]'),
        ('["self_attn", "up_proj"]', '["attention"]'),
    ],
)
def test_what_only_the_model_can_tell_is_left_to_it(path: Path, targets: str, freeze: str) -> None:
    resolve([path], [("value.lora.targets", targets), ("value.freeze", freeze)])


def test_lora_without_peft_names_the_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
    problem = only_problem(path, ("policy.lora.rank", "8"))
    assert "policy.lora" in problem and "pip install 'counterpoint[lora]'" in problem
    resolve([path])


def test_an_adapter_alone_needs_a_checkpoint_that_the_engine_can_add_it_to(path: Path) -> None:
    folder = Path(__file__).parents[4] / "configs" / "demo" / "dummy-model"
    settings = [("model.path", f"dummy:{folder}"), ("policy.lora.publish", "adapter")]
    problem = only_problem(path, *settings)
    assert "policy.lora.publish" in problem and '"merged"' in problem
    resolve([path], settings[1:])
