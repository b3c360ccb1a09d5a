"""Shaped rewards and recorded traces in the resolver: what does not fit is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.orchestrator import EnvConfig
from services.config.resolve import resolve
from services.wire.errors import ConfigError

HEAD = """\
[model]
path = "tiny:guess"
[algorithm]
type = "sao"
[value]
[value.loss]
type = "hl_gauss"
range = [0.0, 1.0]
[[env]]
type = "guess"
max_turns = 4
max_turn_tokens = 8
max_trace_tokens = 64
"""
"""13 lines; at most 32 sampled tokens."""


def problems_of(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    try:
        resolve([path], overrides)
    except ConfigError as error:
        return [problem.removeprefix(f"{path}:") for problem in error.problems]
    return []


def test_most_sampled_tokens_of_a_rollout() -> None:
    """Four turns of 8, or what a trace leaves beside a prompt of one token."""
    assert EnvConfig(type="guess", max_turns=4, max_turn_tokens=8, max_trace_tokens=64).max_sampled_tokens == 32
    assert EnvConfig(type="guess", max_turns=4, max_turn_tokens=8, max_trace_tokens=20).max_sampled_tokens == 19


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("scale = 2.0", "[0, 2]"),
        ("offset = -0.5", "[-0.5, 0.5]"),
        ("overlong_limit_tokens = 32\noverlong_buffer_tokens = 16", "[-1, 1]"),
        ("overlong_limit_tokens = 32\noverlong_buffer_tokens = 16\noverlong_penalty = 0.25", "[-0.25, 1]"),
        ("length_penalty = 0.01\nlength_free_tokens = 12", "[-0.2, 1]"),
        ("scale = 4.0\nclip = [-1, 3]", "[0, 3]"),
    ],
)
def test_the_critics_range_must_hold_shaped_rewards(reward: str, shown: str, tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, f"{HEAD}[env.reward]\n{reward}\n")
    assert problem.startswith(f"8: value.loss.range: returns of env[0] (guess) lie in {shown}, not within [0, 1]; fix:")
    low, high = (float(bound) for bound in shown.strip("[]").split(","))
    fixed = HEAD.replace("[0.0, 1.0]", f"[{min(low, 0.0)}, {max(high, 1.0)}]")
    assert problems_of(tmp_path, f"{fixed}[env.reward]\n{reward}\n") == []


@pytest.mark.parametrize(
    "reward", ["scale = 0.5\noffset = 0.5", "overlong_limit_tokens = 32\noverlong_buffer_tokens = 8\nclip = [0, 1]"]
)
def test_shaped_rewards_within_the_range_pass(reward: str, tmp_path: Path) -> None:
    assert problems_of(tmp_path, f"{HEAD}[env.reward]\n{reward}\n") == []


def test_sums_of_decimal_fractions_are_not_taken_at_their_last_digit(tmp_path: Path) -> None:
    """0 - 0.1 * 3 is -0.30000000000000004."""
    head = HEAD.replace("[0.0, 1.0]", "[-0.3, 1.0]")
    assert problems_of(tmp_path, f"{head}[env.reward]\nlength_penalty = 0.1\nlength_free_tokens = 29\n") == []


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("clip = [1.0, 1.0]", "15: env[0].reward.clip: [1, 1] is no range; fix: give [low, high]"),
        ("overlong_limit_tokens = 30", "15: env[0].reward.overlong_limit_tokens: is half of the overlong punishment"),
        ("overlong_buffer_tokens = 3", "15: env[0].reward.overlong_buffer_tokens: is half of the overlong punishment"),
        (
            "overlong_limit_tokens = 8\noverlong_buffer_tokens = 9",
            "16: env[0].reward.overlong_buffer_tokens: 9 is more than overlong_limit_tokens = 8; fix: give at most 8",
        ),
        (
            "overlong_limit_tokens = 40\noverlong_buffer_tokens = 8",
            "15: env[0].reward.overlong_limit_tokens: no rollout of at most 32 sampled tokens passes 40 - 8; fix: ",
        ),
        ("scale = 0.0", "15: env[0].reward.scale: 0.0 does not fit; fix: give greater than 0"),
        ("clip = [1.0]", "15: env[0].reward.clip: "),
        ("scales = 1.0", "15: env[0].reward.scales: unknown key; fix: "),
        ("overlong_penalty = -1.0", "15: env[0].reward.overlong_penalty: -1.0 does not fit"),
    ],
)
def test_settings_that_shape_nothing_sensible_are_refused(extra: str, said: str, tmp_path: Path) -> None:
    mse = HEAD.replace('type = "hl_gauss"', 'type = "mse"').replace("range = [0.0, 1.0]\n", "\n")
    (problem,) = problems_of(tmp_path, f"{mse}[env.reward]\n{extra}\n")
    assert problem.startswith(said), problem


def test_spo_needs_shaped_rewards_between_zero_and_one(tmp_path: Path) -> None:
    spo = [("algorithm.type", "spo"), ("value", "none")]
    text = f"{HEAD}[env.reward]\noffset = -0.5\n"
    (problem,) = problems_of(tmp_path, text, *spo)
    assert problem.startswith("14: env[0].reward: spo needs rewards within [0, 1], and shaped ones lie in [-0.5, 0.5]")
    assert problems_of(tmp_path, text + "clip = [0.0, 1.0]\n", *spo) == []
    assert problems_of(tmp_path, HEAD, *spo) == []


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('prefix_cut = "index"', "14: env[0].prefix_cut: there is no recorded trace to cut; fix: give a prefix_file"),
        ('prefix_cut = "middle"', "14: env[0].prefix_cut: "),
        ('prefix_file = "nowhere.jsonl"', "14: env[0].prefix_file: there is no file nowhere.jsonl; fix: "),
        (
            '[[env]]\ntype = "add"\nprefix_file = "run.toml"',
            "16: env[1].prefix_file: add cannot be brought into the middle of an episode; fix: delete it, or choose "
            "type = guess",
        ),
    ],
)
def test_recorded_traces_that_cannot_be_continued_are_refused(
    extra: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of(tmp_path, f"{HEAD}{extra}\n")
    assert problem.startswith(said), problem


def test_a_file_that_is_there_passes_and_the_broken_type_of_an_environment_silences_what_depends_on_it(
    tmp_path: Path,
) -> None:
    there = HEAD + f'prefix_file = "{tmp_path / "run.toml"}"\n'
    assert problems_of(tmp_path, there) == []
    (problem,) = problems_of(tmp_path, there.replace("max_turns = 4", 'max_turns = "4"') + "reward.scale = 2.0\n")
    assert problem.startswith("11: env[0].max_turns: ")
