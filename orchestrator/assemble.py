"""The orchestrator's parts, connected: clients, senders, producer, publisher, loop.

Notable:
- Background tasks (producer, publisher, critic grids, telemetry) and the loop live in one task group: the first failure
  ends all, and is the one that is reported.
- A start from a commit takes up everything here, before anything runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from loguru import logger

from orchestrator import state
from orchestrator.admission import Outcomes
from orchestrator.alarms import Alarms, WatchedMetrics
from orchestrator.algorithms import build as build_algorithm
from orchestrator.checkpointer import Checkpointer
from orchestrator.critic_grids import CriticGrids
from orchestrator.environments import build as build_environment
from orchestrator.environments import build_training
from orchestrator.evaluate import Evaluator
from orchestrator.first_fit import report_overlap
from orchestrator.loop import Clock, Loop, Parts
from orchestrator.metrics import JsonLines
from orchestrator.producer import Producer
from orchestrator.publisher import Publisher
from orchestrator.recorder import Recorder
from orchestrator.replay import RecordedRollouts
from orchestrator.rollout import Engine
from orchestrator.routing import Routing
from orchestrator.state import Snapshot, State
from orchestrator.status_page import StatusPage
from orchestrator.tasks import TaskStream
from orchestrator.telemetry import Telemetry
from orchestrator.tokenizer import Tokenizer
from orchestrator.trainers import TrainClient
from orchestrator.turns import Role, SharedEngines, SharedTrainer, Sleeper, Turns
from services.config.context import RunContext
from services.config.identity import identity_of
from services.config.schema import Config
from services.inference.client import EngineClient
from services.inference.generation import GenerationClient
from services.runtime.auth import Token, critic_token, grid_key, run_token
from services.transport.grid_sender import GridSender
from services.transport.http import make_session
from services.transport.score_client import ScoreClient
from services.wire.errors import ContractError

ENDING_SHARE = 0.3
"""Of `runtime.shutdown_grace_s`: engines that share devices are given so long to sleep when the run is to end."""
STOP_POLL_S = 1.0
"""How often the train groups are asked whether a signal told them to end."""


class Orchestra:
    """Everything the orchestrator holds, opened and closed together."""

    def __init__(self, config: Config, context: RunContext) -> None:
        self._config = config
        self._context = context
        self._identity: dict[str, Any] = {"run_id": context.run_id, "epoch": context.epoch}
        self.is_conducting = False
        """whether the loop has begun: before that there is nothing new to commit"""

    async def __aenter__(self) -> Orchestra:
        config, context = self._config, self._context
        tokenizer = Tokenizer(Path(context.model_dir))
        token = run_token(context.token_file)
        self._connect(tokenizer, token)
        alarms = Alarms(config, context.run_dir, is_replay=context.replay_of is not None)
        self._metrics = WatchedMetrics(context.run_dir, alarms)
        self._critic_grids = None
        if self._critic is not None and self._critic_sender is not None:
            self._critic_grids = CriticGrids(
                self._critic,
                self._critic_sender,
                step_deadline_s=config.orchestrator.step_deadline_s,
                on_done=lambda step, row: self._metrics.add("critic", step, row),
            )
        self._clock = Clock(config)
        self._outcomes = Outcomes(
            max_bad_fraction=config.orchestrator.max_bad_fraction,
            window=config.orchestrator.bad_window,
            num_concurrent=config.orchestrator.max_concurrent_rollouts,
        )
        self._publisher = self._make_publisher()
        self._algorithm = build_algorithm(config.algorithm)
        self._producer = (
            self._make_producer(tokenizer) if context.replay_of is None else self._recorded(context.replay_of)
        )
        self._turns = self._make_turns()
        self._recorder = Recorder(context.run_dir / "rollouts", **self._identity) if config.run.record else None
        self._telemetry = Telemetry(
            self._metrics,
            self._producer,
            self._publisher,
            self._policy,
            self._critic,
            self._critic_grids,
            self._recorder,
            self._routing,
            self._turns,
            max_steps=config.orchestrator.max_steps,
            alarms=alarms.told,
        )
        self._page = StatusPage(context.orchestrator_url, self._telemetry.snapshot, token=token)
        self._traces = JsonLines(context.run_dir / "traces.jsonl")
        self._checkpointer = Checkpointer(
            context.run_dir,
            [group for group in (self._policy, self._critic) if group is not None],
            config.checkpoint,
            self._metrics,
            identity=identity_of(config, Path(context.model_dir)),
            deadline_s=config.orchestrator.step_deadline_s,
            take=self._take,
            turns=self._turns,
            **self._identity,
        )
        self._loop = Loop(config, context, self._make_parts(tokenizer), self._clock)
        if context.commit_dir is not None:
            self._take_up(state.read(Path(context.commit_dir)))
        await self._page.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        senders = [sender for sender in (self._policy_sender, self._critic_sender) if sender is not None]
        for sender in senders:
            await sender.close()
        for client in (self._routing, *self._engines, self._scorer):
            if client is not None:
                await client.close()
        await self._session.close()
        await self._critic_session.close()
        await self._page.close()

    def request_commit(self) -> None:
        """Commit between two steps, as soon as that can be, and end `play`; call it in the event loop's thread."""
        self._checkpointer.request()
        self._publisher.leave_engines()

    @property
    def is_preempted(self) -> bool:
        """Did `play` end before the last step or its evaluation, because a commit was requested."""
        done = self._checkpointer.committed
        is_whole = done == self._config.orchestrator.max_steps and not self._loop.lacks_evaluation
        return self._checkpointer.is_requested and done is not None and not is_whole

    async def play(self) -> None:
        """Wait until every process is ready, then run the loop to its end, or until a requested commit is made."""
        deadline_s = self._config.runtime.startup_deadline_s
        self._telemetry.enter("every process to be ready")
        async with asyncio.TaskGroup() as ready:
            if self._routing is not None:
                ready.create_task(self._routing.wait_ready(deadline_s))
            else:
                for engine in self._engines:
                    ready.create_task(engine.wait_ready(deadline_s))
            for group in (self._policy, self._critic):
                if group is not None:
                    ready.create_task(group.wait_ready(deadline_s=deadline_s))
        self._checkpointer.sweep()
        await self._catch_up()
        if self._routing is not None:
            self._telemetry.enter("the router to take every engine")
            await self._routing.open(deadline_s)
        self.is_conducting = True
        async with asyncio.TaskGroup() as group:
            background: list[Coroutine[Any, Any, None]] = [
                self._producer.run(),
                self._publisher.run(),
                self._telemetry.run(),
                self._watch_for_stops(),
            ]
            if self._critic_grids is not None:
                background.append(self._critic_grids.run())
            if self._routing is not None:
                background.append(self._routing.run())
            tasks = [group.create_task(work) for work in background]
            await self._loop.run()
            for task in tasks:
                task.cancel()

    async def _watch_for_stops(self) -> None:
        """A train group that was told to end waits for a commit: make one, and end."""
        while not self._checkpointer.is_requested:
            await asyncio.sleep(STOP_POLL_S)
            for group in (self._policy, self._critic):
                if group is not None and (await group.status()).stop_requested:
                    logger.info("{} was asked to end: the run commits and ends", group.name)
                    self.request_commit()

    def _take(self, step: int) -> Snapshot:
        """Everything that a later start needs to go on after `step` finished steps."""
        return Snapshot(
            State(
                step=step,
                version=self._clock.version_at(step),
                evaluated_at=self._loop.evaluated_at,
                source=self._producer.state_dict(),
                algorithm=self._algorithm.state_dict(),
                outcomes=self._outcomes.state_dict(),
                metrics_bytes=self._metrics.num_bytes,
                traces_bytes=self._traces.num_bytes,
            ),
            [*self._loop.taken, *self._producer.pending()],
        )

    def _take_up(self, snapshot: Snapshot) -> None:
        """Go on from there, whatever an earlier start did after it."""
        step = snapshot.state.step
        self._producer.load_state_dict(snapshot.state.source, snapshot.pending)
        self._algorithm.load_state_dict(snapshot.state.algorithm)
        self._outcomes.load_state_dict(snapshot.state.outcomes)
        self._metrics.go_on_from(step, snapshot.state.metrics_bytes)
        self._traces.cut(snapshot.state.traces_bytes)
        if self._recorder is not None:
            self._recorder.go_on_from(step)
        if self._critic_grids is not None:
            self._critic_grids.go_on_from(step)
        self._clock.step = step
        self._loop.evaluated_at = snapshot.state.evaluated_at
        self._checkpointer.committed = step

    async def _catch_up(self) -> None:
        """Bring the engines to the committed version; before that the trainers must be where the commit says.

        Raises:
            ContractError: a trainer is elsewhere.
        """
        step = self._checkpointer.committed or 0
        version = self._clock.version_at(step)
        for group, expected in ((self._policy, version), (self._critic, step)):
            if group is not None and group.last is not None and group.last.steps_done != expected:
                raise ContractError(f"{group.name} has done {group.last.steps_done} steps, the commit {expected}")
        self._telemetry.enter(f"engines to serve version {version}")
        await self._publisher.catch_up(version)

    def _connect(self, tokenizer: Tokenizer, token: Token | None) -> None:
        """Everything that speaks to another process: engines, train groups, scoring, grids."""
        config, context = self._config, self._context
        self._session = make_session(token=token)
        self._engines = [
            EngineClient(
                url,
                eos_token_id=tokenizer.eos_token_id,
                clear_cache=config.inference.clear_cache_on_update,
                token=token,
            )
            for url in context.inference_urls
        ]
        self._routing = self._make_routing(tokenizer, token)
        self._policy = TrainClient(self._session, "policy", context.policy_url)
        own_file = config.value.token_file if config.value is not None else None
        value_token = critic_token(own_file, context.token_file)
        self._critic_session = make_session(token=value_token)  # nobody else is shown a token of the critic's own
        self._critic = TrainClient(self._critic_session, "critic", context.value_url) if context.value_url else None
        self._scorer = ScoreClient(context.value_url, token=value_token) if context.value_url else None
        key = grid_key(context.token_file)
        num_policy, num_value = config.num_policy_data_ranks, config.num_value_data_ranks
        self._policy_sender = GridSender(
            context.policy_grid_url, stream="policy", num_data_ranks=num_policy, key=key, **self._identity
        )
        self._critic_sender = None
        if context.critic_grid_url is not None:
            self._critic_sender = GridSender(
                context.critic_grid_url, stream="critic", num_data_ranks=num_value, key=key, **self._identity
            )

    def _make_routing(self, tokenizer: Tokenizer, token: Token | None) -> Routing | None:
        """The keeper of the router's list, where there are several engines."""
        context, inference = self._context, self._config.inference
        if context.router_url is None or context.router_control_url is None:
            return None
        client = GenerationClient(
            context.router_url,
            eos_token_id=tokenizer.eos_token_id,
            token=token,
            patience_s=inference.probe_deadline_s,
        )
        return Routing(
            self._engines,
            client,
            context.router_control_url,
            probe_deadline_s=inference.probe_deadline_s,
            update_deadline_s=inference.update_deadline_s,
            run_dir=context.run_dir,
            token=token,
        )

    @property
    def _generators(self) -> list[Engine]:
        """Where generation goes."""
        return list(self._engines) if self._routing is None else [self._routing.client]

    def _make_publisher(self) -> Publisher:
        def on_version(version: int, row: dict[str, Any]) -> None:
            self._metrics.add("policy", version - 1 + self._clock.critic_only_steps, row | {"policy/version": version})

        return Publisher(
            self._policy,
            self._engines if self._routing is None else [self._routing],
            keep_snapshots=self._config.run.keep_snapshots,
            update_deadline_s=self._config.inference.update_deadline_s,
            step_deadline_s=self._config.orchestrator.step_deadline_s,
            on_version=on_version,
            on_engines=lambda: self._producer.poke(),
        )

    def _make_turns(self) -> Turns:
        """Of the roles that share devices. Those of trainers sleep at the start, engines are awake."""
        config, sleepers = self._config, dict[Role, Sleeper]()
        deadline_s = config.orchestrator.step_deadline_s
        if config.deployment.sharing != "none":
            sleepers["policy"] = SharedTrainer(
                self._policy, lambda: self._publisher.newest_expected, deadline_s=deadline_s
            )
            if self._critic is not None and self._critic_grids is not None:
                sleepers["critic"] = SharedTrainer(self._critic, self._critic_grids.num_sent, deadline_s=deadline_s)
        if config.deployment.sharing == "time" and isinstance(self._producer, Producer):
            sleepers["inference"] = SharedEngines(
                self._engines,
                self._producer,
                self._publisher,
                unless_ending=lambda work: self._checkpointer.unless_requested(work),
                deadline_s=config.inference.update_deadline_s,
                ending_deadline_s=ENDING_SHARE * config.runtime.shutdown_grace_s,
            )
        return Turns(
            sleepers,
            holder="inference" if "inference" in sleepers else None,
            run_dir=self._context.run_dir,
            on_wait=lambda what: self._telemetry.enter(what),
        )

    def _recorded(self, run_dir: str) -> RecordedRollouts:
        deadline_s = self._config.orchestrator.score_deadline_s
        return RecordedRollouts(
            Path(run_dir) / "rollouts", self._scorer, self._critic_grids, score_deadline_s=deadline_s
        )

    def _make_producer(self, tokenizer: Tokenizer) -> Producer:
        config = self._config
        environments = [(build_training(env, tokenizer), env) for env in config.env]
        report_overlap(config, environments)
        limits = [config.policy.model.seq_len] + ([config.value.model.seq_len] if config.value else [])
        return Producer(
            config.orchestrator,
            TaskStream(environments, config.seed, self._algorithm.prompt_weight()),
            self._generators,
            self._scorer if config.deployment.sharing == "none" else None,  # the loop scores when it is its turn
            self._outcomes,
            seed=config.seed,
            max_tokens=min(limits),
            min_group=config.algorithm.min_group,
            may_start=lambda num_pending: self._clock.may_start(num_pending, self._publisher.version),
            max_token_id=tokenizer.max_token_id,
        )

    def _make_parts(self, tokenizer: Tokenizer) -> Parts:
        config = self._config
        evaluators = [
            Evaluator(
                section,
                build_environment(section.type, section.args, tokenizer),
                self._generators[0],
                seed=config.seed,
                deadline_s=config.orchestrator.rollout_deadline_s,
                max_token_id=tokenizer.max_token_id,
            )
            for section in config.eval
        ]
        return Parts(
            algorithm=self._algorithm,
            producer=self._producer,
            outcomes=self._outcomes,
            recorder=self._recorder,
            checkpointer=self._checkpointer,
            publisher=self._publisher,
            scorer=self._scorer,
            policy_sender=self._policy_sender,
            critic_grids=self._critic_grids,
            evaluators=evaluators,
            metrics=self._metrics,
            traces=self._traces,
            telemetry=self._telemetry,
            turns=self._turns,
            is_replay=self._context.replay_of is not None,
        )
