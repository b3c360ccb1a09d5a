"""Attention over packed sequences, for any Hugging Face causal model, through transformers' attention interface.

Notable:
- Several sequences lie one after another in a single row; `PackedLayout` says where each begins. Each attends causally
  to itself alone, exactly: no mask of the whole row is ever built and no model code is touched.
- Sequences of similar length (same power of two) are gathered into one right-padded batch: causality hides the
  padding, so a sequence's result does not depend on its neighbours (law 2), and padding at most doubles the work.
- `sliding_window` and `softcap` arrive as keyword arguments of the interface and are honoured; attention sinks
  (`s_aux`) are refused. Layers that keep a state of another kind are found by `selftest`.
- A caller may pass `kv_slots` instead of a layout: an object whose `attend` keeps keys and values (the local engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from services.wire.errors import ConfigError

IMPLEMENTATION = "counterpoint"


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of a packed row lie.

    `buckets` holds, per group of similar lengths, `index [B, L]` into the row (padding points at the sequence's own
    first token) and `flat [n]`, the positions in `[B * L]` that are real, with `rows [n]`, their places in the row.
    """

    lengths: tuple[int, ...]
    position_ids: torch.Tensor  # [1, T], restarting at 0 for each sequence
    buckets: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    @property
    def num_tokens(self) -> int:
        """T, the row's length."""
        return self.position_ids.shape[1]

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out sequences of these lengths, each at least 1, one after another."""
        starts, total = [], 0
        for length in lengths:
            starts.append(total)
            total += length
        groups: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            groups.setdefault((length - 1).bit_length(), []).append(i)
        buckets = []
        for _, members in sorted(groups.items()):
            start_B = torch.tensor([starts[i] for i in members])
            length_B = torch.tensor([lengths[i] for i in members])
            offset_L = torch.arange(int(length_B.max()))
            real_BL = offset_L[None, :] < length_B[:, None]
            index_BL = start_B[:, None] + torch.where(real_BL, offset_L[None, :], 0)
            flat = real_BL.flatten().nonzero().flatten()
            rows = index_BL.flatten()[flat]
            buckets.append((index_BL.to(device), flat.to(device), rows.to(device)))
        positions = (
            torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.zeros(0, dtype=torch.long)
        )
        return PackedLayout(tuple(lengths), positions[None].to(device), tuple(buckets))


class KeyValueStore(Protocol):
    """What the local engine passes as `kv_slots`."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store k, v `[1, kv_heads, N, D]` and return the attention output `[1, N, heads, D]`."""
        ...


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    scaling: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Block-causal attention of a packed row.

    Args:
        query: [1, H, T, D]
        key: [1, Hkv, T, D]
        value: [1, Hkv, T, D]
        layout: the sequences of the row.
        scaling: factor on the scores; None = 1/sqrt(D).
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        [1, T, H, D]
    """
    num_tokens, num_heads = query.shape[2], query.shape[1]
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    out = query.new_zeros(num_tokens, num_heads, value.shape[3])
    for index_BL, flat, rows in layout.buckets:
        q, k, v = (x[index_BL].transpose(1, 2) for x in (q_THD, k_THD, v_THD))  # [B, H, L, D]
        attended = causal_attention(q, k, v, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        attended = attended.transpose(1, 2).reshape(-1, num_heads, value.shape[3])  # [B * L, H, D]
        out = out.index_copy(0, rows, attended[flat])
    return out[None]


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of a batch `[B, H, L, D]` that starts at position 0; grouped key heads are repeated."""
    length = q.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if window is None and softcap is None:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    offset = torch.arange(length, device=q.device)
    distance = offset[:, None] - offset[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return masked_attention(q, k, v, visible, scaling=scaling, softcap=softcap)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention where `visible` (broadcastable to `[B, H, Lq, Lk]`) is true; grouped key heads are repeated."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(2, 3)) * (scaling if scaling is not None else q.shape[3] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: PackedLayout | None = None,
    kv_slots: KeyValueStore | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention_mask: the layout says what is visible")
    if kwargs.get("s_aux") is not None:
        raise ConfigError([f"model.path: {type(module).__name__} has attention sinks, which are not supported"])
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if kv_slots is not None:
        return kv_slots.attend(module, query, key, value, scale, sliding_window=sliding_window, softcap=softcap), None
    if packed is None:
        raise ValueError("a forward with the counterpoint attention needs packed=PackedLayout or kv_slots")
    return packed_attention(
        query, key, value, packed, scaling=scale, sliding_window=sliding_window, softcap=softcap
    ), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
