"""The page for people who come from miles: every key it names is one of ours, and no flag is left without an answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.validate import ALGORITHMS, known_keys
from services.wire.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from-miles.md"
DEMO = ROOT / "configs" / "demo" / "sao.toml"

FLAGS = re.findall(
    r"--[a-z-]+",
    """
--advantage-estimator --critic-lr --lr --critic-lr-warmup-iters --num-critic-only-steps --num-critic-epochs
--critic-load --load --critic-save --save --use-kl-loss --kl-loss-coef --kl-coef --entropy-coef --value-loss-type
--value-num-bins --value-reward-range --value-target-type --hl-gauss-sigma-ratio --value-clip --lambd --gamma
--eps-clip --eps-clip-high --eps-clip-c --tis-clip-low --tis-clip --offload-train --no-offload-train
--critic-num-nodes --critic-num-gpus-per-node --actor-num-nodes --actor-num-gpus-per-node --indep-dp --model-name
--hf-checkpoint --rollout-num-gpus-per-engine --rollout-temperature --max-staleness --megatron-to-hf-mode
""",
)
"""What a critic's user of theirs has in the command line."""


def tables() -> dict[str, list[list[str]]]:
    """Rows of the table under each heading, cell by cell."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        rows = [line for line in text.splitlines() if line.startswith("|")][2:]
        found[heading] = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return found


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def keys_named(text: str) -> list[str]:
    tops = {key.partition(".")[0] for key in known_keys()}
    return [code for code in codes(text) if re.fullmatch(rf"({'|'.join(tops)})(\.[a-z_]+)+|seed", code)]


def test_every_key_on_the_page_is_one_of_the_schema() -> None:
    named = keys_named(PAGE.read_text())
    assert len({*named}) > 30
    assert {*named} <= {*known_keys()}, {*named} - {*known_keys()}


def test_every_flag_has_a_key_or_says_that_it_has_none() -> None:
    for flag, key, note in tables()["What is called otherwise"]:
        assert codes(flag), flag
        assert keys_named(key) or (key == "none" and note), flag


def test_every_refusal_has_a_reason() -> None:
    rows = [*tables()["What is refused, and why"], *tables()["What recipes leave out"]]
    assert len(rows) > 8
    assert all(len(row) == 2 and len(row[1]) > 8 for row in rows)


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_is_answered(flag: str) -> None:
    answered = {code.split()[0] for rows in tables().values() for row in rows for code in codes(row[0])}
    assert flag in answered


def test_no_flag_is_answered_twice() -> None:
    answered = [code for rows in tables().values() for row in rows for code in codes(row[0])]
    assert len(answered) == len({*answered})


def test_the_algorithms_named_exist() -> None:
    named = set()
    for flag, key, _ in tables()["What is called otherwise"]:
        if flag.startswith("`--advantage-estimator"):
            named |= {*re.findall(r'"(\w+)"', key)}
    assert named == {"ppo", "vapo", "sao", "grpo", "evpo"} and named <= {*ALGORITHMS}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.kl.type", "k1"),
        ("policy.kl.type", "k2"),
        ("policy.kl.type", "k3"),
        ("policy.old_logprobs", "rollout"),
        ("value.loss.type", "mse"),
        ("value.loss.type", "hl_gauss"),
        ("value.loss.type", "two_hot"),
        ("policy.packing.balance", "tokens"),
        ("policy.packing.balance", "flops"),
    ],
)
def test_a_value_that_the_page_speaks_of_is_accepted(key: str, value: str) -> None:
    resolve([DEMO], [(key, value)])


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("policy.kl.level", "reward", "the critic trains"),
        ("value.loss.clip", "0.2", "unknown key"),
        ("algorithm.dual_clip", "1.0", "does not fit|unknown key"),
        ("orchestrator.top_p", "0.9", "unknown key"),
        ("deployment.num_policy_gpus", "1:4", "elastic size"),
    ],
)
def test_what_the_page_calls_refused_is_refused(key: str, value: str, reason: str) -> None:
    classification = [("value.loss.type", "hl_gauss")] if key == "value.loss.clip" else []
    with pytest.raises(ConfigError, match=reason):
        resolve([DEMO], [*classification, (key, value)])


def test_the_defaults_that_the_page_states_are_those_of_the_schema() -> None:
    config = resolve([DEMO]).config
    assert config.value is not None
    assert config.policy.old_logprobs == "rollout" and config.policy.kl.coef == 0.0
    assert config.value.loss.clip is None  # type: ignore[union-attr]
    assert getattr(config.algorithm, "value_lambda", None) == 1.0
