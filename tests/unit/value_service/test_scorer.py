"""The scorer's queue: first come, first scored, together where they fit, each by one state of the critic."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from services.config.train import OptimConfig, TrainModelConfig, ValueConfig
from services.model.layout import PackedLayout
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
    """Budget: 4 bins of 64 tokens. Requests of 100, 100, 100 and 500 tokens make three commands: two, one, one part."""
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
        assert sizes == [4, 2, 1] and service.board.snapshot().num_forwards == 4 + 2 + 10
        replies = await asyncio.gather(*(job.reply for job in jobs))
        assert [len(reply.lengths) for reply in replies] == [2, 2, 2, 10]
        assert all(reply.values[1] == pytest.approx(replies[0].values[1], abs=1e-5) for reply in replies)


async def test_small_requests_go_beside_the_parts_of_a_large_one(tiny_model: Path) -> None:
    """Scenario: forwards of 64 tokens. During the first one of a request of twelve branches of 50 tokens there come
    requests of 30, 100, 20 and 40 tokens.

    Result: 30 and 20 share the next forward, 40 has one after the second of the large request, 100 waits for its end;
    all values are those of a request alone, by one step.
    """
    lengths = {"large": [50] * 12, "30": [30], "100": [50, 50], "20": [11, 9], "40": [40]}
    rng = np.random.default_rng(5)
    batches = {name: TokenBatch.of([rng.integers(0, 261, n).tolist() for n in own]) for name, own in lengths.items()}
    with serving(tiny_model, CONFIG) as service:
        service.held.clear()
        await asyncio.sleep(0.01)
        loop, scorer = asyncio.get_running_loop(), service.scorer
        jobs = {name: ScoreJob(batch, loop, loop.create_future()) for name, batch in batches.items()}
        forwards: list[list[int]] = []

        def look(_module: nn.Module, given: tuple[torch.Tensor, PackedLayout], _output: torch.Tensor) -> None:
            forwards.append(sorted(given[1].lengths))
            if len(forwards) == 1:
                for name in ("30", "100", "20", "40"):
                    scorer.submit(jobs[name])

        hook = service.critic.register_forward_hook(look)
        scorer.submit(jobs["large"])
        scorer.execute(scorer.next_command())
        assert forwards == [[50], [9, 11, 30], [50], [40], *[[50]] * 10]
        assert scorer.num_waiting == 1
        scorer.execute(scorer.next_command())
        hook.remove()
        for name, batch in batches.items():
            alone = ScoreJob(batch, loop, loop.create_future())
            scorer.submit(alone)
            scorer.execute(scorer.next_command())
            reply, expected = await jobs[name].reply, await alone.reply
            assert reply.critic_step == 0 and reply.lengths.tolist() == lengths[name]
            assert np.allclose(reply.values, expected.values, atol=1e-5)
            assert np.allclose(reply.bootstrap_values, expected.bootstrap_values, atol=1e-5)
