"""`value.init_from` and an exported folder as `model.path`, as far as the resolver sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import from_toml, to_toml
from services.wire.errors import ConfigError
from tests.exports import CONFIG, base_of, critic_of, write_critic


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_of(tmp_path / "base", "llama")


@pytest.fixture
def critic(tmp_path: Path, base: Path) -> Path:
    return write_critic(critic_of(base), base, tmp_path / "critic")


@pytest.fixture
def path(tmp_path: Path, base: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.replace("PATH", str(base)))
    return file


def only_problem(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve([path], overrides)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_a_critic_starts_as_the_model_unless_said_otherwise(path: Path, critic: Path) -> None:
    config = resolve([path]).config
    assert config.value is not None and config.value.init_from is None
    config = resolve([path], [("value.init_from", str(critic))]).config
    assert config.value is not None and config.value.init_from == str(critic)
    assert from_toml(to_toml(config)) == config


@pytest.mark.parametrize("name", ["tiny:add", "dummy:configs/demo/dummy-model", "nowhere"])
def test_only_folders_are_taken(path: Path, name: str) -> None:
    problem = only_problem(path, ("value.init_from", name))
    assert "value.init_from: " in problem and ("is no folder; fix: delete it" in problem or "no folder no" in problem)


def test_a_folder_without_a_model_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    problem = only_problem(path, ("value.init_from", str(tmp_path / "empty")))
    assert f"value.init_from: {tmp_path / 'empty'} has no config.json and no tokenizer.json" in problem


def test_another_support_is_found_before_anything_starts(path: Path, critic: Path) -> None:
    problem = only_problem(path, ("value.init_from", str(critic)), ("value.loss", '{type = "mse"}'))
    assert "5 bins on [-1, 1]" in problem and "wants a scalar" in problem


def test_a_model_that_is_not_made_yet_is_compared_later(path: Path, critic: Path) -> None:
    """`tiny:add` is made by the launcher; a problem of `model.path` itself is told once."""
    settings = [("value.init_from", str(critic)), ("inference.max_model_len", "64")]
    resolve([path], [("model.path", "tiny:add"), *settings])
    assert "model.path: there is no folder nowhere" in only_problem(path, ("model.path", "nowhere"), *settings)


def test_a_critic_is_no_model_to_start_a_policy_from(path: Path, critic: Path) -> None:
    problem = only_problem(path, ("model.path", str(critic)))
    assert f"model.path: {critic} is an exported critic: it has no output head" in problem
    assert f'value.init_from = "{critic}"' in problem
    config = json.loads((critic / "config.json").read_text())
    assert config["counterpoint"]["role"] == "critic"


def test_an_exported_policy_is_a_model_path_and_a_critic_s_start(path: Path, tmp_path: Path, base: Path) -> None:
    from services.model.export import export_policy
    from services.model.load import load_causal_lm
    from tests.exports import FACTS, state_of

    out = export_policy(state_of(load_causal_lm(base)), base, tmp_path / "policy", **FACTS)
    config = resolve([path], [("model.path", str(out)), ("value.init_from", str(out))]).config
    assert config.model.path == str(out)


def test_a_width_that_config_json_calls_otherwise_is_left_to_the_model(path: Path, critic: Path) -> None:
    """GPT-2 says `n_embd`; where `hidden_size` is given, another one is a problem."""
    config = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    resolve([path], [("value.init_from", str(critic))])
    (critic / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ConfigError, match=r"has a head of shapes \[7, 32\] and \[7\], not \[7, 64\] and \[7\]"):
        resolve([path], [("value.init_from", str(critic))])
