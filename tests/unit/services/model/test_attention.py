"""Packed equals alone, for many architectures, judged by transformers' own attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from services.model.attention import IMPLEMENTATION
from services.model.layout import PackedLayout
from services.model.load import packed_hidden, packed_logits
from tests.architectures import PACKABLE, WINDOW, build, own_attention, sequences


@pytest.fixture(scope="module", params=PACKABLE)
def models(request, tmp_path_factory) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with packed attention and its twin with its own."""
    folder = tmp_path_factory.mktemp("model")
    model = build(folder, request.param)
    return model, own_attention(model, folder)


def hidden(model: PreTrainedModel, *row: torch.Tensor) -> list[torch.Tensor]:
    lengths = [len(ids) for ids in row]
    with torch.no_grad():
        out = packed_hidden(model.base_model, torch.cat(row), PackedLayout.of(lengths))
    return list(out.split(lengths))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-5, rtol=1e-4)


def test_each_sequence_of_a_packed_row_is_what_it_is_alone_under_the_models_own_attention(models) -> None:
    """Several sequences, some longer than a window of attention, in several length buckets."""
    model, twin = models
    row = sequences(11, 1, 3 * WINDOW, 2, 5, 16, 17)
    with torch.no_grad():
        for ids, packed in zip(row, hidden(model, *row), strict=True):
            assert close(packed, twin.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0])


def test_logits_are_those_of_the_models_own_attention_whatever_the_architecture_does_to_them(models) -> None:
    model, twin = models
    a, b = sequences(9, 13)
    positions = torch.tensor([0, 7, 8, 9, 15, 21])
    with torch.no_grad():
        packed = packed_logits(model, torch.cat([a, b]), PackedLayout.of([9, 13]), positions)
        alone = torch.cat([twin(input_ids=ids[None], use_cache=False).logits[0] for ids in (a, b)])
    assert close(packed, alone[positions])


def test_order_does_not_matter(models) -> None:
    """P1: both orders of three sequences."""
    model, _ = models
    a, b, c = sequences(5, 7, 6)
    forward, backward = hidden(model, a, b, c), hidden(model, c, b, a)[::-1]
    assert all(close(x, y) for x, y in zip(forward, backward, strict=True))


def test_a_sequence_does_not_move_when_its_neighbours_become_noise(models) -> None:
    model, _ = models
    a, b, c = sequences(5, 7, 6)
    noise_a, noise_c = sequences(5, 6, seed=9)
    before, after = hidden(model, a, b, c), hidden(model, noise_a, b, noise_c)
    assert torch.allclose(before[1], after[1], atol=1e-6)
    assert not torch.allclose(before[0], after[0], atol=1e-2)


def test_a_token_does_not_see_what_comes_after_it(models) -> None:
    model, _ = models
    (a,) = sequences(12)
    changed = a.clone()
    changed[8:] = sequences(4, seed=5)[0]
    before, after = hidden(model, a)[0], hidden(model, changed)[0]
    assert torch.allclose(before[:8], after[:8], atol=1e-6)
    assert not torch.allclose(before[8:], after[8:], atol=1e-3)


def test_the_gradient_of_a_packed_row_is_the_sum_of_the_gradients_alone(models) -> None:
    model, _ = models
    row = sequences(6, 9)

    def gradient(*chosen: torch.Tensor) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        out = packed_hidden(model.base_model, torch.cat(chosen), PackedLayout.of([len(ids) for ids in chosen]))
        out.square().sum().backward()
        own = [p.grad.flatten() for p in model.base_model.parameters() if p.grad is not None]
        return torch.cat(own)

    together, apart = gradient(*row), gradient(row[0]) + gradient(row[1])
    assert torch.linalg.norm(together - apart) <= 1e-5 * torch.linalg.norm(apart)


# ---- the layout


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_layout_covers_every_token_once_and_pads_only_within_a_sequence(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths)
    assert layout.num_tokens == sum(lengths)
    assert layout.position_ids[0].tolist() == [i for length in lengths for i in range(length)]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows = torch.cat([rows for _, _, rows in layout.buckets])
    assert sorted(rows.tolist()) == list(range(sum(lengths)))
    for index, flat, own_rows in layout.buckets:
        assert (owner[index] == owner[index[:, :1]]).all()
        assert torch.equal(index.flatten()[flat], own_rows)
        assert index.numel() < 2 * len(own_rows) + 1, "padding at most doubles the work"


def test_a_layout_of_nothing_is_empty() -> None:
    layout = PackedLayout.of([])
    assert layout.num_tokens == 0 and layout.buckets == ()


def test_a_forward_without_a_layout_or_with_a_mask_is_refused(tmp_path: Path) -> None:
    """A plain call of the model would let sequences see each other without a word."""
    model = build(tmp_path, "llama")
    assert model.config._attn_implementation == IMPLEMENTATION
    (ids,) = sequences(4)
    with pytest.raises(ValueError, match="needs packed=PackedLayout"):
        model(input_ids=ids[None], use_cache=False)
    attention = model.base_model.layers[0].self_attn
    mask, layout = torch.zeros(1, 1, 4, 4), PackedLayout.of([4])
    with pytest.raises(ValueError, match="takes no attention_mask"):
        attention(
            hidden_states=torch.zeros(1, 4, 32),
            position_embeddings=(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)),
            attention_mask=mask,
            packed=layout,
        )
