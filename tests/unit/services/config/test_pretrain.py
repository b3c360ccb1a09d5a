"""`[value.pretrain]`: what a pretraining run runs with, and which files do not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.config.corpus import manifests_of, pretraining_config
from services.config.exported import tokenizer_sha256
from services.config.resolve import resolve
from services.config.schema import Config, from_toml, to_toml
from services.wire.errors import ConfigError
from tests.corpora import row, write_corpus


def config_of(file: Path | None, *, algorithm: dict[str, Any] | None = None, **value: Any) -> Config:
    pretrain = value.pop("pretrain", {}) | ({} if file is None else {"files": [str(file)]})
    sections: dict[str, Any] = {"model": {"path": "tiny:add"}, "env": [{"type": "add"}]}
    sections |= {
        "algorithm": {"type": "sao"} | (algorithm or {}),
        "value": value | ({"pretrain": pretrain} if pretrain else {}),
    }
    return Config.model_validate(sections)


def test_a_pretraining_run_updates_once_a_batch_with_its_own_learning_rate_and_frozen_parts() -> None:
    config = config_of(
        Path("rows.jsonl"),
        optim={"lr": 1e-3},
        freeze=["attention"],
        updates_per_batch=2,
        loss={"type": "mse", "clip": 0.2},
        warmup={"lr_updates": 7, "critic_only_steps": 8, "head_only_updates": 9},
        pretrain={"lr": 2e-3, "lr_updates": 5, "freeze": ["mlp"]},
    )
    changed = pretraining_config(config)
    value = changed.value
    assert value is not None
    assert (value.optim.lr, value.freeze, value.updates_per_batch, value.mini_batches) == (2e-3, ["mlp"], 1, 1)
    assert (value.warmup.lr_updates, value.warmup.critic_only_steps, value.warmup.head_only_updates) == (5, 0, 0)
    assert value.loss.loss_constants() == {}
    assert pretraining_config(changed) == changed
    assert from_toml(to_toml(changed)) == changed


def test_without_settings_of_its_own_everything_trains_at_the_critics_learning_rate() -> None:
    changed = pretraining_config(config_of(Path("rows.jsonl"), optim={"lr": 1e-3}, freeze=["attention"]))
    assert changed.value is not None
    assert (changed.value.optim.lr, changed.value.freeze) == (1e-3, [])


def test_a_run_without_the_section_cannot_pretrain() -> None:
    with pytest.raises(ConfigError, match=r"value\.pretrain: required but missing"):
        pretraining_config(config_of(None))


@pytest.mark.parametrize(
    ("facts", "settings", "reason"),
    [
        ({"gamma": 0.5}, {}, "its returns have gamma 0.5; fix: give algorithm.gamma = 0.5"),
        ({}, {"algorithm": {"truncation": "bootstrap"}}, "algorithm.truncation = 'terminal', this is 'bootstrap'"),
        (
            {"reward_range": [-1.0, 1.0]},
            {"loss": {"type": "two_hot"}},
            r"returns lie in \[-1, 1\], the head's in \[0, 1\]; fix: give value.loss.range = \[-1, 1\]",
        ),
    ],
)
def test_a_file_that_does_not_fit_the_run_is_refused(tmp_path: Path, facts, settings, reason: str) -> None:
    path = write_corpus(tmp_path, [row()], **facts)
    with pytest.raises(ConfigError, match=reason):
        manifests_of(config_of(path, **settings), None)


def test_a_file_of_another_tokenizer_is_refused_once_the_model_is_there(tmp_path: Path, tiny_model: Path) -> None:
    config = config_of(write_corpus(tmp_path, [row()]))
    assert len(manifests_of(config, None)) == 1
    with pytest.raises(ConfigError, match=r"recorded with the tokenizer 0{12}, model\.path has"):
        manifests_of(config, tiny_model)
    write_corpus(tmp_path, [row()], tokenizer_sha256=tokenizer_sha256(tiny_model))
    assert len(manifests_of(config, tiny_model)) == 1


def test_a_least_explained_variance_needs_a_critic_from_somewhere() -> None:
    demo = Path(__file__).parents[4] / "configs" / "demo" / "sao.toml"
    with pytest.raises(ConfigError, match=r"a critic that starts from nothing explains nothing"):
        resolve([demo], [("value.min_initial_explained_variance", "0.1")])


def test_every_file_that_is_missing_is_told(tmp_path: Path) -> None:
    config = config_of(None, pretrain={"files": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]})
    with pytest.raises(ConfigError) as error:
        manifests_of(config, None)
    assert len(error.value.problems) == 2
