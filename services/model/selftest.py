"""Start-up check on the real model in its layout: packed equals alone (law 2), judged by results and not by names.

Notable:
- Three sequences are run packed in two orders, alone, with the neighbours replaced by noise, divided over the context
  ranks, and once through the architecture's own attention; whatever leaks state across a boundary or ignores our
  attention shows up here.
- Every rank runs the same, so the ranks must agree; and run twice, it must repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.model.layout import PackedLayout
from services.model.mesh import Mesh
from services.wire.errors import ConfigError

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative to the largest hidden state."""

Hidden = Callable[[torch.Tensor, PackedLayout | None], torch.Tensor]
"""(token ids [T], layout) to hidden states [T / C, D]; without a layout by the architecture's own attention."""


@torch.no_grad()
def check_packing(
    hidden: Hidden, vocab_size: int, *, name: str, mesh: Mesh | None = None, dtype: str = "float32"
) -> float:
    """Compare packed with alone on short random sequences; every rank of `mesh` calls it.

    Args:
        hidden: The model in its layout.
        vocab_size: Token ids are drawn below this.
        name: Of the architecture, for the error.
        mesh: The layout; None = a single process.
        dtype: What the model computes in.

    Returns:
        The largest difference found, relative to the largest hidden state.

    Raises:
        ConfigError: when it is too large, or the same row does not give the same numbers twice.
    """
    mesh = mesh or Mesh()
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(vocab_size, (n,), generator=generator).to(mesh.device) for n in (5, 1, 7))
    noise = torch.randint(vocab_size, (5,), generator=generator).to(mesh.device)

    def run(*sequences: torch.Tensor, over: Mesh | None = None) -> list[torch.Tensor]:
        lengths = [len(s) for s in sequences]
        layout = PackedLayout.of(lengths, mesh.device, over)
        return list(layout.gather(hidden(torch.cat(sequences), layout)).split(lengths))

    alone = [run(s)[0] for s in (a, b, c)]
    forward, backward, noisy, divided = run(a, b, c), run(c, b, a), run(noise, b, c), run(a, b, c, over=mesh)
    pairs = [
        *zip(forward, alone, strict=True),
        *zip(backward, alone[::-1], strict=True),
        *zip(noisy[1:], alone[1:], strict=True),
        *zip(divided, alone, strict=True),
    ]
    pairs += [(hidden(s, None), h) for s, h in zip((a, c), (alone[0], alone[2]), strict=True)]
    scale = max(float(h.abs().max()) for h in alone)
    worst = max(float((x.float() - y.float()).abs().max()) for x, y in pairs) / max(scale, 1e-30)
    if not worst <= TOLERANCES[dtype]:
        raise ConfigError(
            [
                f"model.path: {name} does not give the same hidden states packed and alone "
                f"(relative difference {worst:.2e}, limit {TOLERANCES[dtype]:.0e}); its layers cannot be packed"
            ]
        )
    if not all(torch.equal(x, y) for x, y in zip(forward, run(a, b, c), strict=True)):
        raise ConfigError([f"model.path: {name} gives other hidden states for the same row the second time"])
    return worst
