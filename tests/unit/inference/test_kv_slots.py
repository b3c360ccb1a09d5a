"""Decoding from slots equals attention over the whole sequence, windows and soft caps included."""

from __future__ import annotations

import pytest
import torch

from services.inference.kv_slots import KVSlots
from services.model.attention import packed_attention
from services.model.layout import PackedLayout

HEADS, KEY_HEADS, DIM = 4, 2, 8


class Layer(torch.nn.Module):
    layer_idx = 0


def random_qkv(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, h, num_tokens, DIM, generator=g) for h in (HEADS, KEY_HEADS, KEY_HEADS))


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("slots", [[0, 1, 2], [4, 0, 2]])
def test_decoding_equals_attention_over_the_whole_sequence(
    window: int | None, softcap: float | None, slots: list[int]
) -> None:
    """Three sequences are prefilled to different lengths and decoded one token at a time, in any slots."""
    lengths, steps = [5, 1, 7], 4
    options = {"sliding_window": window, "softcap": softcap}
    whole = [random_qkv(length + steps, seed) for seed, length in enumerate(lengths)]
    expected = [packed_attention(*qkv, PackedLayout.of([qkv[0].shape[2]]), scaling=0.3, **options)[0] for qkv in whole]
    kv, layer = KVSlots(num_slots=6, max_len=16), Layer()
    layout = PackedLayout.of(lengths)
    packed = [torch.cat([qkv[i][:, :, :n] for qkv, n in zip(whole, lengths, strict=True)], dim=2) for i in range(3)]
    kv.begin_prefill(torch.tensor(slots).repeat_interleave(torch.tensor(lengths)), layout)
    out = kv.attend(layer, packed[0], packed[1], packed[2], 0.3, **options)
    for got, want, n in zip(out[0].split(lengths), expected, lengths, strict=True):
        torch.testing.assert_close(got, want[:n])
    for step in range(steps):
        positions = [n + step for n in lengths]
        kv.begin_decode(torch.tensor(slots), torch.tensor(positions), max(positions) + 1)
        q, k, v = (
            torch.cat([qkv[i][:, :, p : p + 1] for qkv, p in zip(whole, positions, strict=True)], 2) for i in range(3)
        )
        out = kv.attend(layer, q, k, v, 0.3, **options)
        torch.testing.assert_close(out[0], torch.stack([want[p] for want, p in zip(expected, positions, strict=True)]))


def test_a_slot_that_is_used_again_sees_nothing_of_the_old_sequence() -> None:
    kv, layer = KVSlots(num_slots=1, max_len=16), Layer()
    for seed, length in ((0, 12), (1, 3)):
        q, k, v = random_qkv(length + 1, seed)
        kv.begin_prefill(torch.zeros(length, dtype=torch.long), PackedLayout.of([length]))
        kv.attend(layer, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], 0.3)
        kv.begin_decode(torch.tensor([0]), torch.tensor([length]), length + 1)
        out = kv.attend(layer, q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], 0.3)
        torch.testing.assert_close(
            out[0, 0], packed_attention(q, k, v, PackedLayout.of([length + 1]), scaling=0.3)[0, -1]
        )
