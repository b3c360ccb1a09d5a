"""The scorer's queue: first come, first scored, together where they fit, each by one state of the critic."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from services.config.train import OptimConfig, TrainModelConfig, ValueConfig
from services.wire.scoring import TokenBatch
from tests.scoring import SEQ_LEN, call, serving
from value_service.scorer import FORWARDS_PER_COMMAND, ScoreJob

CONFIG = ValueConfig(model=TrainModelConfig(seq_len=SEQ_LEN), optim=OptimConfig(lr=0.1))


async def test_requests_are_answered_in_the_order_they_came_and_by_one_step_each(tiny_model: Path) -> None:
    """Scenario: 200 requests wait; the critic's step changes while they are scored."""
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, 261, n).tolist() for n in (1 + i % 30, 5)] for i in range(200)]
    with serving(tiny_model, CONFIG) as service:
        ended: list[int] = []
        service.held.clear()
        await asyncio.sleep(0.01)

        async def ask(number: int) -> dict:
            body = json.dumps({"batched_token_ids": batches[number]}).encode()
            answer = await call(service.app, "POST", "/v1/score", body, {"Content-Type": "application/json"})
            ended.append(number)
            if number == 100:
                service.board.progress(steps_done=1)
            return json.loads(answer.body)

        asking = [asyncio.create_task(ask(number)) for number in range(200)]
        await asyncio.sleep(0.2)
        before = service.board.snapshot().num_forwards
        service.held.set()
        replies = await asyncio.gather(*asking)
        forwards = service.board.snapshot().num_forwards - before
    assert ended == list(range(200))
    steps = [reply["critic_step"] for reply in replies]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 1
    assert forwards < 200
    for batch, reply in zip(batches, replies, strict=True):
        assert [len(values) for values in reply["values"]] == [len(branch) for branch in batch]


async def test_a_command_takes_what_fits_its_budget_and_at_least_one(tiny_model: Path) -> None:
    """Budget: 4 bins of 64 tokens. Requests of 100, 100, 100 and 500 tokens make three commands: two, one, one."""
    assert FORWARDS_PER_COMMAND * SEQ_LEN == 256
    with serving(tiny_model, CONFIG) as service:
        service.held.clear()
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        jobs = [ScoreJob(TokenBatch.of([[1] * 50] * n), loop, loop.create_future()) for n in (2, 2, 2, 10)]
        for job in jobs:
            service.scorer.submit(job)
        sizes = []
        while service.scorer.pending():
            command = service.scorer.next_command()
            sizes.append(len(command["lengths"]) // 4)
            service.scorer.execute(command)
        assert sizes == [4, 2, 10]
        replies = await asyncio.gather(*(job.reply for job in jobs))
        assert [len(reply.lengths) for reply in replies] == [2, 2, 2, 10]
        assert all(reply.values[1] == pytest.approx(replies[0].values[1], abs=1e-5) for reply in replies)
