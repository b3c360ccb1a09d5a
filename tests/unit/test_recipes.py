"""Every recipe resolves, what the repository ships can be started; and recipes hold their papers' numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import Config, from_toml, to_toml
from services.config.validate import ALGORITHMS
from services.wire.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
RUNNABLE = sorted([*(ROOT / "configs" / "demo").glob("*.toml"), *(ROOT / "tests/processes/configs").glob("*.toml")])
WITH_A_MODEL = sorted(RECIPES.glob("*.toml"))
LAYOUTS = sorted((ROOT / "configs" / "cluster").glob("*.toml"))
"""Looked at in `test_cluster_recipes.py`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that stands for the user's model: real, small, and made for 128K positions."""
    folder = tmp_path_factory.mktemp("recipes") / "model"
    shutil.copytree(ROOT / "configs" / "demo" / "dummy-model", folder)
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 131_072}))
    return f"dummy:{folder}"


def recipe(name: str, model: str) -> Config:
    return resolve([RECIPES / f"{name}.toml"], [("model.path", model)]).config


def number(config: Config, key: str) -> object:
    node: object = config
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, list) else getattr(node, part)
    return node


def test_every_shipped_configuration_is_one_of_the_three_kinds() -> None:
    assert {*(ROOT / "configs").rglob("*.toml")} <= {*RUNNABLE, *WITH_A_MODEL, *LAYOUTS}


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_configuration_resolves_and_loads_as_it_was_dumped(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = resolve([path], []).config
    assert from_toml(to_toml(config)) == config


@pytest.mark.parametrize("path", WITH_A_MODEL, ids=lambda path: path.name)
def test_recipe_resolves_with_a_model_and_loads_as_it_was_dumped(path: Path, model: str) -> None:
    config = recipe(path.stem, model)
    assert from_toml(to_toml(config)) == config
    assert f"counterpoint run configs/recipes/{path.name} machine.toml --model.path FOLDER" in path.read_text()


@pytest.mark.parametrize("path", WITH_A_MODEL, ids=lambda path: path.name)
def test_recipe_lacks_nothing_but_the_model(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        resolve([path])
    (problem,) = caught.value.problems
    assert "model.path: there is no folder models/policy" in problem


def test_each_algorithm_has_a_recipe(model: str) -> None:
    assert {recipe(path.stem, model).algorithm.type for path in WITH_A_MODEL} == {*ALGORITHMS}


SAO = {"algorithm.type": "sao", "algorithm.alpha": 1.5, "algorithm.value_lambda": 1.0, "algorithm.whiten": False}
TOOL = SAO | {"algorithm.eps_low": 0.3, "algorithm.eps_high": 5.0}
SAO_SETTING = {"policy.optim.lr": 1e-6, "orchestrator.batch_size": 128, "env.0.max_trace_tokens": 131_072}
SINGLE = {"orchestrator.group_size": 1}
SAO_CRITIC = {"value.optim.lr": 5e-6, "value.warmup.lr_updates": 10, "value.updates_per_batch": 2}
GROUPS_16X8 = {"orchestrator.batch_size": 128, "orchestrator.group_size": 8}
COMPARE_16K = {"orchestrator.batch_size": 256, "orchestrator.group_size": 8, "env.0.max_turn_tokens": 15_360}
COMPARE_16K |= {"env.0.max_trace_tokens": 16_384, "policy.model.seq_len": 16_384, "inference.max_model_len": 16_384}
CLIP_HIGHER = {"algorithm.eps_low": 0.2, "algorithm.eps_high": 0.28}
NUMBERS: dict[str, dict[str, object]] = {
    "sao-tool": TOOL | SAO_SETTING | SINGLE | SAO_CRITIC,
    "sao-coding": SAO
    | SAO_SETTING
    | SINGLE
    | SAO_CRITIC
    | {"algorithm.eps_low": 0.8, "algorithm.eps_high": 3.0, "env.0.max_turns": 300},
    "grpo-16x8": {"algorithm.type": "grpo", "algorithm.policy_loss": "ppo_clip", "value": None}
    | CLIP_HIGHER
    | SAO_SETTING
    | GROUPS_16X8,
    "running-mean": {
        "algorithm.type": "running_mean",
        "algorithm.scope": "prompt",
        "algorithm.prompt_window": 8,
        "algorithm.global_window": 128,
        "algorithm.policy_loss": "dis",
        "algorithm.eps_low": 0.3,
        "algorithm.eps_high": 5.0,
        "value": None,
    }
    | SAO_SETTING
    | SINGLE,
    "vapo": {"algorithm.type": "vapo", "algorithm.alpha": 0.05, "algorithm.value_lambda": 1.0}
    | CLIP_HIGHER
    | {"policy.optim.lr": 1e-6, "value.optim.lr": 2e-6, "value.warmup.critic_only_steps": 50},
    "spo": {"algorithm.type": "spo", "algorithm.rho_low": 0.875, "algorithm.rho_high": 0.96} | SINGLE | {"value": None},
    "evpo": {"algorithm.type": "evpo", "algorithm.scope": "group", "algorithm.threshold": 0.0} | GROUPS_16X8,
    "compare-16k-ppo": {"algorithm.type": "ppo"} | COMPARE_16K,
    "compare-16k-sao": TOOL | COMPARE_16K,
    "compare-16k-grpo": {"algorithm.type": "grpo", "value": None} | COMPARE_16K,
    "sao-32k": TOOL
    | {
        "orchestrator.max_steps": 400,
        "orchestrator.batch_size": 64,
        "orchestrator.max_off_policy_steps": 8,
        "env.0.max_trace_tokens": 32_768,
        "env.0.max_turn_tokens": 31_744,
    },
    "math-4b": GROUPS_16X8
    | {
        "policy.optim.lr": 1e-6,
        "value.optim.lr": 5e-6,
        "value.warmup.lr_updates": 20,
        "value.updates_per_batch": 1,
        "env.0.max_trace_tokens": 16_384,
    },
}


def test_the_numbers_of_every_recipe_are_checked() -> None:
    assert [*sorted(NUMBERS)] == [path.stem for path in WITH_A_MODEL]


@pytest.mark.parametrize("name", NUMBERS)
def test_recipe_holds_the_numbers_of_its_source(name: str, model: str) -> None:
    config = recipe(name, model)
    assert {key: number(config, key) for key in NUMBERS[name]} == NUMBERS[name]


def test_what_is_compared_at_16k_differs_in_nothing_but_the_method(model: str) -> None:
    ppo, sao, grpo = (recipe(f"compare-16k-{name}", model) for name in ("ppo", "sao", "grpo"))
    for part in ("model", "orchestrator", "env", "policy", "inference", "deployment"):
        assert getattr(ppo, part) == getattr(sao, part) == getattr(grpo, part), part


def test_a_smoke_run_has_its_own_files_and_values(model: str) -> None:
    """Tiny models and large learning rates belong to the demo, a folder of the user's to the recipes."""
    for path in WITH_A_MODEL:
        assert recipe(path.stem, model).policy.optim.lr == 1e-6 and "tiny:" not in path.read_text()
    for path in (ROOT / "configs" / "demo").glob("*.toml"):
        assert "tiny:" in path.read_text() or "dummy:" in path.read_text()
