"""FLOPs of a sequence, from the sizes in a model's configuration."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.config.model_path import model_sizes
from services.config.train import PackingConfig
from services.packing.cost import cost_of_role, flop_cost
from services.wire.errors import ConfigError

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 64}


def folder_with(tmp_path, **config):
    base = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(base | {"intermediate_size": 64} | config))
    return tmp_path


def by_hand(length, *, vocab_size):
    """Every matrix of a 3-layer model, 2 FLOPs an entry and token; two causal products of heads x head size."""
    query = output = 32 * 4 * 8
    key = value = 32 * 2 * 8
    matrices = 3 * (query + key + value + output + 3 * 32 * 64) + 32 * vocab_size
    return 2 * matrices * length + 3 * 2 * (2 * length**2 * 4 * 8) / 2


@pytest.mark.parametrize("vocab_size", [0, 100])
@pytest.mark.parametrize("length", [1, 7, 4096])
def test_the_cost_is_what_a_count_of_all_matrices_gives(length, vocab_size):
    assert flop_cost(32, 3, **SIZES, vocab_size=vocab_size)(length) == by_hand(length, vocab_size=vocab_size)


def test_the_cost_of_an_array_is_that_of_its_entries():
    cost, lengths = flop_cost(32, 3, **SIZES), np.array([1, 10, 131_072])
    np.testing.assert_array_equal(cost(lengths), [cost(int(length)) for length in lengths])


def test_attention_outgrows_the_matrices_on_long_sequences():
    cost = flop_cost(32, 3, **SIZES)
    assert cost(2) / cost(1) == pytest.approx(2, rel=0.01)
    assert cost(2_000_000) / cost(1_000_000) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("name", ["hidden_size", "num_layers", *SIZES, "vocab_size"])
def test_a_size_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=name):
        flop_cost(**({"hidden_size": 32, "num_layers": 3, **SIZES, "vocab_size": 1} | {name: -1}))


def test_sizes_are_read_from_the_model_with_their_usual_defaults(tmp_path):
    expected = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    expected |= {"intermediate_size": 64, "vocab_size": 100}
    assert model_sizes(folder_with(tmp_path)) == expected
    given = model_sizes(folder_with(tmp_path, num_key_value_heads=2, head_dim=16))
    assert (given["num_kv_heads"], given["head_dim"]) == (2, 16)


def test_of_experts_those_count_that_a_token_visits(tmp_path):
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 24}
    assert model_sizes(folder_with(tmp_path, **experts))["intermediate_size"] == 8 * 24
    shared = experts | {"shared_expert_intermediate_size": 5}
    assert model_sizes(folder_with(tmp_path, **shared))["intermediate_size"] == 8 * 24 + 5


def test_sizes_of_a_text_part_are_read_from_it(tmp_path):
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "intermediate_size": 4}
    assert model_sizes(folder_with(tmp_path, text_config=text))["hidden_size"] == 8


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_size_that_is_not_written_down_is_named(tmp_path, missing):
    with pytest.raises(ConfigError, match=missing):
        model_sizes(folder_with(tmp_path, **{missing: None}))


def test_a_role_is_balanced_by_tokens_unless_it_says_flops(tmp_path):
    """A critic has no head over the vocabulary, so each of its tokens costs less."""
    assert cost_of_role(PackingConfig(), tmp_path, has_vocabulary=True) is None
    flops, folder = PackingConfig(balance="flops"), folder_with(tmp_path, num_key_value_heads=2)
    policy = cost_of_role(flops, folder, has_vocabulary=True)
    critic = cost_of_role(flops, folder, has_vocabulary=False)
    assert policy is not None and critic is not None
    assert policy(10) == by_hand(10, vocab_size=100) and critic(10) == by_hand(10, vocab_size=0)
