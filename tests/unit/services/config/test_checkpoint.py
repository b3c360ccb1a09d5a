"""`[checkpoint]`: defaults, when a commit is due, and what does not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.checkpoint import CheckpointConfig
from services.config.resolve import resolve
from services.config.schema import from_toml, to_toml
from services.wire.errors import ConfigError

BASE = """\
model.path = "tiny:add"
algorithm.type = "grpo"
orchestrator.group_size = 8
[[env]]
type = "add"
max_trace_tokens = 32
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


def test_a_run_that_says_nothing_is_committed_every_twenty_steps_and_keeps_two(path: Path) -> None:
    config = resolve([path]).config
    assert config.checkpoint == CheckpointConfig(interval_steps=20, keep_last=2, keep_every_steps=0)
    assert from_toml(to_toml(config)) == config


def test_a_commit_is_due_at_multiples_of_the_interval_and_never_before_the_first_step() -> None:
    every_third = CheckpointConfig(interval_steps=3)
    assert [step for step in range(10) if every_third.is_due(step)] == [3, 6, 9]
    assert not any(CheckpointConfig(interval_steps=0).is_due(step) for step in range(100))


@pytest.mark.parametrize(("key", "value"), [("interval_steps", "-1"), ("keep_last", "0"), ("keep_every_steps", "-5")])
def test_numbers_that_mean_nothing_are_refused(path: Path, key: str, value: str) -> None:
    assert f"checkpoint.{key}: {value} does not fit" in only_problem(path, (f"checkpoint.{key}", value))


def test_what_is_kept_for_good_must_be_committed_in_the_first_place(path: Path) -> None:
    """Every 20th step is committed: of multiples of 50 only each second one would be."""
    line = only_problem(path, ("checkpoint.keep_every_steps", "50"))
    assert "50 is not a multiple of checkpoint.interval_steps = 20; fix: give 60, or another interval" in line
    none = (("checkpoint.keep_every_steps", "50"), ("checkpoint.interval_steps", "0"))
    assert "no step is committed on the way" in only_problem(path, *none)
    for interval in ("10", "25", "50"):
        resolve([path], [("checkpoint.keep_every_steps", "50"), ("checkpoint.interval_steps", interval)])


def test_an_interval_that_is_wrong_itself_is_the_only_problem(path: Path) -> None:
    line = only_problem(path, ("checkpoint.keep_every_steps", "50"), ("checkpoint.interval_steps", '"x"'))
    assert "checkpoint.interval_steps" in line


def test_a_misspelt_key_gets_a_suggestion(path: Path) -> None:
    assert "did you mean checkpoint.interval_steps?" in only_problem(path, ("checkpoint.interval", "5"))
