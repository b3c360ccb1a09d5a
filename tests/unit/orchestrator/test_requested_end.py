"""A run that is asked to end while something else ends too, or takes long: what was trained is committed all the same.

Notable:
- A signal to all processes of a run ends the engines at once; a commit must not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

from orchestrator.assemble import Orchestra
from services.config.schema import Config
from tests.stand_ins import Engine, Server, Stage, staged
from tests.unit.orchestrator.test_checkpointer import commits, committing
from tests.unit.orchestrator.test_loop import config_of, play, steps_of, until

END_DEADLINE_S = 15.0
"""Far below every deadline of an engine, far above what it takes on a loaded machine."""
EVALUATION = {"type": "add", "max_turns": 1, "max_turn_tokens": 4, "max_trace_tokens": 16, "num_tasks": 1}


@dataclass
class EngineThatLeaves(Engine):
    """Answers nothing but 503 once it is gone, which clients take for a reason to ask again."""

    is_gone: bool = False

    def app(self) -> FastAPI:
        app = super().app()

        @app.middleware("http")
        async def gone(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
            return Response(status_code=503) if self.is_gone else await call_next(request)

        return app


def evaluating(config: Config) -> Config:
    return Config.model_validate(config.model_dump(mode="json") | {"eval": [EVALUATION | {"interval_steps": 2}]})


async def end(orchestra: Orchestra, run: asyncio.Task[None]) -> None:
    orchestra.request_commit()
    async with asyncio.timeout(END_DEADLINE_S):
        await run


def resumed(stage: Stage, step: int) -> dict:
    return {"commit_dir": commits(stage).path(step), "first_steps": (step, step)}


async def test_a_step_that_the_policy_ends_after_the_engines_are_gone_is_committed(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: engines end while the policy trains. Result: its snapshot counts as published, the run is committed
    after that step, and the next start brings that version to its engines before it trains."""
    config = committing(config_of(max_steps=3, schedule="critic_first", max_off_policy_steps=0), 0)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.engine = engine = EngineThatLeaves()
        stage.policy.held_step = 1
        async with Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.policy.started == [0, 1] and engine.version == 1)
                engine.is_gone = True
                stage.policy.release.set()
                await end(orchestra, run)
        assert orchestra.is_preempted and commits(stage).steps() == [2]
        assert [row["policy/version"] for row in stage.rows("policy")] == [1, 2]
    with staged(stage.run_dir, server, model_dir, **resumed(stage, 2)) as again:
        await play(config, again)
    assert again.policy.started == [2] and steps_of(again.rows("policy")) == [0, 1, 2]
    assert again.engine.version == 3


async def test_an_update_that_is_on_its_way_to_a_lost_engine_holds_no_commit_up(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = committing(config_of(max_steps=3, schedule="critic_first", max_off_policy_steps=0), 0)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.engine = engine = EngineThatLeaves()
        stage.policy.held_step = 1
        async with Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.policy.started == [0, 1] and engine.version == 1)
                engine.is_gone = True
                stage.policy.release.set()
                await until(lambda: orchestra._engines[0].is_updating)
                await end(orchestra, run)
        assert commits(stage).steps() == [2]


async def test_an_evaluation_is_given_up_and_the_next_start_makes_up_for_it(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = evaluating(committing(config_of(max_steps=4, schedule="critic_first"), 0))
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.engine.holds = lambda _: len(stage.critic.started) == 2
        async with Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: orchestra._telemetry.snapshot()["phase"] == "evaluation of add")
                await until(lambda: stage.policy.started == [0, 1])
                await end(orchestra, run)
        assert orchestra.is_preempted and commits(stage).steps() == [2] and steps_of(stage.rows("eval")) == [0]
    with staged(stage.run_dir, server, model_dir, **resumed(stage, 2)) as again:
        await play(config, again)
    assert [(row["step"], row["eval/version"]) for row in again.rows("eval")] == [(0, 0), (2, 2), (4, 4)]


async def test_a_run_that_lacks_its_last_evaluation_can_be_resumed_for_it(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = evaluating(committing(config_of(max_steps=1, schedule="critic_first"), 0))
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.engine.holds = lambda _: len(stage.critic.started) == 1
        async with Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.policy.started == [0] and stage.engine.num_held > 0)
                await end(orchestra, run)
        assert orchestra.is_preempted and commits(stage).steps() == [1]
    with staged(stage.run_dir, server, model_dir, **resumed(stage, 1)) as again:
        await play(config, again)
    assert steps_of(again.rows("eval")) == [0, 1] and again.policy.started == []
