"""Commits and starts from them, with everything of the orchestrator real: what is in one, and that nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import state
from orchestrator.assemble import Orchestra
from services.config.schema import Config
from services.runtime.commits import Commits
from services.runtime.records import open_record, recorded_steps
from services.wire.errors import CannotWrite, ContractError, DamagedCommit
from tests.runs import read_lines
from tests.stand_ins import Server, Stage, staged
from tests.unit.orchestrator.test_loop import (
    BATCH_SIZE,
    RUN_DEADLINE_S,
    config_of,
    leaves,
    play,
    status_of,
    steps_of,
    until,
)


def committing(config: Config, interval_steps: int, **checkpoint: Any) -> Config:
    section = config.checkpoint.model_copy(update={"interval_steps": interval_steps, **checkpoint})
    return config.model_copy(update={"checkpoint": section})


def commits(stage: Stage) -> Commits:
    return Commits(stage.run_dir / "checkpoints")


def groups_of(run_dir: Path) -> list[list[str]]:
    """Sorted group ids of each recorded batch."""
    return [
        sorted({trace.group_id for index in range(len(step.header.groups)) for trace in step.read(index).traces})
        for step in open_record(run_dir / "rollouts")
    ]


def traces_of(run_dir: Path) -> list[tuple[int, str, float]]:
    """Step, name and reward of each kept trace; which of a batch's two ended first is timing."""
    return sorted((row["step"], row["trace_id"], row["reward"]) for row in read_lines(run_dir / "traces.jsonl"))


async def killed(config: Config, stage: Stage, when: Any) -> None:
    """The run, ended in the middle of whatever it does."""
    run = asyncio.create_task(play(config, stage))
    await until(when)
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run


async def test_a_run_commits_at_its_interval_and_at_its_end_and_keeps_the_newest(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = committing(config_of(max_steps=5, schedule="critic_first", critic_only_steps=1), 2, keep_last=2)
    with staged(tmp_path / "run", server, model_dir) as stage:
        await play(config, stage)
    assert commits(stage).steps() == [5, 4]
    assert steps_of(stage.rows("commit")) == [2, 4, 5]
    assert all(row["checkpoint/bytes"] > 200 and row["time/checkpoint_s"] > 0 for row in stage.rows("commit"))
    events = [row for row in read_lines(stage.run_dir / "events.jsonl") if row["event"] == "committed"]
    assert [row["step"] for row in events] == [2, 4, 5]
    commit = commits(stage).load(4)
    assert set(commit.roles) == {"policy", "critic", "orchestrator"} and commit.identity["algorithm.type"] == "sao"
    snapshot = state.read(commit.folder)
    assert (snapshot.state.step, snapshot.state.version) == (4, 3)  # one step trained the critic alone
    for role, done in (("policy", 3), ("critic", 4)):  # each had done what it was sent
        assert json.loads((commit.role(role) / "state.json").read_text()) == {"steps_done": done}


async def test_without_an_interval_a_run_commits_at_its_end_alone(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    with staged(tmp_path / "run", server, model_dir) as stage:
        await play(committing(config_of(max_steps=2, schedule="critic_first"), 0), stage)
    assert commits(stage).steps() == [2]


@pytest.mark.parametrize(("schedule", "lag"), [("critic_first", 0), ("overlap", 2)])
async def test_ten_steps_train_the_same_groups_as_four_and_a_kill_and_six_more(
    schedule: str, lag: int, tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: on-policy, and the run is ended in its seventh step. Result: what ran ahead of the commit of step 4 is
    gone, every step is there once, and every batch has the groups of a run that nobody ended."""
    config = config_of(max_steps=10, schedule=schedule, max_critic_lag=lag, max_off_policy_steps=0)
    config = committing(config, 4)
    with staged(tmp_path / "whole", server, model_dir) as whole:
        await play(config, whole)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.policy.held_step = 6
        await killed(config, stage, lambda: len(stage.policy.started) == 7)
    newest = commits(stage).newest(allow_fallback=False)
    assert newest is not None and newest.step == 4
    assert len(recorded_steps(stage.run_dir / "rollouts")) > 4
    at = {"commit_dir": newest.folder, "first_steps": (4, 4)}
    with staged(stage.run_dir, server, model_dir, **at) as again:
        await play(config, again)
    assert again.policy.started == again.critic.started == [4, 5, 6, 7, 8, 9]
    for stream in ("rollout", "credit", "critic", "policy"):
        assert steps_of(again.rows(stream)) == list(range(10))
    assert [row["policy/version"] for row in again.rows("policy")] == list(range(1, 11))
    assert steps_of(again.rows("commit")) == [4, 8, 10]
    assert groups_of(again.run_dir) == groups_of(whole.run_dir)
    assert traces_of(again.run_dir) == traces_of(whole.run_dir)
    times = [row["time_s"] for row in read_lines(again.run_dir / "metrics.jsonl")]
    assert times == sorted(times)


async def test_rollouts_that_ran_ahead_train_once_and_those_in_flight_are_redone(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: when step 3 is committed, three groups are ready, and one rollout is under way that never ends. Result:
    over both starts every group number trains once, none is missing, and groups that were ready are not redone."""
    config = committing(config_of(max_steps=6, schedule="critic_first", max_off_policy_steps=2), 3)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.engine.holds = lambda number: number == 9
        stage.critic.held_step = 2

        async def release() -> None:
            while not stage.engine.num_held or (await status_of(stage))["ready"] < 3:
                await asyncio.sleep(0.01)
            stage.critic.release.set()

        releasing = asyncio.create_task(release())
        stage.policy.held_step = 3
        await killed(config, stage, lambda: commits(stage).steps() == [3])
        await releasing
    commit_dir = commits(stage).path(3)
    snapshot = state.read(commit_dir)
    kept = {group.order for group in snapshot.pending}
    assert len(kept) >= 3 and len(snapshot.state.source["under_way"]) >= 1
    assert snapshot.state.source["tasks"]["position"] >= 3 * BATCH_SIZE + 4
    with staged(stage.run_dir, server, model_dir, commit_dir=commit_dir, first_steps=(3, 3)) as again:
        await play(config, again)
    trained = [group for batch in groups_of(again.run_dir) for group in batch]
    assert sorted(trained, key=int) == [str(number) for number in range(6 * BATCH_SIZE)]
    after = [step.header.groups[index] for step in open_record(again.run_dir / "rollouts")[3:] for index in range(2)]
    assert {entry.order for entry in after} >= kept
    assert len({entry.order for entry in after}) == len(after)


async def test_a_start_from_a_commit_brings_its_version_to_the_engines_first_and_evaluates_nothing_twice(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    evaluation = {"type": "add", "max_turns": 1, "max_turn_tokens": 4, "max_trace_tokens": 16, "num_tasks": 1}
    data = committing(config_of(max_steps=4, schedule="critic_first"), 2).model_dump(mode="json") | {
        "eval": [evaluation | {"interval_steps": 2}]
    }
    config = Config.model_validate(data)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.policy.held_step = 2
        await killed(config, stage, lambda: len(stage.policy.started) == 3)
    at = {"commit_dir": commits(stage).path(2), "first_steps": (2, 2)}
    with staged(stage.run_dir, server, model_dir, **at) as again:
        await play(config, again)
    assert [(row["step"], row["eval/version"]) for row in again.rows("eval")][0::2] == [(0, 0), (4, 4)]
    assert steps_of(again.rows("eval")) == [0, 2, 4]
    record = open_record(again.run_dir / "rollouts")
    oldest = {trace.oldest_version for index in range(2) for trace in record[3].read(index).traces}
    assert oldest <= {2, 3}  # never the version that the engine had when it came up


async def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, server: Server, model_dir: Path) -> None:
    config = committing(config_of(max_steps=2, schedule="critic_first"), 2)
    with staged(tmp_path / "run", server, model_dir) as stage:
        await play(config, stage)
    before = (stage.run_dir / "metrics.jsonl").read_bytes()
    at = {"commit_dir": commits(stage).path(2), "first_steps": (2, 2)}
    with staged(stage.run_dir, server, model_dir, **at) as again:
        await play(config, again)
    assert again.policy.started == [] and (stage.run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("first_steps", [(1, 2), (2, 3)])
async def test_a_trainer_that_is_not_where_the_commit_says_ends_the_start(
    first_steps: tuple[int, int], tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = committing(config_of(max_steps=3, schedule="critic_first"), 2)
    with staged(tmp_path / "run", server, model_dir) as stage:
        await play(config, stage)
    at = {"commit_dir": commits(stage).path(2), "first_steps": first_steps}
    with (
        staged(stage.run_dir, server, model_dir, **at) as again,
        pytest.raises(ContractError, match=r"has done . steps, the commit 2"),
    ):
        await play(config, again)


# ---------------------------------------------------------------------------------------------------------------------
# On request


async def test_a_request_is_met_in_the_middle_of_a_batch_and_what_was_taken_trains_later(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: one of two rollouts of step 1 has ended, the other never will. Result: the run commits step 1 with the
    finished group, ends, and is resumable; a later start trains both, each once."""
    config = committing(config_of(max_steps=3, schedule="critic_first", max_off_policy_steps=0), 0)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.engine.holds = lambda number: number == 2 * BATCH_SIZE - 1  # the last rollout of step 1
        async with asyncio.timeout(RUN_DEADLINE_S), Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.engine.version == 1 and stage.engine.num_held == 1)
                await until(lambda: len(orchestra._loop.taken) == 1)
                orchestra.request_commit()
                await run
        assert orchestra.is_preempted
    snapshot = state.read(commits(stage).path(1))
    assert len(snapshot.pending) == 1 and len(snapshot.state.source["under_way"]) == 1
    at = {"commit_dir": commits(stage).path(1), "first_steps": (1, 1)}
    with staged(stage.run_dir, server, model_dir, **at) as again:
        await play(config, again)
    assert groups_of(again.run_dir) == [["0", "1"], ["2", "3"], ["4", "5"]]


async def test_a_request_that_comes_in_a_step_is_met_after_it(tmp_path: Path, server: Server, model_dir: Path) -> None:
    config = committing(config_of(max_steps=3, schedule="critic_first"), 0)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.held_step = 1
        async with asyncio.timeout(RUN_DEADLINE_S), Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.critic.started == [0, 1])
                orchestra.request_commit()
                stage.critic.release.set()
                await run
    assert orchestra.is_preempted and commits(stage).steps() == [2]
    assert stage.policy.started == stage.critic.started == [0, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Where a part cannot be written


async def test_one_role_with_a_full_disk_voids_the_commit_and_the_next_one_is_made(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = committing(config_of(max_steps=3, schedule="critic_first"), 1)
    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.disk_is_full = True

        def free(step: int, _: Any) -> None:
            stage.critic.disk_is_full = step == 0

        stage.critic.before = free
        await play(config, stage)
    assert commits(stage).steps() == [3, 2]
    failed = [row for row in read_lines(stage.run_dir / "events.jsonl") if row["event"] == "commit_failed"]
    assert [row["step"] for row in failed] == [1] and "507" in failed[0]["cause"]
    assert not list((stage.run_dir / "checkpoints").glob(".step_*"))


async def test_the_second_failure_in_a_row_ends_the_run_and_the_older_commit_stays(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = committing(config_of(max_steps=4, schedule="critic_first"), 1)
    with staged(tmp_path / "run", server, model_dir) as stage:

        def fill(step: int, _: Any) -> None:
            stage.policy.disk_is_full = step >= 1

        stage.policy.before = fill
        with pytest.raises(ExceptionGroup) as caught:
            await play(config, stage)
    (error,) = leaves(caught.value)
    assert isinstance(error, CannotWrite) and error.exit_code == 73 and "two commits in a row" in str(error)
    newest = commits(stage).newest(allow_fallback=False)
    assert newest is not None and newest.step == 1
    assert not list((stage.run_dir / "checkpoints").glob(".step_*"))


async def test_a_flipped_byte_of_the_orchestrators_part_is_refused_by_name(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = committing(config_of(max_steps=1, schedule="critic_first"), 0)
    with staged(tmp_path / "run", server, model_dir) as stage:
        await play(config, stage)
    for name in ("state.json", "pending.bin"):
        path = commits(stage).path(1) / "orchestrator" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedCommit, match=name):
            state.read(commits(stage).path(1))
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert state.read(commits(stage).path(1)).state.step == 1


# ---------------------------------------------------------------------------------------------------------------------
# Ended at any moment


numbers = itertools.count()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.sampled_from(["critic_first", "overlap"]),
    max_off_policy_steps=st.integers(0, 2),
    critic_only_steps=st.integers(0, 2),
    interval_steps=st.integers(1, 3),
    ends_after=st.integers(0, 14),
    polite=st.booleans(),
    turn_s=st.sampled_from([0.0, 0.02]),
)
def test_wherever_a_run_ends_every_group_trains_once_and_every_step_is_there_once(
    tmp_path: Path,
    server: Server,
    model_dir: Path,
    schedule: str,
    max_off_policy_steps: int,
    critic_only_steps: int,
    interval_steps: int,
    ends_after: int,
    polite: bool,
    turn_s: float,
) -> None:
    """Scenario: after so many requests to the engine the run is ended, or asked to end. Result: with a start from its
    newest commit (anew where there is none) no group is lost, none is trained twice, and no row is missing or twice."""
    config = config_of(
        max_steps=6,
        schedule=schedule,
        max_critic_lag=1,
        max_off_policy_steps=max_off_policy_steps,
        critic_only_steps=critic_only_steps,
    )
    config = committing(config, interval_steps)
    run_dir = tmp_path / f"run{next(numbers)}"

    async def first(stage: Stage) -> None:
        async with asyncio.timeout(RUN_DEADLINE_S), Orchestra(config, stage.context) as orchestra:
            with stage.playing():
                run = asyncio.create_task(orchestra.play())
                await until(lambda: stage.engine.num_asked >= ends_after or run.done())
                if polite:
                    orchestra.request_commit()
                else:
                    run.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await run

    with staged(run_dir, server, model_dir) as stage:
        stage.engine.turn_s = turn_s
        asyncio.run(first(stage))
    newest = commits(stage).newest(allow_fallback=False)
    assert newest is not None or not polite
    if newest is None:
        run_dir = tmp_path / f"run{next(numbers)}"
    done = 0 if newest is None else newest.step
    at = {
        "commit_dir": None if newest is None else newest.folder,
        "first_steps": (max(0, done - critic_only_steps), done),
    }
    with staged(run_dir, server, model_dir, **at) as again:
        asyncio.run(play(config, again))
    assert again.critic.started == list(range(done, 6))
    for stream in ("rollout", "credit", "critic"):
        assert sorted(steps_of(again.rows(stream))) == list(range(6))
    assert steps_of(again.rows("policy")) == list(range(critic_only_steps, 6))
    assert steps_of(again.rows("commit"))[-1] == 6
    trained = [int(group) for batch in groups_of(run_dir) for group in batch]
    assert len(trained) == len(set(trained)) == 6 * BATCH_SIZE
    dropped = sum(row.get("rollout/dropped/stale", 0) for row in again.rows("rollout"))
    assert max(trained) < 6 * BATCH_SIZE + dropped
    assert all(row["rollout/staleness_max"] <= max_off_policy_steps for row in again.rows("rollout"))
