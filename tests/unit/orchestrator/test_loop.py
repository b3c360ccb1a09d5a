"""Both schedules, with everything of the orchestrator real: what is sent when, who waits for whom, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import assemble
from orchestrator.assemble import Orchestra
from orchestrator.critic_grids import CriticGrids
from services.config.schema import Config
from services.wire.errors import DeadlineExceeded
from services.wire.grids import GridItem
from tests.stand_ins import Server, Stage, staged

RUN_DEADLINE_S = 20.0
BATCH_SIZE = 2


def config_of(
    *,
    max_steps: int,
    schedule: str,
    max_critic_lag: int = 0,
    max_off_policy_steps: int = 1,
    critic_only_steps: int = 0,
    num_value_ranks: int = 1,
    **orchestrator: Any,
) -> Config:
    limits = {"max_turns": 1, "max_turn_tokens": 4, "max_trace_tokens": 16}
    return Config.model_validate(
        {
            "model": {"path": "tiny:add"},
            "algorithm": {"type": "sao"},
            "env": [{"type": "add", **limits}],
            "value": {"warmup": {"critic_only_steps": critic_only_steps}},
            "deployment": {"num_value_gpus": num_value_ranks},
            "orchestrator": {
                "max_steps": max_steps,
                "batch_size": BATCH_SIZE,
                "max_concurrent_rollouts": 2 * BATCH_SIZE,
                "max_off_policy_steps": max_off_policy_steps,
                "schedule": schedule,
                "max_critic_lag": max_critic_lag,
                **orchestrator,
            },
        }
    )


async def play(config: Config, stage: Stage) -> None:
    """The whole run of the orchestrator."""
    async with asyncio.timeout(RUN_DEADLINE_S), Orchestra(config, stage.context) as orchestra:
        with stage.playing():
            await orchestra.play()


async def until(condition: Any) -> None:
    async with asyncio.timeout(RUN_DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def status_of(stage: Stage) -> dict[str, Any]:
    """The orchestrator's own page."""
    async with aiohttp.ClientSession() as session, session.get(f"{stage.context.orchestrator_url}/status") as reply:
        return await reply.json()


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# One schedule at a time, with a critic that stands still


@pytest.mark.parametrize("max_critic_lag", [0, 1, 2])
async def test_with_overlap_the_policy_goes_on_by_exactly_the_lag_while_the_critic_stands_still(
    max_critic_lag: int, tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: the critic never ends its step 0, until it is released. Result: the policy trains steps 0 to
    `max_critic_lag` meanwhile and no further; afterwards every step of both is trained, with all rows."""
    config = config_of(max_steps=5, schedule="overlap", max_critic_lag=max_critic_lag, max_off_policy_steps=2)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.held_step = 0
        run = asyncio.create_task(play(config, stage))
        await until(lambda: len(stage.policy.started) == max_critic_lag + 1)
        while (status := await status_of(stage))["waiting_for"]["orchestrator"] != "critic step 0":
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # time enough for a grid too many
        assert stage.policy.started == list(range(max_critic_lag + 1)) and stage.critic.started == [0]
        assert status["critic_lag"] == max_critic_lag + 1
        assert steps_of(stage.rows("rollout")) == list(range(max_critic_lag + 2)) and stage.rows("critic") == []
        stage.critic.release.set()
        await run
    assert stage.policy.started == stage.critic.started == list(range(5))
    rows = stage.rows("critic")
    assert steps_of(rows) == [row["value/loss"] for row in rows] == list(range(5))
    assert [row["value/critic_lag"] for row in rows][: max_critic_lag + 1] == list(range(max_critic_lag + 1))
    assert max(row["value/critic_lag"] for row in rows) <= max_critic_lag
    assert steps_of(stage.rows("policy")) == list(range(5))


async def test_with_critic_first_the_policy_gets_nothing_before_the_critic_is_done(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: as above. Result: no policy grid of step 0."""
    config = config_of(max_steps=2, schedule="critic_first")
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.held_step = 0
        run = asyncio.create_task(play(config, stage))
        await until(lambda: stage.critic.started == [0])
        await asyncio.sleep(0.3)
        assert stage.policy.started == []
        stage.critic.release.set()
        await run
    assert stage.policy.started == stage.critic.started == [0, 1]
    assert [row["value/critic_lag"] for row in stage.rows("critic")] == [0, 0]


async def test_a_run_with_overlap_ends_with_the_critics_last_row(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: the policy's work is all done and published, the critic's last step is not. Result: the run waits."""
    config = config_of(max_steps=2, schedule="overlap", max_critic_lag=1)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.held_step = 1
        run = asyncio.create_task(play(config, stage))
        await until(lambda: stage.engine.version == 2)
        await asyncio.sleep(0.3)
        assert not run.done() and steps_of(stage.rows("critic")) == [0]
        stage.critic.release.set()
        await run
    assert steps_of(stage.rows("critic")) == [0, 1]


async def test_scoring_tells_how_far_behind_its_critic_was(tmp_path: Path, server: Server, model_dir: Path) -> None:
    """Scenario: on-policy rollouts, and a critic that ends step 0 only after every rollout. Result: step s was scored
    by a critic s steps behind, in the end one more than the lag: step 2's grid is sent by then."""
    config = config_of(max_steps=4, schedule="overlap", max_critic_lag=2, max_off_policy_steps=0)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.held_step = 0
        run = asyncio.create_task(play(config, stage))
        await until(lambda: stage.engine.version == 3 and len(stage.rows("credit")) == 4)
        stage.critic.release.set()
        await run
    assert [row["credit/critic_steps_behind"] for row in stage.rows("credit")] == [0, 1, 2, 3]


async def test_a_policy_row_has_its_numbers_although_the_snapshot_is_announced_before_them(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = config_of(max_steps=2, schedule="overlap")
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.policy.announcing_s = 0.2
        await play(config, stage)
    assert [row["policy/loss"] for row in stage.rows("policy")] == [0, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines


@pytest.mark.parametrize("schedule", ["critic_first", "overlap"])
async def test_a_critic_that_never_ends_a_step_is_named_when_the_steps_deadline_is_over(
    schedule: str, tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = config_of(max_steps=4, schedule=schedule, max_critic_lag=2, step_deadline_s=1.0)
    started_s = time.monotonic()
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.held_step = 1
        with pytest.raises(ExceptionGroup) as caught:
            await play(config, stage)
    (error,) = leaves(caught.value)
    assert isinstance(error, DeadlineExceeded) and "critic" in str(error)
    assert "critic to finish step 1" in str(error) or "acknowledge critic step 3" in str(error)
    assert time.monotonic() - started_s < 8
    assert steps_of(stage.rows("critic")) == [0]


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside of groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


@pytest.mark.parametrize("role", ["critic", "policy"])
async def test_a_steps_deadline_does_not_begin_while_the_trainer_is_busy_with_those_before(
    role: str, tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: a step takes half of the deadline or so, and several are in line. Result: nobody complains, although
    some are done later than the deadline after they were sent."""
    config = config_of(max_steps=3, schedule="overlap", max_critic_lag=2, max_off_policy_steps=2, step_deadline_s=1.4)
    with staged(tmp_path / "run", server, model_dir) as stage:
        slow = stage.critic if role == "critic" else stage.policy
        slow.step_s = 0.8
        await play(config, stage)
    if role == "critic":
        assert max(row["time/critic_s"] for row in stage.rows("critic")) > 1.4
    assert steps_of(stage.rows(role)) == [0, 1, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Whatever is fast or slow


class SeenGrids(CriticGrids):
    """The real one; notes what the critic had done, by its own account, when each of its grids was sent."""

    critic_done: Any
    seen: list[tuple[int, int]]

    def send(self, items: list[GridItem]) -> None:
        self.seen.append((items[0].header.step, self.critic_done()))
        super().send(items)


def staleness_of(items: list[GridItem]) -> int:
    """Version in training minus the oldest version among the action tokens of a policy grid."""
    versions = [
        version
        for item in items
        for _, micro_batches in item.mini_batches()
        for micro_batch in micro_batches
        for spans in micro_batch.spans
        for _, _, version in spans
    ]
    return items[0].header.policy_version - min(versions)


numbers = itertools.count()
DURATIONS_S = st.sampled_from([0.0, 0.03])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.sampled_from(["critic_first", "overlap"]),
    max_steps=st.integers(1, 4),
    max_critic_lag=st.integers(0, 2),
    max_off_policy_steps=st.integers(0, 1),
    critic_only_steps=st.integers(0, 2),
    num_value_ranks=st.integers(1, 2),
    critic_s=DURATIONS_S,
    policy_s=DURATIONS_S,
    turn_s=DURATIONS_S,
)
def test_every_run_ends_with_every_grid_sent_once_in_order_and_within_its_bounds(
    tmp_path: Path,
    server: Server,
    model_dir: Path,
    schedule: str,
    max_steps: int,
    max_critic_lag: int,
    max_off_policy_steps: int,
    critic_only_steps: int,
    num_value_ranks: int,
    critic_s: float,
    policy_s: float,
    turn_s: float,
) -> None:
    config = config_of(
        max_steps=max_steps,
        schedule=schedule,
        max_critic_lag=max_critic_lag,
        max_off_policy_steps=max_off_policy_steps,
        critic_only_steps=critic_only_steps,
        num_value_ranks=num_value_ranks,
    )
    first = min(critic_only_steps, max_steps)  # the policy's first step, as a step of the run
    lag = max_critic_lag if schedule == "overlap" else 0
    at_policy: list[tuple[int, int, int]] = []  # step of the run, steps the critic has done, staleness
    with (
        staged(tmp_path / f"run{next(numbers)}", server, model_dir, num_value_ranks=num_value_ranks) as stage,
        pytest.MonkeyPatch.context() as patch,
    ):
        stage.critic.step_s, stage.policy.step_s, stage.engine.turn_s = critic_s, policy_s, turn_s
        stage.policy.before = lambda step, items: at_policy.append(
            (critic_only_steps + step, stage.critic.board.steps_done, staleness_of(items))
        )
        seen: list[tuple[int, int]] = []
        kind = type("Seen", (SeenGrids,), {"seen": seen, "critic_done": lambda _: stage.critic.board.steps_done})
        patch.setattr(assemble, "CriticGrids", kind)
        asyncio.run(play(config, stage))

    # every grid once, in order: the receivers have also counted that nothing came twice (Stage.playing)
    assert stage.critic.started == [step for step, _ in seen] == list(range(max_steps))
    assert stage.policy.started == list(range(max_steps - first))
    # bounds, by the trainers' own accounts
    assert all(step - done <= lag for step, done in seen)
    needed = 1 if schedule == "critic_first" else -lag
    assert all(done >= step + needed for step, done, _ in at_policy)
    assert all(0 <= staleness <= max_off_policy_steps for _, _, staleness in at_policy)
    # rows, each once, with the numbers of their own steps
    critic, policy = stage.rows("critic"), stage.rows("policy")
    assert steps_of(critic) == [row["value/loss"] for row in critic] == list(range(max_steps))
    assert all(0 <= row["value/critic_lag"] <= lag for row in critic)
    assert steps_of(policy) == [row["policy/loss"] + first for row in policy] == list(range(first, max_steps))
    assert [row["policy/version"] for row in policy] == list(range(1, max_steps - first + 1))
    assert stage.engine.version == max_steps - first
    for stream in ("rollout", "credit"):
        assert steps_of(stage.rows(stream)) == list(range(max_steps))
    assert max(row["rollout/staleness_max"] for row in stage.rows("rollout")) <= max_off_policy_steps
    behind = [row["credit/critic_steps_behind"] for row in stage.rows("credit")]
    assert all(0 <= steps <= step for step, steps in enumerate(behind))
    if max_off_policy_steps == critic_only_steps == 0:  # rollouts do not run ahead
        assert max(behind) <= (lag + 1 if schedule == "overlap" else 0)
