"""The tiny model: the same bytes every time, an ordinary folder, whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.config.tasks import TASK_ARGS
from services.model.load import load_causal_lm
from services.model.selftest import check_packing
from services.model.tiny import EOS_ID, WARM_STARTS, WarmStart, byte_tokenizer, make_tiny, tiny_config
from tests.trainers import hidden_of


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in place of seventy."""
    for task in WARM_STARTS:
        monkeypatch.setitem(WARM_STARTS, task, WarmStart(num_steps=3, batch_size=8))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_two_makes_give_equal_bytes_whatever_was_drawn_before(tmp_path: Path) -> None:
    one = make_tiny(tmp_path / "one", "add", 0)
    torch.rand(5)
    two = make_tiny(tmp_path / "two", "add", 0)
    assert files(one) == files(two)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_seed_and_task_make_another_model(tmp_path: Path) -> None:
    weights = [
        files(make_tiny(tmp_path / f"{task}{seed}", task, seed))["model.safetensors"]
        for task, seed in (("add", 0), ("add", 1), ("guess", 0))
    ]
    assert len(set(weights)) == 3


@pytest.mark.parametrize("task", TASK_ARGS)
def test_every_task_has_a_warm_start_that_moves_the_weights_towards_it(task: str, tmp_path: Path, capfd) -> None:
    WARM_STARTS[task] = WarmStart(num_steps=20, batch_size=8)  # undone with the fixture's own change
    make_tiny(tmp_path / "model", task, 0, progress=True)
    losses = [float(line.rsplit(" ", 1)[1]) for line in capfd.readouterr().out.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0] < 5.6, "below the logarithm of 261"


def test_a_complete_folder_is_left_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "add", 0)
    before = files(folder)
    assert make_tiny(folder, "guess", 5) == folder and files(folder) == before


def test_an_unknown_task_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        make_tiny(tmp_path / "model", "chess", 0)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_an_ordinary_one_and_its_model_can_be_packed(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "add", 0)
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 0.42e6 < sum(parameter.numel() for parameter in plain.parameters()) < 0.44e6
    assert tokenizer.eos_token_id == EOS_ID == plain.config.eos_token_id
    assert check_packing(hidden_of(load_causal_lm(folder)), plain.config.vocab_size, name="tiny") < 1e-5


@pytest.mark.parametrize("text", ["3+4=", "grüß dich 🙂", "", "a\n\tb", "<|end|>"])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer) == 261 == tiny_config().vocab_size


def test_the_chat_template_ends_only_what_the_assistant_says() -> None:
    text = byte_tokenizer().apply_chat_template(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "and"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == "<|user|>hi<|assistant|>yes<|end|><|user|>and<|assistant|>"
