"""Is an engine getting on: what its Prometheus page says of tokens and of requests, for both kinds of engine.

Notable:
- Prompt tokens count too: an engine that reads a long prompt samples nothing meanwhile.
- Sums over all labels: an engine with several workers has several counters of one name.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = (
    "counterpoint_inference_sampled_tokens_total",
    "counterpoint_inference_prefilled_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)
HELD = (
    "counterpoint_inference_running",
    "counterpoint_inference_waiting",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


@dataclass(frozen=True)
class Progress:
    """One look."""

    num_tokens: int
    """Sampled and read so far, over the engine's life."""
    num_held: int
    """Requests being sampled, or waiting for that."""


def read_progress(page: bytes) -> Progress:
    """Read a page of metrics; what it does not hold counts as 0."""
    num_tokens = num_held = 0.0
    for line in page.decode(errors="replace").splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in TOKENS:
            num_tokens += _value(line)
        elif name in HELD:
            num_held += _value(line)
    return Progress(int(num_tokens), int(num_held))


def _value(line: str) -> float:
    try:
        return float(line.rsplit(" ", 1)[1])
    except (IndexError, ValueError):
        return 0.0
