"""The orchestrator's parts, connected: clients, senders, producer, publisher, loop.

Notable:
- Background tasks (producer, publisher, telemetry) and the loop live in one task group: the first failure ends all,
  and is the one that is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from orchestrator.admission import Outcomes
from orchestrator.algorithms import build as build_algorithm
from orchestrator.environments import build as build_environment
from orchestrator.evaluate import Evaluator
from orchestrator.loop import Clock, Loop, Parts
from orchestrator.metrics import JsonLines, Metrics
from orchestrator.producer import Producer
from orchestrator.publisher import Publisher
from orchestrator.status_page import StatusPage
from orchestrator.tasks import TaskStream
from orchestrator.telemetry import Telemetry
from orchestrator.tokenizer import Tokenizer
from orchestrator.trainers import TrainClient
from services.config.context import RunContext
from services.config.schema import Config
from services.inference.client import EngineClient
from services.transport.grid_sender import GridSender
from services.transport.score_client import ScoreClient


class Orchestra:
    """Everything the orchestrator holds, opened and closed together."""

    def __init__(self, config: Config, context: RunContext) -> None:
        self._config = config
        self._context = context

    async def __aenter__(self) -> Orchestra:
        config, context = self._config, self._context
        tokenizer = Tokenizer(Path(context.model_dir))
        self._session = aiohttp.ClientSession()
        self._engines = [
            EngineClient(url, eos_token_id=tokenizer.eos_token_id, clear_cache=config.inference.clear_cache_on_update)
            for url in context.inference_urls
        ]
        self._policy = TrainClient(self._session, "policy", context.policy_url)
        self._critic = TrainClient(self._session, "critic", context.value_url) if context.value_url else None
        self._scorer = ScoreClient(context.value_url) if context.value_url else None
        identity = {"run_id": context.run_id, "epoch": context.epoch}
        num_policy, num_value = config.deployment.num_policy_gpus, config.deployment.num_value_gpus
        self._policy_sender = GridSender(
            context.policy_grid_url, stream="policy", num_data_ranks=num_policy, **identity
        )
        self._critic_sender = None
        if context.critic_grid_url is not None:
            self._critic_sender = GridSender(
                context.critic_grid_url, stream="critic", num_data_ranks=num_value, **identity
            )
        self._metrics = Metrics(context.run_dir)
        self._clock = Clock(config)
        self._outcomes = Outcomes(
            max_bad_fraction=config.orchestrator.max_bad_fraction,
            window=config.orchestrator.bad_window,
            num_concurrent=config.orchestrator.max_concurrent_rollouts,
        )
        self._publisher = self._make_publisher()
        self._producer = self._make_producer(tokenizer)
        self._telemetry = Telemetry(
            self._metrics,
            self._producer,
            self._publisher,
            self._policy,
            self._critic,
            max_steps=config.orchestrator.max_steps,
        )
        self._page = StatusPage(context.orchestrator_url, self._telemetry.snapshot)
        self._loop = Loop(config, context, self._make_parts(tokenizer), self._clock)
        await self._page.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        senders = [sender for sender in (self._policy_sender, self._critic_sender) if sender is not None]
        for sender in senders:
            await sender.close()
        for client in (*self._engines, self._scorer):
            if client is not None:
                await client.close()
        await self._session.close()
        await self._page.close()

    async def play(self) -> None:
        """Wait until every process is ready, then run the loop to its end."""
        deadline_s = self._config.runtime.startup_deadline_s
        self._telemetry.enter("every process to be ready")
        async with asyncio.TaskGroup() as ready:
            for engine in self._engines:
                ready.create_task(engine.wait_ready(deadline_s))
            for group in (self._policy, self._critic):
                if group is not None:
                    ready.create_task(group.wait_ready(deadline_s=deadline_s))
        async with asyncio.TaskGroup() as group:
            background: list[Coroutine[Any, Any, None]] = [
                self._producer.run(),
                self._publisher.run(),
                self._telemetry.run(),
            ]
            tasks = [group.create_task(work) for work in background]
            await self._loop.run()
            for task in tasks:
                task.cancel()

    def _make_publisher(self) -> Publisher:
        def on_version(version: int, row: dict[str, Any]) -> None:
            self._metrics.add("policy", version - 1 + self._clock.critic_only_steps, row | {"policy/version": version})

        return Publisher(
            self._policy,
            self._engines,
            keep_snapshots=self._config.run.keep_snapshots,
            update_deadline_s=self._config.inference.update_deadline_s,
            step_deadline_s=self._config.orchestrator.step_deadline_s,
            on_version=on_version,
            on_engines=lambda: self._producer.poke(),
        )

    def _make_producer(self, tokenizer: Tokenizer) -> Producer:
        config = self._config
        environments = [(build_environment(env.type, env.args, tokenizer), env) for env in config.env]
        limits = [config.policy.model.seq_len] + ([config.value.model.seq_len] if config.value else [])
        return Producer(
            config.orchestrator,
            TaskStream(environments, config.seed),
            list(self._engines),
            self._scorer,
            self._outcomes,
            seed=config.seed,
            max_tokens=min(limits),
            min_group=config.algorithm.min_group,
            may_start=lambda num_pending: self._clock.may_start(num_pending, self._publisher.version),
        )

    def _make_parts(self, tokenizer: Tokenizer) -> Parts:
        config = self._config
        evaluators = [
            Evaluator(
                section,
                build_environment(section.type, section.args, tokenizer),
                self._engines[0],
                seed=config.seed,
                deadline_s=config.orchestrator.rollout_deadline_s,
            )
            for section in config.eval
        ]
        return Parts(
            algorithm=build_algorithm(config.algorithm),
            producer=self._producer,
            outcomes=self._outcomes,
            publisher=self._publisher,
            policy=self._policy,
            critic=self._critic,
            scorer=self._scorer,
            policy_sender=self._policy_sender,
            critic_sender=self._critic_sender,
            evaluators=evaluators,
            metrics=self._metrics,
            traces=JsonLines(self._context.run_dir / "traces.jsonl"),
            telemetry=self._telemetry,
        )
