"""What each process is doing and how fast, for the status page and the metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any

from orchestrator.critic_grids import CriticGrids
from orchestrator.metrics import Metrics
from orchestrator.producer import GroupSource
from orchestrator.publisher import Publisher
from orchestrator.recorder import Recorder
from orchestrator.routing import Routing
from orchestrator.trainers import TrainClient
from orchestrator.turns import Turns
from services.wire.errors import DependencyLost

REFRESH_S = 1.0
RATE_STEPS = 5
ALARMS_SHOWN = 20
"""The newest on the status page."""


class Telemetry:
    """Rates are tokens over wall time, both of the last few steps: a trainer finishes between two counts or not."""

    def __init__(
        self,
        metrics: Metrics,
        producer: GroupSource,
        publisher: Publisher,
        policy: TrainClient,
        critic: TrainClient | None,
        critic_grids: CriticGrids | None,
        recorder: Recorder | None,
        routing: Routing | None,
        turns: Turns,
        *,
        max_steps: int,
        alarms: list[dict[str, Any]],
    ) -> None:
        self._metrics = metrics
        self._producer = producer
        self._publisher = publisher
        self._clients = {"policy": policy} | ({"value": critic} if critic is not None else {})
        self._critic_grids = critic_grids
        self._recorder = recorder
        self._routing = routing
        self._turns = turns
        self._max_steps = max_steps
        self._alarms = alarms
        self._phase = "starting"
        self._phase_since = time.monotonic()
        self._counts: deque[tuple[float, dict[str, int]]] = deque([(time.monotonic(), {})], maxlen=RATE_STEPS + 1)
        self._rates: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """The loop waits for or works on `phase` now."""
        self._phase, self._phase_since = phase, time.monotonic()

    async def take_rates(self) -> dict[str, float]:
        """`tokens_per_s/<process>` over the last few calls, and counts of the router's keeper; asks the groups now."""
        for client in self._clients.values():
            await client.status()
        now = time.monotonic()
        counts = {"inference": self._producer.num_sampled_tokens}
        for name, client in self._clients.items():
            if client.last is not None:
                counts[name] = client.last.num_scored_tokens + client.last.num_trained_tokens
        then, before = self._counts[0]
        self._rates = {name: (count - before.get(name, 0)) / max(now - then, 1e-9) for name, count in counts.items()}
        self._counts.append((now, counts))
        rates = {f"tokens_per_s/{name}": rate for name, rate in self._rates.items()}
        return rates | (self._routing.take_counts() if self._routing is not None else {})

    async def run(self) -> None:
        """Keep the train groups' statuses fresh for whoever looks."""
        while True:
            for client in self._clients.values():
                with suppress(DependencyLost):  # whoever needs the group notices; a status page must not end a run
                    await client.status()
            await asyncio.sleep(REFRESH_S)

    def snapshot(self) -> dict[str, Any]:
        """The status page."""
        latest = self._metrics.latest
        rollout, critic = latest.get("rollout", {}), latest.get("critic", {})
        waiting = {"orchestrator": self._phase}
        if self._routing is not None and self._routing.waiting_for:
            waiting["router"] = self._routing.waiting_for
        states = {}
        for name, client in self._clients.items():
            if client.last is not None:
                waiting[name] = client.last.waiting_for
                states[name] = client.last.state
        return {
            "state": "running",
            "step": rollout.get("step", -1) + 1,
            "max_steps": self._max_steps,
            "phase": self._phase,
            "turn": self._turns.snapshot(),
            "phase_s": round(time.monotonic() - self._phase_since, 1),
            "reward_mean": rollout.get("reward/mean"),
            "explained_variance": critic.get("value/explained_variance"),
            "staleness": rollout.get("rollout/staleness"),
            "engine_version": self._publisher.version,
            "routing": self._routing.snapshot() if self._routing is not None else None,
            "critic_lag": self._critic_grids.lag if self._critic_grids is not None else None,
            "in_flight": self._producer.num_in_flight,
            "ready": self._producer.num_ready,
            "record_bytes": self._recorder.num_bytes if self._recorder is not None else None,
            "waiting_for": waiting,
            "states": states,
            "tokens_per_s": {name: round(rate, 1) for name, rate in self._rates.items()},
            "alarms": self._alarms[-ALARMS_SHOWN:],
            "recent_rewards": self._metrics.rewards[-200:],
        }
