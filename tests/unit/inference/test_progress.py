"""Reading an engine's page of metrics: tokens so far and requests held, from either kind of engine."""

from __future__ import annotations

import pytest

from services.inference.progress import Progress, read_progress

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 2.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="policy"} 1.25e+02
vllm:generation_tokens_total{engine="0",model_name="policy"} 40.0
vllm:generation_tokens_total{engine="1",model_name="policy"} 2.0
vllm:generation_tokens_created{engine="0",model_name="policy"} 1.7e+09
"""
LOCAL = b"""counterpoint_inference_sampled_tokens_total 12
counterpoint_inference_prefilled_tokens_total 30
counterpoint_inference_running 2
counterpoint_inference_waiting 5
"""


@pytest.mark.parametrize(
    ("page", "tokens", "held"),
    [(VLLM, 167, 6), (LOCAL, 42, 7), (b"", 0, 0), (b"vllm:prompt_tokens_total\nvllm:num_requests_running x", 0, 0)],
)
def test_tokens_and_held_requests_are_sums_over_all_labels(page: bytes, tokens: int, held: int) -> None:
    assert read_progress(page) == Progress(tokens, held)
