"""Packed attention by torch's fused kernel is the exact form, forwards and backwards, as far as bf16 can tell."""

from __future__ import annotations

import pytest
import torch

from services.model.attention import packed_attention
from services.model.layout import PackedLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTHS = [5, 300, 1, 77, 129]
TOLERANCE = 2e-2
"""Of the largest entry: bf16 keeps three digits."""


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_the_fused_kernel_agrees_with_the_exact_form(window: int | None, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    query, key, value, weights = (
        torch.randn(1, heads, num_tokens, 64, generator=generator) for heads in (8, key_heads, key_heads, 8)
    )
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        tensors = [x.to(device, dtype).detach().requires_grad_() for x in (query, key, value)]
        out = packed_attention(*tensors, PackedLayout.of(LENGTHS, device), scaling=None, sliding_window=window)
        (out.float() * weights.transpose(1, 2).to(device)).sum().backward()
        results.append([out.detach(), *(x.grad for x in tensors if x.grad is not None)])
    for exact, fused in zip(*results, strict=True):
        difference = (exact - fused.float().cpu()).abs().max() / exact.abs().max()
        assert difference < TOLERANCE


def test_full_precision_on_a_gpu_is_the_exact_form() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, sum(LENGTHS), 64, generator=generator) for heads in (8, 2, 2)]
    cpu = packed_attention(*tensors, PackedLayout.of(LENGTHS), scaling=None)
    cuda = packed_attention(*(x.cuda() for x in tensors), PackedLayout.of(LENGTHS, "cuda"), scaling=None)
    torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-4, rtol=1e-4)
