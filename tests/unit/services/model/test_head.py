"""The value head: f32, zero at first, and values of the state before each token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.model.head import Critic, ValueHead, values_before_tokens
from services.model.layout import PackedLayout
from services.model.load import head_features
from tests.architectures import build, sequences


def test_values_are_outputs_one_position_earlier() -> None:
    """Prompt of 2, answer [a, b, EOS]: their values are outputs 1, 2, 3 (B03); output 4 is the bootstrap value."""
    output = torch.tensor([10.0, 11, 12, 13, 14])
    values, bootstraps = values_before_tokens(output, torch.tensor([5]))
    assert values.tolist() == [0, 10, 11, 12, 13]
    assert values[2:5].tolist() == [11, 12, 13] and bootstraps.tolist() == [14]


def test_values_are_not_divided_by_the_sampling_temperature() -> None:
    """B05: head output [1, 2, 3, 4], two answer tokens: [2, 3] at any temperature, which has no way in here."""
    values, _ = values_before_tokens(torch.tensor([1.0, 2, 3, 4]), torch.tensor([4]))
    assert values[2:].tolist() == [2, 3]


def test_each_sequence_of_a_row_begins_at_zero_and_keeps_its_own_end() -> None:
    values, bootstraps = values_before_tokens(torch.arange(1.0, 7), torch.tensor([3, 1, 2]))
    assert values.tolist() == [0, 1, 2, 0, 0, 5]
    assert bootstraps.tolist() == [3, 4, 6]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_there_are_as_many_values_as_tokens_and_one_bootstrap_value_a_sequence(lengths: list[int]) -> None:
    """C14."""
    output = torch.arange(1.0, 1 + sum(lengths))
    values, bootstraps = values_before_tokens(output, torch.tensor(lengths))
    assert len(values) == sum(lengths) and len(bootstraps) == len(lengths)
    for own, out, last in zip(values.split(lengths), output.split(lengths), bootstraps, strict=True):
        assert own.tolist() == [0, *out[:-1].tolist()] and last == out[-1]


def test_a_fresh_critic_says_zero_everywhere(tmp_path: Path) -> None:
    critic = Critic(build(tmp_path, "llama"), head_init_std=0.0, seed=1)
    with torch.no_grad():
        assert not critic(sequences(6)[0], PackedLayout.of([6])).any()


def test_a_seeded_head_is_the_same_in_every_process_and_leaves_the_global_generator_alone() -> None:
    """C01."""
    state = torch.get_rng_state()
    one, same, other = (ValueHead(32, init_std=0.1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)
    assert not one.bias.any() and 0.05 < float(one.weight.detach().std()) < 0.2


def test_the_head_is_f32_on_a_bf16_backbone_and_stays_finite_on_large_hidden_states() -> None:
    """B11."""
    head = ValueHead(16, init_std=0.1, seed=0)
    hidden = torch.randn(4, 16).bfloat16()
    hidden[2] = 1e4
    hidden.requires_grad_()
    out = head(hidden)
    out.square().sum().backward()
    assert out.dtype == torch.float32 and torch.isfinite(out).all()
    assert head.weight.grad is not None and torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_head_is_as_wide_as_the_output_embedding_reads(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, name)
    assert head_features(model) == model.get_output_embeddings().in_features == 32
    assert Critic(model, head_init_std=0.1, seed=0).head.weight.shape == (1, 32)


def test_the_value_of_a_state_does_not_depend_on_the_token_that_follows(tmp_path: Path) -> None:
    critic = Critic(build(tmp_path, "mistral"), head_init_std=0.5, seed=0)
    (a,) = sequences(10)
    b = a.clone()
    b[6:] = sequences(4, seed=3)[0]
    with torch.no_grad():
        values = [values_before_tokens(critic(ids, PackedLayout.of([10])), torch.tensor([10]))[0] for ids in (a, b)]
    assert torch.allclose(values[0][:7], values[1][:7], atol=1e-6)
    assert not torch.allclose(values[0][7:], values[1][7:], atol=1e-3)


# ---------------------------------------------------------------- a head of K outputs

POINTS = [-0.5, 0.0, 0.5, 1.0, 1.5]


def test_a_fresh_classification_critic_says_the_middle_of_its_points_everywhere(tmp_path: Path) -> None:
    critic = Critic(build(tmp_path, "llama"), head_init_std=0.0, seed=1, points=POINTS)
    assert critic.head.weight.shape == (5, 32)
    with torch.no_grad():
        values = critic(sequences(6)[0], PackedLayout.of([6]))
    assert values.dtype == torch.float32 and values.tolist() == pytest.approx([0.5] * 6)


def test_a_value_is_the_mean_of_the_points_under_the_head_s_distribution() -> None:
    head = ValueHead(8, init_std=1.0, seed=0, points=POINTS)
    hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        logits, values = head.outputs(hidden), head(hidden)
    probs = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    expected = (probs * torch.tensor(POINTS, dtype=torch.float64)).sum(-1)
    assert logits.shape == (7, 5) and logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=0)


def test_values_of_a_classification_head_lie_within_its_points_on_any_hidden_state() -> None:
    """B11."""
    head = ValueHead(4, init_std=1.0, seed=0, points=POINTS)
    hidden = torch.tensor([[1e4, -1e4, 1e4, 1e4], [-1e4, 1e4, -1e4, -1e4], [0.0, 0, 0, 0]]).bfloat16()
    with torch.no_grad():
        values = head(hidden)
    assert torch.isfinite(values).all() and float(values.min()) >= POINTS[0] and float(values.max()) <= POINTS[-1]


def test_the_points_are_saved_with_the_head_and_are_no_parameter() -> None:
    head = ValueHead(4, init_std=0.0, seed=0, points=POINTS)
    assert head.state_dict()["points"].tolist() == POINTS
    assert {name for name, _ in head.named_parameters()} == {"weight", "bias"}
    assert "points" not in ValueHead(4, init_std=0.0, seed=0).state_dict()


def test_outputs_of_k_columns_are_shifted_like_values_and_junk_before_a_sequence_stays_out() -> None:
    output = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan")] * 2, [5.0, 6.0]])
    before, last = values_before_tokens(output, torch.tensor([3, 1]))
    assert before.tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]] and last[1].tolist() == [5, 6]


def test_scoring_and_the_trainer_read_the_same_values(tmp_path: Path) -> None:
    """One shifts values, the other outputs; both must say the same of every state before a token."""
    critic = Critic(build(tmp_path, "qwen3"), head_init_std=0.5, seed=0, points=POINTS)
    ids, layout, lengths = torch.cat(sequences(4, 5)), PackedLayout.of([4, 5]), torch.tensor([4, 5])
    with torch.no_grad():
        scored, _ = values_before_tokens(critic(ids, layout), lengths)
        trained = critic.head.values_of(values_before_tokens(critic.outputs(ids, layout), lengths)[0])
    inner = torch.tensor([1, 2, 3, 5, 6, 7, 8])
    assert torch.equal(scored[inner], trained[inner]) and scored[[0, 4]].tolist() == [0, 0]
    assert float(scored[inner].std()) > 0
