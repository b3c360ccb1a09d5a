"""Attention over packed sequences, for any Hugging Face causal model, through transformers' attention interface.

Legend: T tokens of a row, C context-parallel ranks, H query heads, D head width, B x L a padded batch.

Notable:
- Several sequences lie one after another in a single row; `PackedLayout` says where each begins. Each attends causally
  to itself alone, exactly: no mask of the whole row is ever built and no model code is touched.
- On CUDA in half precision this is torch's `varlen_attn`. Elsewhere sequences of similar length (same power of two)
  are gathered into one right-padded batch: causality hides the padding, so a sequence's result does not depend on its
  neighbours (law 2), and padding at most doubles the work.
- Context parallelism (Ulysses, arXiv 2309.14509): each rank holds T/C rows of everything; around the attention, and
  only there, an all-to-all trades rows for heads. Key heads are repeated where there are fewer than ranks.
- `sliding_window` and `softcap` arrive as keyword arguments of the interface and are honoured; attention sinks
  (`s_aux`) are refused. Layers that keep a state of another kind are found by `selftest`.
- A caller may pass `kv_slots` instead of a layout: an object whose `attend` keeps keys and values (the local engine).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from services.model.context import heads_to_rows, num_repeats, rows_to_heads
from services.model.layout import PackedLayout
from services.wire.errors import ConfigError

IMPLEMENTATION = "counterpoint"


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
    """Block-causal attention of a packed row, or of this rank's stretch of it.

    Args:
        query: [1, H, T / C, D]
        key: [1, Hkv, T / C, D]
        value: [1, Hkv, T / C, Dv]
        layout: the sequences of the row.
        scaling: factor on the scores; None = 1/sqrt(D).
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        [1, T / C, H, Dv]

    Raises:
        ConfigError: when the context ranks cannot share the heads.
    """
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    mesh = layout.mesh
    if mesh.cp == 1:
        return _whole_rows(query, key, value, layout, **options)
    repeats = num_repeats(query.shape[1], key.shape[1], mesh.cp)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = rows_to_heads(query, mesh), rows_to_heads(key, mesh), rows_to_heads(value, mesh)
    return heads_to_rows(_whole_rows(query, key, value, layout, **options), mesh)


def _whole_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of all rows of some heads, `[1, T, H, Dv]`."""
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and softcap is None:
        return _varlen(q_THD, k_THD, v_THD, layout, scaling=scaling, sliding_window=sliding_window)[None]
    num_tokens, num_heads = query.shape[2], query.shape[1]
    out = query.new_zeros(num_tokens, num_heads, value.shape[3])
    for index_BL, flat, rows in layout.buckets:
        q, k, v = (x[index_BL].transpose(1, 2) for x in (q_THD, k_THD, v_THD))  # [B, H, L, D]
        attended = causal_attention(q, k, v, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        attended = attended.transpose(1, 2).reshape(-1, num_heads, value.shape[3])  # [B * L, H, D]
        out = out.index_copy(0, rows, attended[flat])
    return out[None]


def _varlen(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    layout: PackedLayout,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Torch's fused kernel for packed sequences (CUDA, half precision), `[T, H, Dv]`."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(*layout.lengths, layout.num_padding)
    attended = varlen_attn(
        q_THD.contiguous(),
        k_THD.contiguous(),
        v_THD.contiguous(),
        layout.offsets,
        layout.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_grouped(varlen_attn),
    )
    assert isinstance(attended, torch.Tensor)
    return attended


def _grouped(varlen_attn: Callable[..., Any]) -> dict[str, Any]:
    """Torch 2.11 takes fewer key heads as they come, later versions want to be told."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


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
        if q.is_cuda and q.dtype == torch.float32:  # grouped heads would keep every score for the backward pass
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
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
