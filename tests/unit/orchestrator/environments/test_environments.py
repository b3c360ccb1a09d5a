"""The built-in environments: tokens in, tokens out, exact rewards, on a byte-level tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from orchestrator.environments import ENVIRONMENTS, build
from orchestrator.environments.protocol import Environment, answer_text
from orchestrator.tokenizer import Tokenizer
from services.config.tasks import TASK_ARGS, examples
from services.wire.errors import ConfigError

SPECIALS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
END, USER = 4, 2


def write_tokenizer(folder: Path, *, config: dict | None = None, truncate_to: int | None = None) -> Path:
    """A byte-level tokenizer of 261 ids, as the tiny model has it."""
    vocab = {token: i for i, token in enumerate(SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if truncate_to is not None:
        fast.enable_truncation(truncate_to, direction="left")
        fast.enable_padding(length=truncate_to)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"} if config is None else config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def answer(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


def test_the_tokenizer_is_byte_level_with_261_ids(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 261
    assert tokenizer.eos_token_id == END
    assert tokenizer.encode("<|user|>3<|end|>")[0] == USER
    assert len(tokenizer.encode("3+4=")) == 4


def test_the_greatest_id_is_not_the_number_of_ids_where_there_are_holes(tokenizer: Tokenizer, tmp_path: Path):
    assert tokenizer.max_token_id == 260
    FastTokenizer(models.WordLevel(vocab={"a": 0, "<|end|>": 7})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    sparse = Tokenizer(tmp_path)
    assert (sparse.vocab_size, sparse.max_token_id) == (2, 7)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_stay_visible_in_decoded_text(tokenizer: Tokenizer):
    assert tokenizer.decode([*tokenizer.encode("7"), 0]) == "7<|pad|>"


def test_a_truncating_tokenizer_file_neither_cuts_nor_pads_a_prompt(tmp_path: Path):
    """Scenario: tokenizer.json is set to cut on the left and to pad. Result: every token, and no other."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, truncate_to=5))
    assert tokenizer.decode(tokenizer.encode("0123456789")) == "0123456789"
    assert len(tokenizer.encode("01")) == 2


@pytest.mark.parametrize(
    ("tokenizer_config", "model_config", "expected"),
    [
        ({"eos_token": {"content": "<|end|>", "special": True}}, None, 4),
        ({}, {"eos_token_id": 3}, 3),
        ({"eos_token": "</s>"}, {"eos_token_id": [2, 3]}, 2),
        ({"eos_token": None}, {"eos_token_id": 1}, 1),
    ],
)
def test_the_end_token_is_found_where_models_keep_it(
    tmp_path: Path, tokenizer_config: dict, model_config: dict | None, expected: int
):
    write_tokenizer(tmp_path, config=tokenizer_config)
    if model_config is not None:
        (tmp_path / "config.json").write_text(json.dumps(model_config))
    assert Tokenizer(tmp_path).eos_token_id == expected


def test_a_folder_without_a_usable_tokenizer_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer(tmp_path)
    write_tokenizer(tmp_path, config={})
    with pytest.raises(ConfigError, match="end-of-sequence"):
        Tokenizer(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Building


@pytest.mark.parametrize(
    ("env_type", "args", "message"),
    [
        ("sums", {}, r"unknown environment 'sums'; choose from add, guess, reverse"),
        ("add", {"max": 3}, r"env: args.max: .*args of add: max_operand"),
        ("add", {"max_operand": -1}, r"args.max_operand"),
        ("add", {"max_operand": float("nan")}, r"args.max_operand"),
        ("reverse", {"min_letters": 9}, r"min_letters 9 is more than max_letters 5"),
        ("guess", {"num_secrets": "many"}, r"args.num_secrets"),
    ],
)
def test_a_wrong_type_or_argument_is_a_configuration_error_that_lists_the_choices(
    tokenizer: Tokenizer, env_type: str, args: dict, message: str
):
    with pytest.raises(ConfigError, match=message):
        build(env_type, args, tokenizer)


def test_every_wrong_argument_is_listed_at_once(tokenizer: Tokenizer):
    with pytest.raises(ConfigError) as caught:
        build("reverse", {"num_tasks": 0, "max_letters": 99, "words": 1}, tokenizer)
    assert len(caught.value.problems) == 3


def test_the_registry_and_the_settings_name_the_same_environments():
    assert set(ENVIRONMENTS) == set(TASK_ARGS)


def test_the_environments_never_reach_torch():
    program = (
        "import sys, orchestrator.environments, orchestrator.tokenizer, services.transport.grid_sender,"
        "services.transport.grid_receiver, services.transport.score_client;"
        "sys.exit(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)).__len__())"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------------------------------------
# Single turn


def texts(tokenizer: Tokenizer, env: Environment) -> list[str]:
    return [tokenizer.decode(env.start(i, 0).prompt_ids) for i in range(env.num_tasks)]


def test_add_asks_every_pair_of_digits_once(tokenizer: Tokenizer):
    env = build("add", {}, tokenizer)
    assert env.num_tasks == 100
    assert texts(tokenizer, env) == [f"{a}+{b}=" for a in range(10) for b in range(10)]
    assert env.task_id(34) == "add/3+4"
    assert len({env.task_id(i) for i in range(100)}) == 100


@pytest.mark.parametrize(
    ("said", "reward"),
    [("7", 1.0), ("8", 0.0), ("", 0.0), ("07", 0.0), ("7 ", 0.0), ("77", 0.0), ("7<|pad|>", 0.0), ("<|user|>7", 0.0)],
)
def test_add_rewards_exactly_the_sum(tokenizer: Tokenizer, said: str, reward: float):
    reply = build("add", {}, tokenizer).start(34, 0).step(answer(tokenizer, said))
    assert (reply.done, reply.outcome, reply.observation_ids) == (True, reward, [])


def test_an_answer_without_its_end_is_worth_nothing(tokenizer: Tokenizer):
    episode = build("add", {}, tokenizer).start(34, 0)
    assert episode.step(tokenizer.encode("7")).outcome == 0.0
    assert episode.cut() == 0.0


def test_an_answer_ends_at_its_first_end_token(tokenizer: Tokenizer):
    newline = tokenizer.encode("\n")
    assert answer_text(tokenizer, [*answer(tokenizer, "7"), *newline]) == "7"
    assert answer_text(tokenizer, [END, END]) == ""
    assert answer_text(tokenizer, []) is None


def test_reverse_asks_the_same_words_in_every_run_and_rewards_them_backwards(tokenizer: Tokenizer):
    env, again = build("reverse", {}, tokenizer), build("reverse", {}, tokenizer)
    assert env.num_tasks == 2000
    words = [text.removesuffix(">") for text in texts(tokenizer, env)]
    assert {len(word) for word in words} == {3, 4, 5}
    assert set("".join(words)) == set("abcdefghij")
    assert texts(tokenizer, again) == [word + ">" for word in words]
    assert words[:4] == ["dfc", "gdaga", "hehfc", "dihd"]
    for index in (0, 1, 2):
        assert env.start(index, 0).step(answer(tokenizer, words[index][::-1])).outcome == 1.0
        assert env.start(index, 0).step(answer(tokenizer, words[index])).outcome == 0.0
    assert len({env.task_id(i) for i in range(2000)}) == 2000


# ---------------------------------------------------------------------------------------------------------------------
# Several turns


def test_guess_answers_with_hints_until_the_secret_is_named(tokenizer: Tokenizer):
    env = build("guess", {}, tokenizer)
    episode = env.start(5, 0)
    assert env.num_tasks == 8
    assert tokenizer.decode(episode.prompt_ids) == "guess 0-7:"
    for said, hint in [("3", "higher:"), ("7", "lower:"), ("04", "higher:"), ("x", "number:"), ("99", "lower:")]:
        reply = episode.step(answer(tokenizer, said))
        assert (reply.done, reply.outcome) == (False, None)
        assert tokenizer.decode(reply.observation_ids) == hint
    reply = episode.step(answer(tokenizer, "5"))
    assert (reply.done, reply.outcome, reply.observation_ids) == (True, 1.0, [])


@pytest.mark.parametrize("said", ["", "-5", "5.0", " 5", "5 ", "\u0665", "5" * 5000, "<|user|>"])
def test_guess_takes_only_plain_digits_for_a_number(tokenizer: Tokenizer, said: str):
    reply = build("guess", {}, tokenizer).start(5, 0).step(answer(tokenizer, said))
    assert not reply.done
    assert tokenizer.decode(reply.observation_ids) == "number:"


def test_a_guess_that_was_cut_is_worth_nothing(tokenizer: Tokenizer):
    episode = build("guess", {"num_secrets": 100}, tokenizer).start(42, 0)
    assert tokenizer.decode(episode.prompt_ids) == "guess 0-99:"
    episode.step(answer(tokenizer, "3"))
    assert episode.cut() == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Supervised examples


@pytest.mark.parametrize("task", sorted(TASK_ARGS))
def test_an_example_played_into_its_environment_earns_the_reward(tokenizer: Tokenizer, task: str):
    env = build(task, {"num_tasks": 1} if task == "reverse" else {}, tokenizer)
    prompts = {text: i for i, text in enumerate(texts(tokenizer, env))} if task == "add" else {}
    for (prompt, prompt_trains), *turns in examples(task, 30, seed=1):
        assert not prompt_trains
        if task == "reverse":
            assert turns == [(prompt.removesuffix(">")[::-1], True)]
            continue
        episode = env.start(prompts[prompt] if task == "add" else int(turns[-1][0]), 0)
        assert tokenizer.decode(episode.prompt_ids) == prompt
        for said, hint in zip(turns[::2], [*turns[1::2], None], strict=True):
            reply = episode.step(answer(tokenizer, said[0]))
            assert said[1]
            assert (tokenizer.decode(reply.observation_ids), False) == (hint or ("", False))
        assert reply.outcome == 1.0


@pytest.mark.parametrize("task", sorted(TASK_ARGS))
def test_examples_are_a_function_of_their_seed_and_noise_spoils_some(task: str):
    assert list(examples(task, 20, seed=3)) == list(examples(task, 20, seed=3))
    assert list(examples(task, 20, seed=3)) != list(examples(task, 20, seed=4))
    assert list(examples(task, 20, seed=3, noise=1.0)) != list(examples(task, 20, seed=3))
    assert all(turns[-1][1] for turns in examples(task, 20, seed=3, noise=1.0))
