"""Which task comes next: a function of the seed and the position alone, so that a run can be repeated.

Notable:
- Each environment walks through a fresh permutation of its tasks per epoch; environments are drawn by weight.
- Seeds of sampling requests come from (run seed, group, sample, turn) by hashing: no state, no order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from orchestrator.environments.protocol import Environment
from services.config.orchestrator import EnvConfig


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to roll out `group_size` times."""

    group: int
    """position in the run's stream of tasks"""
    env: Environment
    config: EnvConfig
    index: int

    @property
    def task_id(self) -> str:
        """Printable name."""
        return self.env.task_id(self.index)


class TaskStream:
    """The endless, seeded stream of tasks."""

    def __init__(self, environments: list[tuple[Environment, EnvConfig]], seed: int) -> None:
        self._environments = environments
        self._seed = seed
        self._rng = np.random.default_rng([seed, 0])
        self._weights = np.array([config.weight for _, config in environments])
        self._orders: list[list[int]] = [[] for _ in environments]
        self._epochs = [0] * len(environments)
        self._position = 0

    def next(self) -> Task:
        """The next task."""
        which = int(self._rng.choice(len(self._environments), p=self._weights / self._weights.sum()))
        env, config = self._environments[which]
        if not self._orders[which]:
            order = np.random.default_rng([self._seed, 1, which, self._epochs[which]]).permutation(env.num_tasks)
            self._orders[which] = order.tolist()[::-1]
            self._epochs[which] += 1
        task = Task(self._position, env, config, self._orders[which].pop())
        self._position += 1
        return task


def request_seed(run_seed: int, *parts: int) -> int:
    """A 31-bit seed of one sampling request."""
    text = ":".join(map(str, (run_seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
