"""Greedy evaluation on a fixed list of tasks, before the first step, in between, and after the last.

Notable:
- Runs on the engine while training rollouts go on; the row says which policy version began it.
- A task whose environment fails or takes too long counts as an error, not as a wrong answer; all failing is an error
  of the run.
"""

from __future__ import annotations

import asyncio

from orchestrator.environments.protocol import Environment
from orchestrator.rollout import MAX_TOKEN_ID, Engine, EnvironmentFailed, PromptTooLong, Sampling, roll_out
from orchestrator.tasks import Task
from orchestrator.threads import Threads
from services.config.orchestrator import EnvConfig, EvalConfig
from services.wire.errors import BadData

CONCURRENCY = 64
ENVIRONMENT_THREADS = 4


class Evaluator:
    """One `[[eval]]`."""

    def __init__(
        self,
        config: EvalConfig,
        env: Environment,
        engine: Engine,
        *,
        seed: int,
        deadline_s: float,
        max_token_id: int = MAX_TOKEN_ID,
    ) -> None:
        self.config = config
        self._env = env
        self._engine = engine
        self._sampling = Sampling(config.temperature, seed, deadline_s, max_token_id)
        self._limits = EnvConfig(
            type=config.type,
            max_turns=config.max_turns,
            max_turn_tokens=config.max_turn_tokens,
            max_trace_tokens=config.max_trace_tokens,
            args=config.args,
        )

    def is_due(self, step: int) -> bool:
        """Should this run after `step` finished steps (besides the first and the last time)."""
        return self.config.interval_steps > 0 and step % self.config.interval_steps == 0

    async def run(self) -> dict[str, float]:
        """Play every task once.

        Raises:
            BadData: when every task failed.
        """
        gate = asyncio.Semaphore(CONCURRENCY)
        num_tasks = min(self.config.num_tasks, self._env.num_tasks)
        threads = Threads(ENVIRONMENT_THREADS, name="evaluation")
        last_error: Exception | None = None

        async def one(index: int) -> tuple[float, int] | None:
            nonlocal last_error
            task = Task(index, self._env, self._limits, index)
            async with gate:
                try:
                    async with asyncio.timeout(self._sampling.deadline_s):
                        trace = await roll_out(task, 0, self._engine, self._sampling, threads)
                except (EnvironmentFailed, PromptTooLong, TimeoutError) as error:
                    last_error = error
                    return None
                return trace.reward, trace.num_action_tokens

        try:
            outcomes = [outcome for outcome in await asyncio.gather(*map(one, range(num_tasks))) if outcome is not None]
        finally:
            threads.close()
        if not outcomes:
            raise BadData(f"evaluation {self.config.type}: all {num_tasks} tasks failed; the last: {last_error!r}")
        prefix = f"eval/{self.config.type}"
        return {
            f"{prefix}/accuracy": sum(reward for reward, _ in outcomes) / len(outcomes),
            f"{prefix}/length": sum(length for _, length in outcomes) / len(outcomes),
            f"{prefix}/num_tasks": float(len(outcomes)),
            f"{prefix}/num_errors": float(num_tasks - len(outcomes)),
        }
