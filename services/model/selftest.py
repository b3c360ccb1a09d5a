"""Start-up check on the real model: packed equals alone (law 2), judged by hidden states and not by names.

Notable:
- Three sequences are run packed in two orders, alone, with the neighbours replaced by noise, and once through the
  architecture's own attention; whatever leaks state across a boundary or ignores our attention shows up here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from services.model.attention import IMPLEMENTATION, PackedLayout
from services.model.load import packed_hidden
from services.wire.errors import ConfigError


@torch.no_grad()
def check_packing(backbone: nn.Module, vocab_size: int, *, tolerance: float = 1e-4, max_len: int = 64) -> float:
    """Compare packed with alone on short random sequences.

    Returns:
        The largest difference found, relative to the largest hidden state.

    Raises:
        ConfigError: when it exceeds `tolerance` (1e-4 suits f32; pass more for bf16).
    """
    generator = torch.Generator().manual_seed(0)
    device = next(backbone.parameters()).device
    lengths = [min(length, max_len) for length in (5, 1, 7)]
    a, b, c = (torch.randint(vocab_size, (n,), generator=generator).to(device) for n in lengths)
    noise = torch.randint(vocab_size, (lengths[0],), generator=generator).to(device)

    def run(*sequences: torch.Tensor) -> list[torch.Tensor]:
        layout = PackedLayout.of([len(s) for s in sequences], device)
        hidden = packed_hidden(backbone, torch.cat(sequences), layout)
        return list(hidden.split([len(s) for s in sequences]))

    alone = [run(s)[0] for s in (a, b, c)]
    forward, backward, noisy = run(a, b, c), run(c, b, a), run(noise, b, c)
    pairs = [
        *zip(forward, alone, strict=True),
        *zip(backward, alone[::-1], strict=True),
        *zip(noisy[1:], alone[1:], strict=True),
    ]
    pairs += [(_own_attention(backbone, s), h) for s, h in zip((a, c), (alone[0], alone[2]), strict=True)]
    scale = max(float(h.abs().max()) for h in alone)
    worst = max(float((x.float() - y.float()).abs().max()) for x, y in pairs) / max(scale, 1e-30)
    if not worst <= tolerance:
        raise ConfigError(
            [
                f"model.path: {type(backbone).__name__} does not give the same hidden states packed and alone "
                f"(relative difference {worst:.2e}, limit {tolerance:.0e}); its layers cannot be packed"
            ]
        )
    return worst


def _own_attention(backbone: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    config: Any = backbone.config
    try:
        config._attn_implementation = "eager"
        return backbone(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
    finally:
        config._attn_implementation = IMPLEMENTATION
