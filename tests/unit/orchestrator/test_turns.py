"""Roles that share devices: one of them is awake at a time, each has what it needs when its turn comes, and runs end.

Notable:
- Everything of the orchestrator is real; the groups and the engine are stand-ins that keep one log of who sleeps, wakes
  and works.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response

from orchestrator.assemble import Orchestra
from orchestrator.turns import Role, Turns
from services.config.schema import Config
from services.wire.errors import ContractError, DependencyLost
from tests.runs import read_lines
from tests.stand_ins import Group, Server, staged
from tests.unit.orchestrator.test_checkpointer import commits, committing
from tests.unit.orchestrator.test_loop import BATCH_SIZE, config_of, play, status_of, steps_of, until
from tests.unit.orchestrator.test_requested_end import EngineThatLeaves, end, evaluating, resumed


def sharing(kind: str, *, max_off_policy_steps: int = 0, **more: Any) -> Config:
    """A configuration in which roles take turns."""
    config = config_of(schedule="critic_first", max_off_policy_steps=max_off_policy_steps, **more)
    sizes = {"sharing": kind, "num_policy_gpus": 1, "num_inference_gpus": 1, "num_value_gpus": None}
    return Config.model_validate(config.model_dump(mode="json") | {"deployment": sizes})


def check_log(log: list[str], roles: set[str]) -> None:
    """Of the roles that share nobody works asleep, and nobody wakes while another is awake."""
    awake = {"inference"} & roles
    for entry in log:
        who, what = entry.split(" ", 1)
        if who not in roles:
            continue
        if what == "wakes":
            assert not awake, f"{entry} while {awake} is awake"
            awake.add(who)
        elif what == "sleeps":
            assert awake == {who}, entry
            awake.clear()
        else:
            assert awake == {who} and "asleep" not in what, f"{entry} while {awake} is awake"


EVERYBODY = {"inference", "critic", "policy"}
CYCLE = re.compile(
    r"inference sleeps;critic wakes;(critic scores;){2}critic trains \d;critic sleeps;"
    r"policy wakes;policy trains \d;policy sleeps;inference wakes;inference takes \d;"
)


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


async def test_all_roles_take_turns_in_one_order(tmp_path: Path, server: Server, model_dir: Path) -> None:
    """Result: rollouts, the critic with one request a group, the policy, the weights: in every step, and no other."""
    config = sharing("time", max_steps=3)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        stage.policy.step_s = 0.1
        await play(config, stage)
    check_log(stage.log, EVERYBODY)
    text = "".join(f"{entry};" for entry in stage.log)
    cycles = CYCLE.findall(text)
    assert len(cycles) == 3
    assert (
        CYCLE.sub("", text) == "inference sleeps;policy wakes;policy writes;policy sleeps;critic wakes;critic writes;"
    )
    assert stage.policy.started == stage.critic.started == [0, 1, 2] and stage.engine.version == 3
    assert [row["rollout/staleness"] for row in stage.rows("rollout")] == [0, 0, 0]
    rows = stage.rows("turns")
    assert steps_of(rows) == [0, 1, 2]
    assert rows[1]["turns/policy_sleep_s"] > 0.05, "it waits for the step of the policy first"
    assert rows[1]["turns/critic_wake_bytes"] == rows[1]["turns/critic_sleep_bytes"] == 10
    assert rows[1]["turns/critic_left_bytes"] == 3
    events = [event for event in read_lines(stage.run_dir / "events.jsonl") if event["event"] == "turn"]
    assert [event["holder"] for event in events] == ["critic", "policy", "inference"] * 3 + ["policy", "critic"]
    assert [event["before"] for event in events][:3] == ["inference", "critic", "policy"]


async def test_trainers_take_turns_while_rollouts_go_on(tmp_path: Path, server: Server, model_dir: Path) -> None:
    """Scenario: engines have devices of their own; the policy is held in its step 0. Result: the next batch is rolled
    out meanwhile, and its scoring waits until the policy is done and sleeps."""
    config = sharing("time_train", max_steps=3, max_off_policy_steps=1)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        stage.policy.held_step = 0
        run = asyncio.create_task(play(config, stage))
        await until(lambda: stage.policy.started == [0] and len(stage.rows("rollout")) == 2)
        await asyncio.sleep(0.2)
        status = await status_of(stage)
        assert status["turn"] == {"holder": "policy", "held_s": status["turn"]["held_s"], "asleep": ["critic"]}
        assert status["phase"] == "policy to sleep"
        assert stage.log.count("critic scores") == BATCH_SIZE
        stage.policy.release.set()
        await run
    check_log(stage.log, {"critic", "policy"})
    assert stage.log.count("critic scores") == 3 * BATCH_SIZE
    assert not any(entry.startswith(("inference sleeps", "inference wakes")) for entry in stage.log)


async def test_without_a_critic_the_policy_and_the_engines_take_turns(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = sharing("time", max_steps=2, group_size=2).model_copy(update={"value": None})
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        stage.context = stage.context.model_copy(update={"value_url": None, "critic_grid_url": None})
        await play(Config.model_validate(config.model_dump(mode="json") | {"algorithm": {"type": "grpo"}}), stage)
    check_log(stage.log, EVERYBODY)
    assert stage.policy.started == [0, 1] and stage.engine.version == 2 and "critic wakes" not in stage.log


async def test_rollouts_that_run_ahead_end_before_the_engines_sleep(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: the version may be one step behind, so more is under way than a batch takes. Result: all of it ends
    first, is kept for the next batch, and nothing new starts before the engines are awake again."""
    config = sharing("time", max_steps=4, max_off_policy_steps=1)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        stage.engine.turn_s = 0.05
        await play(config, stage)
    check_log(stage.log, EVERYBODY)
    assert max(row["rollout/staleness"] for row in stage.rows("rollout")) == 1
    assert stage.policy.started == [0, 1, 2, 3]


async def test_critic_only_steps_leave_the_policy_asleep(tmp_path: Path, server: Server, model_dir: Path) -> None:
    config = sharing("time", max_steps=3, critic_only_steps=2)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        await play(config, stage)
    check_log(stage.log, EVERYBODY)
    assert stage.critic.started == [0, 1, 2] and stage.policy.started == [0]
    assert stage.log.index("critic trains 2") < stage.log.index("policy wakes")


async def test_evaluations_and_refreshed_values_come_in_somebodys_turn(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = evaluating(sharing("time", max_steps=4))
    value = config.value
    assert value is not None
    config = config.model_copy(update={"value": value.model_copy(update={"refresh": "refreshed"})})
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        await play(config, stage)
    check_log(stage.log, EVERYBODY)
    assert steps_of(stage.rows("eval")) == [0, 2, 4]
    assert [row["eval/version"] for row in stage.rows("eval")] == [0, 2, 4]
    assert stage.log.count("critic scores") == 2 * 4 * BATCH_SIZE


async def test_a_replay_scores_in_the_critics_turn(tmp_path: Path, server: Server, model_dir: Path) -> None:
    """Scenario: a run that shares nothing, whose rollouts ran ahead, is replayed by roles that take turns."""
    recorded = config_of(max_steps=3, schedule="critic_first")
    with staged(tmp_path / "run", server, model_dir) as stage:
        await play(recorded, stage)
    with staged(tmp_path / "again", server, model_dir, replay_of=stage.run_dir, shares=True) as again:
        await play(sharing("time", max_steps=3, max_off_policy_steps=1), again)
    check_log(again.log, {"critic", "policy"})
    assert again.policy.started == again.critic.started == [0, 1, 2]
    assert not any(entry.startswith("inference") for entry in again.log)
    old, new = stage.rows("credit"), again.rows("credit")
    assert [row["credit/advantage_abs_mean"] for row in old] == [row["credit/advantage_abs_mean"] for row in new]


# ---------------------------------------------------------------------------------------------------------------------
# Commits and ends


@pytest.mark.parametrize("kind", ["time", "time_train"])
async def test_groups_write_their_parts_of_a_commit_in_turn(
    tmp_path: Path, server: Server, model_dir: Path, kind: str
) -> None:
    config = committing(sharing(kind, max_steps=4), 2)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        await play(config, stage)
        assert commits(stage).steps() == [4, 2] or commits(stage).steps() == [2, 4]
    check_log(stage.log, EVERYBODY if kind == "time" else {"critic", "policy"})
    assert stage.log.count("critic writes") == stage.log.count("policy writes") == 2
    with staged(stage.run_dir, server, model_dir, shares=True, **resumed(stage, 2)) as again:
        await play(config, again)
    check_log(again.log, EVERYBODY if kind == "time" else {"critic", "policy"})
    assert again.policy.started == again.critic.started == [2, 3]
    assert [row["policy/version"] for row in again.rows("policy")] == [1, 2, 3, 4]


async def test_a_run_that_is_to_end_cuts_its_rollouts_and_commits(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: asked to end while a rollout hangs that the batch waits for."""
    config = committing(sharing("time", max_steps=3), 0)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        stage.engine.holds = lambda _: len(stage.policy.started) == 1
        async with Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.engine.num_held == BATCH_SIZE)
                await end(orchestra, run)
        assert orchestra.is_preempted and commits(stage).steps() == [1]
    check_log(stage.log, EVERYBODY)
    with staged(stage.run_dir, server, model_dir, shares=True, **resumed(stage, 1)) as again:
        await play(config, again)
    assert again.policy.started == [1, 2] and again.engine.version == 3


async def test_a_run_that_is_to_end_does_without_engines_that_are_gone(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: all processes are told to end while the policy trains, and the engines leave at once."""
    config = committing(sharing("time", max_steps=3), 0)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        stage.engine = engine = EngineThatLeaves(log=stage.log)
        stage.policy.held_step = 1
        async with Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.policy.started == [0, 1] and engine.version == 1)
                engine.is_gone = True
                stage.policy.release.set()
                await end(orchestra, run)
        assert orchestra.is_preempted and commits(stage).steps() == [2]


@dataclass
class WakesOtherwise(Group):
    """Its memory does not come back: the group ends."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/wake_up")
        async def wake_up() -> Response:
            return Response('{"error": "critic woke with other numbers"}', status_code=500)

        app.mount("/", super().app())
        return app


async def test_a_role_that_does_not_wake_ends_the_run(tmp_path: Path, server: Server, model_dir: Path) -> None:
    config = sharing("time", max_steps=3)
    with staged(tmp_path / "run", server, model_dir, shares=True) as stage:
        critic = stage.critic
        stage.critic = WakesOtherwise("critic", critic.grid_url, 1, critic.weights_dir, shares=True, log=stage.log)
        with pytest.RaisesGroup(pytest.RaisesExc(DependencyLost, match="wake_up"), flatten_subgroups=True):
            await play(config, stage)
    assert stage.critic.started == stage.policy.started == []


# ---------------------------------------------------------------------------------------------------------------------
# The keeper alone


class Counting:
    """Counts its changes, and fails one if told to."""

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.fails = ""

    async def _change(self, word: str) -> dict[str, int]:
        self.changes.append(word)
        await asyncio.sleep(0)
        if word == self.fails:
            raise ContractError(f"cannot {word}")
        return {word: 7}

    async def sleep(self) -> dict[str, int]:
        return await self._change("sleep")

    async def wake_up(self) -> dict[str, int]:
        return await self._change("wake")


async def test_taking_a_turn_one_has_changes_nothing_and_who_shares_nothing_needs_none(tmp_path: Path) -> None:
    sleepers: dict[Role, Counting] = {"critic": Counting(), "policy": Counting()}
    waits: list[str] = []
    turns = Turns(sleepers, holder=None, run_dir=tmp_path, on_wait=waits.append)
    for role in ("critic", "critic", "inference", "policy", "inference"):
        await turns.take(role)
    assert sleepers["critic"].changes == ["wake", "sleep"] and sleepers["policy"].changes == ["wake"]
    assert waits == ["critic to wake", "critic to sleep", "policy to wake"]
    row = turns.take_row()
    assert {name: row[name] for name in row if name.endswith("_bytes")} == {
        "turns/critic_wake_bytes": 7.0,
        "turns/critic_sleep_bytes": 7.0,
        "turns/policy_wake_bytes": 7.0,
    }
    assert turns.take_row() == {}
    nobody = Turns({}, holder=None, run_dir=tmp_path, on_wait=waits.append)
    await nobody.take("policy")
    assert nobody.snapshot() is None and nobody.take_row() == {} and not nobody.includes("policy")


async def test_who_cannot_sleep_keeps_everybody_else_asleep(tmp_path: Path) -> None:
    sleepers: dict[Role, Counting] = {"critic": Counting(), "policy": Counting()}
    turns = Turns(sleepers, holder="critic", run_dir=tmp_path, on_wait=lambda _: None)
    sleepers["critic"].fails = "sleep"
    with pytest.raises(ContractError, match="cannot sleep"):
        await turns.take("policy")
    assert sleepers["policy"].changes == [] and turns.holder == "critic"
