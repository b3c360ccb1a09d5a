"""Refreshed advantages: scored again over HTTP, one request a group, targets kept."""

from __future__ import annotations

import numpy as np
from aiohttp import web

from orchestrator.algorithms import build
from orchestrator.producer import Group, samples_of, score_group
from orchestrator.refresh import refresh_advantages
from services.config.algorithm import SaoConfig
from services.transport.score_client import ScoreClient
from services.wire.samples import StopReason, Trace
from services.wire.scoring import ScoredBatch, decode_request, encode_reply
from tests.samples import make_sample


class Critic:
    """A value service whose every token is worth `worth`."""

    def __init__(self) -> None:
        self.worth = 0.25
        self.critic_step = 0
        self.requests: list[int] = []

    async def score(self, request: web.Request) -> web.Response:
        batch = decode_request(await request.read())
        self.requests.append(len(batch.lengths))
        values = np.concatenate([[0.0] + [self.worth] * (length - 1) for length in batch.lengths.tolist()])
        worths = np.full(len(batch.lengths), self.worth)
        return web.Response(body=encode_reply(ScoredBatch(batch.lengths, values, worths, self.critic_step)))


def group(group_id: str, *rewards: float) -> Group:
    traces = []
    for index, reward in enumerate(rewards):
        branch = make_sample([1, 1]).branch
        trace_id = f"{group_id}/{index}"
        traces.append(Trace(trace_id, group_id, "add", "add/1+2", [branch], reward, StopReason.TERMINATED))
    return Group(traces, [sample for trace in traces for sample in samples_of(trace)])


async def test_advantages_follow_the_refreshed_values_and_targets_stay() -> None:
    critic = Critic()
    app = web.Application()
    app.router.add_post("/v1/score", critic.score)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    client = ScoreClient(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")  # type: ignore[attr-defined]
    try:
        groups = [group("0", 1.0, 0.0), group("1", 1.0)]
        algorithm = build(SaoConfig(type="sao", value_lambda=0.5))
        for each in groups:
            await score_group(each, client, deadline_s=5)
        algorithm.credit([each.samples for each in groups])
        samples = [sample for each in groups for sample in each.samples]
        targets = [sample.returns.tobytes() for sample in samples if sample.returns is not None]
        critic.worth, critic.critic_step, critic.requests = 0.75, 1, []
        row = await refresh_advantages(groups, algorithm, client, deadline_s=5)
    finally:
        await client.close()
        await runner.cleanup()
    assert critic.requests == [2, 1], "one request a group"
    assert [sample.advantages[-1] for sample in samples if sample.advantages is not None] == [0.25, -0.75, 0.25]
    assert [sample.returns.tobytes() for sample in samples if sample.returns is not None] == targets
    assert {sample.critic_step for sample in samples} == {1}
    advantages = np.concatenate([sample.advantages[1:] for sample in samples if sample.advantages is not None])
    assert row["credit/advantage_abs_mean_refreshed"] == np.abs(advantages).mean()
    assert row["time/refresh_s"] >= 0


def test_samples_name_their_prompt() -> None:
    """Baselines per prompt are kept by it: the same in every epoch, whatever group it falls into."""
    first, second = group("0", 1.0), group("7", 1.0)
    assert first.samples[0].prompt == second.samples[0].prompt == "add:add/1+2"
