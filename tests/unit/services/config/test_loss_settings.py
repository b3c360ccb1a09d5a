"""`[value.loss]` and the policy's loss settings: the tagged table, ranges against rewards, what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import Config, from_toml, to_toml
from services.config.train import HlGaussConfig, MseConfig, TwoHotConfig
from services.config.validate import VALUE_LOSSES
from services.wire.errors import ConfigError

BASE = """\
[model]
path = "tiny:add"
[algorithm]
type = "ppo"
[[env]]
type = "add"
max_trace_tokens = 32
[value.loss]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "base.toml"
    file.write_text(BASE + 'type = "hl_gauss"\n')
    return file


def resolved(path: Path, *overrides: tuple[str, str]) -> Config:
    return resolve([path], overrides).config


def only_problem(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve([path], overrides)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_each_loss_has_its_own_keys_and_defaults(path: Path) -> None:
    losses = []
    for name in VALUE_LOSSES:
        value = resolved(path, ("value.loss.type", name)).value
        assert value is not None
        losses.append(value.loss)
    mse, two_hot, hl_gauss = losses
    assert mse == MseConfig() and mse.clip is None
    assert two_hot == TwoHotConfig(type="two_hot", bins=51, range=[0.0, 1.0], pad=3)
    assert hl_gauss == HlGaussConfig(type="hl_gauss", sigma_ratio=0.75)


def test_a_loss_s_constants_travel_as_numbers(path: Path) -> None:
    value = resolved(path, ("value.loss.bins", "11"), ("value.loss.range", "[-1, 2]")).value
    assert value is not None
    expected = {"low": -1.0, "high": 2.0, "num_bins": 11.0, "pad_bins": 3.0, "sigma_ratio": 0.75}
    assert value.loss.loss_constants() == expected
    assert MseConfig().loss_constants() == {} and MseConfig(clip=0.2).loss_constants() == {"clip": 0.2}


def test_without_a_table_the_critic_regresses(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    file.write_text(BASE.replace("[value.loss]", "[value]"))
    value = resolved(file).value
    assert value is not None and value.loss == MseConfig()


def test_a_dumped_config_with_every_setting_loads_equal(path: Path) -> None:
    settings = [
        ("policy.kl.coef", "0.1"),
        ("policy.kl.type", "k2"),
        ("policy.entropy_coef", "0.01"),
        ("policy.denominator", "constant"),
        ("policy.denominator_tokens", "24"),
        ("policy.old_logprobs", "recomputed"),
        ("orchestrator.max_off_policy_steps", "0"),
    ]
    config = resolved(path, *settings)
    assert from_toml(to_toml(config)) == config


def test_a_clip_belongs_to_regression_alone(path: Path) -> None:
    assert only_problem(path, ("value.loss.clip", "0.2")) == (
        "command line: value.loss.clip: unknown key; fix: delete it: it belongs to value.loss.type = mse"
    )
    assert "belongs to value.loss.type = two_hot, hl_gauss" in only_problem_of_mse(path)


def only_problem_of_mse(path: Path) -> str:
    return only_problem(path, ("value.loss.type", "mse"), ("value.loss.bins", "51"))


def test_an_unknown_or_missing_loss_is_named_with_the_choices(path: Path, tmp_path: Path) -> None:
    choices = "fix: choose value.loss.type = mse, two_hot, hl_gauss"
    assert only_problem(path, ("value.loss.type", "huber")).endswith(f"unknown loss 'huber'; {choices}")
    bare = tmp_path / "bare.toml"
    bare.write_text(BASE + "bins = 11\n")
    assert only_problem(bare) == f"{bare}:8: value.loss.type: no loss is chosen; {choices}"


def test_a_misspelt_key_is_suggested_from_the_chosen_loss(path: Path) -> None:
    assert "did you mean value.loss.sigma_ratio?" in only_problem(path, ("value.loss.sigma", "1.0"))


@pytest.mark.parametrize(
    ("key", "text"), [("sigma_ratio", "0"), ("bins", "1"), ("pad", "-1"), ("range", "[0.0]"), ("range", "7")]
)
def test_numbers_that_make_no_support_are_refused(path: Path, key: str, text: str) -> None:
    assert f"value.loss.{key}: " in only_problem(path, (f"value.loss.{key}", text))


def test_the_range_must_hold_the_rewards_of_a_known_environment(path: Path) -> None:
    found = only_problem(path, ("value.loss.range", "[0.2, 0.9]"))
    assert "returns of env[0] (add) lie in [0, 1], not within [0.2, 0.9]; fix: give [0, 1]" in found
    assert "is no range" in only_problem(path, ("value.loss.range", "[1, 0]"))
    resolved(path, ("value.loss.range", "[-1, 1]"))


def test_a_constant_denominator_needs_its_number_and_no_other_has_a_use_for_it(path: Path) -> None:
    assert "policy.denominator_tokens: " in only_problem(path, ("policy.denominator", "constant"))
    assert "has no use for it" in only_problem(path, ("policy.denominator_tokens", "7"))


def test_a_kl_penalty_in_the_reward_is_refused_with_the_reason(path: Path) -> None:
    """B24."""
    assert "the critic trains on them before" in only_problem(path, ("policy.kl.level", "reward"))


def test_the_double_sided_mask_takes_no_recomputed_log_probabilities(path: Path) -> None:
    resolved(path, ("policy.old_logprobs", "recomputed"), ("orchestrator.max_off_policy_steps", "0"))
    found = only_problem(path, ("policy.old_logprobs", "recomputed"), ("algorithm.type", "sao"))
    assert "sao masks by the ratio to the rollout itself" in found
