"""What cannot be trained, or not so, is refused before anything starts: each with its key, its line and a fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import Config
from services.wire.errors import ConfigError

BASE = """\
[model]
path = "tiny:add"
[algorithm]
type = "ppo"
[orchestrator]
group_size = 4
[[env]]
type = "add"
max_trace_tokens = 32
[value]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "run.toml"
    written.write_text(BASE)
    return written


def config_of(path: Path, *settings: tuple[str, str]) -> Config:
    return resolve([path], settings).config


def only(path: Path, *settings: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve([path], settings)
    (problem,) = caught.value.problems
    assert "; fix: " in problem
    return problem


# ---------------------------------------------------------------- behind the policy without a correction


@pytest.mark.parametrize("algorithm", ["ppo", "vapo"])
def test_ppo_behind_the_policy_needs_the_ratio_to_the_rollout(path: Path, algorithm: str) -> None:
    """Recomputed log-probabilities are the trainer's own: the ratio begins at 1 however old the rollout is."""
    recomputed = (("algorithm.type", algorithm), ("policy.old_logprobs", "recomputed"))
    said = only(path, *recomputed)
    assert "policy.old_logprobs: with orchestrator.max_off_policy_steps = 1 the sampler is behind" in said
    assert said.endswith('fix: give "rollout", or max_off_policy_steps = 0')
    config_of(path, *recomputed, ("orchestrator.max_off_policy_steps", "0"))
    config_of(path, ("algorithm.type", algorithm), ("orchestrator.max_off_policy_steps", "4"))


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    written = tmp_path / "late.toml"
    written.write_text(BASE + '[policy]\nold_logprobs = "recomputed"\n')
    assert only(written).startswith(f"{written}:12: policy.old_logprobs: ")


# ---------------------------------------------------------------- a penalty in the reward


@pytest.mark.parametrize(
    "key", ["algorithm.kl_coef", "env.0.reward.kl", "policy.kl_coef", "algorithm.use_kl_in_reward"]
)
def test_a_kl_penalty_in_the_reward_has_no_key_and_the_reason_is_said(path: Path, key: str) -> None:
    said = only(path, (key, "0.1"))
    assert (
        ": unknown key; fix: use policy.kl.coef, a penalty in the loss: rewards hold no KL penalty, for the critic"
        in said
    )


def test_a_misspelt_key_of_the_penalty_in_the_loss_is_suggested_as_ever(path: Path) -> None:
    assert "did you mean policy.kl.coef" in only(path, ("policy.kl.coeff", "0.1"))


# ---------------------------------------------------------------- more than text


@pytest.mark.parametrize("part", ["vision_config", "audio_config"])
def test_a_model_of_more_than_text_is_refused(path: Path, tmp_path: Path, part: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    text = {"text_config": {"num_attention_heads": 4}}
    (folder / "config.json").write_text(json.dumps(text | {part: {"hidden_size": 8}}))
    said = only(path, ("model.path", f"dummy:{folder}"))
    assert f"model.path: the model reads more than text ({part}), and traces hold token ids alone; fix: name" in said
    (folder / "config.json").write_text(json.dumps(text))
    config_of(path, ("model.path", f"dummy:{folder}"))


# ---------------------------------------------------------------- a group's one request


@pytest.mark.parametrize(
    ("key", "limit", "least"),
    [
        ("max_request_branches", 3, 4),
        ("max_request_tokens", 127, 4 * 32),
    ],
)
def test_the_value_service_takes_a_whole_group_at_once(path: Path, key: str, limit: int, least: int) -> None:
    said = only(path, (f"value.{key}", str(limit)))
    assert f"value.{key}: {limit} is less than a group's one request may hold: 4 traces, {least} " in said
    assert said.endswith(f"fix: give at least {least}")
    config_of(path, (f"value.{key}", str(least)))


def test_its_bytes_are_four_a_token_and_a_length(path: Path) -> None:
    """4 traces of 256 tokens: 4 * 4 * 257."""
    long = (("env.0.max_trace_tokens", "256"), ("value.max_request_bytes", "4111"))
    assert "4 traces, 4112 bytes; fix: give at least 4112" in only(path, *long)
    config_of(path, long[0], ("value.max_request_bytes", "4112"))


# ---------------------------------------------------------------- a service that is alone


def test_a_service_that_is_alone_is_checked_on_this_machine_whatever_the_run_s_kind(tmp_path: Path) -> None:
    """A job's own addresses are no excuse to listen on all interfaces here."""
    written = tmp_path / "critic.toml"
    written.write_text('[model]\npath = "tiny:add"\n[value]\nhost = "0.0.0.0"\n[deployment]\nkind = "slurm"\n')
    with pytest.raises(ConfigError, match=r"critic.toml:4: value.host: 0.0.0.0 is every interface"):
        resolve([written], only_critic=True)
    config = resolve([written], [("value.host", "127.0.0.1")], only_critic=True).config
    assert config.deployment.kind == "local"
