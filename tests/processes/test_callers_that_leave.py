"""Callers of the local engine that go away while it still works for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.engines import MAX_MODEL_LEN, PROMPT, client_of, local_engine, make_snapshot


async def test_a_caller_that_goes_away_in_the_middle_of_a_pause_does_not_end_the_engine(tmp_path: Path) -> None:
    """Scenario: a pause waits for what is running, and whoever asked for it hangs up. Result: what was running ends,
    and the engine goes on when told to."""
    snapshot = make_snapshot(tmp_path / "v000000", 0)
    with local_engine(snapshot, "--max-model-len", str(MAX_MODEL_LEN)) as url:
        client = client_of(url)
        await client.wait_ready(30)

        def generation(max_tokens: int):
            return client.generate(
                PROMPT, max_tokens=max_tokens, temperature=1.0, seed=0, deadline_s=60, ignore_eos=True
            )

        running = asyncio.create_task(generation(300))
        await asyncio.sleep(0.1)
        limit = aiohttp.ClientTimeout(total=0.05)
        async with aiohttp.ClientSession(timeout=limit) as session:
            with pytest.raises(TimeoutError):
                await session.post(f"{url}/pause?mode=wait")
        assert not running.done(), "the caller was gone before the pause was complete"
        assert len((await running).token_ids) == 300
        await client.retried("POST", "/resume")
        assert len((await generation(8)).token_ids) == 8
        await client.close()
