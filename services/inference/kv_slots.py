"""Keys and values of the sequences being decoded, one slot each, behind the packed attention function.

Legend: N tokens of the current forward, S slots, L cached positions, H query heads, K key heads, D head width.

Notable:
- No cache class of any library: a forward carries this object as `kv_slots`, and the attention function hands it every
  layer's new queries, keys and values, with each token's slot and position already known here.
- A prefill attends with the packed attention itself (fresh sequences see nothing older) and only stores; a decode has
  one token per slot and reads the slot up to that token's position.
- The query heads that share a key head are the rows of one small attention, so keys are never repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.model.attention import masked_attention, packed_attention
from services.model.layout import PackedLayout


class KVSlots:
    """Storage `[S, K, max_len, D]` per layer, allocated when a layer is first seen."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        self._keys: dict[int, torch.Tensor] = {}  # layer -> [S, K, max_len, D]
        self._values: dict[int, torch.Tensor] = {}
        self._layout: PackedLayout | None = None
        self._slots = torch.zeros(0, dtype=torch.long)  # [N]
        self._positions = torch.zeros(0, dtype=torch.long)  # [N]
        self._num_cached = 0
        self._first_slots = False
        self._visible: dict[int | None, torch.Tensor] = {}  # window -> [N, 1, 1, L]

    def begin_prefill(self, slots: torch.Tensor, layout: PackedLayout) -> None:
        """Make the next forward write whole sequences; `slots [N]` names each token's slot."""
        self._layout, self._slots, self._positions = layout, slots, layout.position_ids[0]

    def begin_decode(self, slots: torch.Tensor, positions: torch.Tensor, longest: int) -> None:
        """Make the next forward write one token per slot and read what is before it.

        Args:
            slots: [N], distinct.
            positions: [N], each token's position; everything before it is stored.
            longest: largest position plus one.
        """
        self._layout, self._slots, self._positions = None, slots, positions
        self._num_cached = longest
        self._first_slots = bool(torch.equal(slots, torch.arange(len(slots), device=slots.device)))
        self._visible = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Store this layer's keys and values and attend.

        Args:
            module: the layer's attention module; its `layer_idx` names the layer.
            query: [1, H, N, D]
            key: [1, K, N, D]
            value: [1, K, N, D]
            scaling: factor on the scores.
            sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
            softcap: scores become softcap * tanh(scores / softcap).

        Returns:
            [1, N, H, D]
        """
        layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(key), self._allocate(value)
        keys, values = self._keys[layer], self._values[layer]
        keys[self._slots, :, self._positions] = key[0].transpose(0, 1)
        values[self._slots, :, self._positions] = value[0].transpose(0, 1)
        if self._layout is not None:
            return packed_attention(
                query, key, value, self._layout, scaling=scaling, sliding_window=sliding_window, softcap=softcap
            )
        return self._decode(query, keys, values, scaling, sliding_window, softcap)

    def _decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        num_tokens, num_key_heads = query.shape[2], keys.shape[1]
        if self._first_slots:
            k, v = keys[:num_tokens, :, : self._num_cached], values[:num_tokens, :, : self._num_cached]
        else:
            k, v = (x[:, :, : self._num_cached].index_select(0, self._slots) for x in (keys, values))
        q = query[0].transpose(0, 1).reshape(num_tokens, num_key_heads, -1, query.shape[3])  # [N, K, H / K, D]
        visible = self._visible_within(sliding_window)
        if softcap is None:
            out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling)
        else:
            out = masked_attention(q, k, v, visible, scaling=scaling, softcap=softcap)
        return out.reshape(1, num_tokens, query.shape[1], values.shape[3])

    def _visible_within(self, window: int | None) -> torch.Tensor:
        if window not in self._visible:
            cached = torch.arange(self._num_cached, device=self._positions.device)
            distance = self._positions[:, None] - cached[None, :]  # [N, L]
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            self._visible[window] = visible[:, None, None, :]
        return self._visible[window]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.num_slots, like.shape[1], self.max_len, like.shape[3])
