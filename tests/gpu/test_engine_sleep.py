"""The local engine on a GPU asleep: its memory is another process's to take, and comes back bit for bit."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from services.inference.local_engine import LocalEngine
from services.inference.local_request import EngineRequest
from services.model.load import load_causal_lm
from tests.engines import PROMPT, make_snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WAIT_S = 60
CACHE_BYTES = 2**28
"""At least: what the cache of the test's engine takes, far above what torch keeps of anything else."""


def test_asleep_the_device_has_its_memory_back_and_awake_the_same_seed_draws_the_same_tokens(tmp_path: Path) -> None:
    """The cache is the large part: 128 slots of 16,384 tokens."""
    finished: queue.Queue[EngineRequest] = queue.Queue()
    engine = LocalEngine(
        load_causal_lm(make_snapshot(tmp_path / "v000000", 0), dtype="bfloat16").to("cuda").eval(),
        max_num_seqs=128,
        max_model_len=16384,
        deliver=lambda requests: [finished.put(request) for request in requests] and None,
        on_failure=lambda error: print(error),
    )
    engine.start()

    def sample() -> EngineRequest:
        engine.submit(
            EngineRequest(
                request_id="r",
                tokens=list(PROMPT),
                max_tokens=64,
                temperature=1.0,
                seed=5,
                stop_token_ids=frozenset(),
            )
        )
        return finished.get(timeout=WAIT_S)

    first, weights = sample(), engine.weights_checksum().result(WAIT_S)
    for _ in range(3):
        awake_bytes, free_bytes = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        engine.sleep().result(WAIT_S)
        assert awake_bytes - torch.cuda.memory_reserved() > CACHE_BYTES
        assert torch.cuda.mem_get_info()[0] - free_bytes > CACHE_BYTES
        assert torch.cuda.memory_allocated() < 2**27, "more than cuBLAS keeps for itself"
        engine.wake_up().result(WAIT_S)
        assert engine.weights_checksum().result(WAIT_S) == weights
        again = sample()
        assert (again.sampled, again.logprobs) == (first.sampled, first.logprobs)
    engine.stop()
