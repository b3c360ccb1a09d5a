"""Training from recorded rollouts: the same batches, each group scored at its turn and alone, and no engine asked."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.replay import RecordedRollouts
from services.config.schema import Config
from services.runtime.commits import Commits
from services.runtime.durable import write_atomic
from services.runtime.records import open_record, path_of
from services.wire.errors import CodecError, ContractError, UsageError
from services.wire.messages import ScoreReply
from services.wire.rollout_files import encode_file
from services.wire.rollouts import Group
from tests.groups import as_data, make_group
from tests.stand_ins import Server, Stage, staged
from tests.unit.orchestrator.test_checkpointer import committing, groups_of
from tests.unit.orchestrator.test_loop import config_of, play, steps_of, until

# ---------------------------------------------------------------------------------------------------------------------
# The source of groups by itself


class Critic:
    """A value service and what says how far it is: its values name the request's number."""

    def __init__(self) -> None:
        self.num_done = 0
        self.asked: list[list[list[int]]] = []
        self._busy = False

    async def score(self, batch: list[list[int]], *, deadline_s: float) -> ScoreReply:
        assert not self._busy, "two requests at a time"
        self._busy = True
        await asyncio.sleep(0)
        self._busy = False
        self.asked.append(batch)
        worth = float(len(self.asked))
        return ScoreReply([[worth] * len(ids) for ids in batch], [worth] * len(batch), self.num_done)

    async def wait_done(self, step: int) -> None:
        assert step < self.num_done, f"nobody finishes step {step} in this test"


def write_record(folder: Path, *batches: list[Group]) -> Path:
    folder.mkdir(exist_ok=True)
    for step, groups in enumerate(batches):
        data = encode_file(groups, run_id="demo-1", epoch=1, step=step, policy_version=step)
        write_atomic(path_of(folder, step), data)
    return folder


def recorded(order: int, critic_step: int, **more: Any) -> Group:
    return make_group(order=order, critic_step=critic_step, seed=order, name=str(order), **more)


BATCHES = [
    [recorded(1, 0), recorded(0, 0)],
    [recorded(2, 0), recorded(4, 1)],
    [recorded(3, 0), recorded(5, 2)],
]
"""Orders of scoring 0 to 3 by the first critic, of which two are of later batches."""


def rollouts_of(folder: Path, critic: Critic | None) -> RecordedRollouts:
    return RecordedRollouts(folder, critic, critic, score_deadline_s=5.0)  # pyright: ignore[reportArgumentType]


async def batch_of(rollouts: RecordedRollouts, num: int = 2) -> list[Group]:
    return [await rollouts.next_group() for _ in range(num)]


async def test_groups_come_in_batch_order_and_are_scored_in_recorded_order_by_the_critic_that_did_it_then(
    tmp_path: Path,
) -> None:
    critic = Critic()
    rollouts = rollouts_of(write_record(tmp_path / "rollouts", *BATCHES), critic)
    scored_at: list[tuple[int, int]] = []
    for step in range(3):
        critic.num_done = step
        for group in await batch_of(rollouts):
            worth = {float(sample.values[0]) for sample in group.samples if sample.values is not None}
            scored_at.append((group.order, int(worth.pop())))
            assert group.critic_step == BATCHES[step][len(scored_at) % 2 - 1].critic_step
    assert [order for order, _ in scored_at] == [1, 0, 2, 4, 3, 5]
    # the n-th request was for the group of order n - 1
    assert [request for _, request in scored_at] == [order + 1 for order, _ in scored_at]


async def test_without_a_critic_groups_come_unscored(tmp_path: Path) -> None:
    rollouts = rollouts_of(write_record(tmp_path / "rollouts", *BATCHES), None)
    groups = [*await batch_of(rollouts), *await batch_of(rollouts)]
    assert [group.order for group in groups] == [1, 0, 2, 4]
    assert all(s.values is None and s.critic_step == -1 for group in groups for s in group.samples)
    assert as_data(groups[0].traces) == as_data(BATCHES[0][0].traces)


async def test_what_was_recorded_without_a_critic_is_scored_when_its_batch_comes(tmp_path: Path) -> None:
    batches = [[recorded(2 * step, 0, scored=False), recorded(2 * step + 1, 0, scored=False)] for step in range(2)]
    critic = Critic()
    rollouts = rollouts_of(write_record(tmp_path / "rollouts", *batches), critic)
    await batch_of(rollouts)
    assert len(critic.asked) == 2
    critic.num_done = 1
    assert [group.critic_step for group in await batch_of(rollouts)] == [1, 1]


async def test_a_later_start_goes_on_with_what_was_scored_for_later_batches(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "rollouts", *BATCHES)
    critic = Critic()
    first = rollouts_of(folder, critic)
    await batch_of(first)
    critic.num_done = 1
    await first.next_group()  # a batch that is taken in part is served again
    state, pending = first.state_dict(), [*first.pending()]
    assert [group.order for group in pending] == [3, 4] and first.num_ready == 4
    taken = [recorded(2, 0)]
    second_critic = Critic()
    second_critic.num_done = 1
    second = rollouts_of(folder, second_critic)
    second.load_state_dict(state, [*taken, *pending])
    assert [group.order for group in await batch_of(second)] == [2, 4]
    assert second_critic.asked == []
    second_critic.num_done = 2
    third, fourth = await batch_of(second)
    assert third is pending[0] and fourth.critic_step == 2 and len(second_critic.asked) == 1


async def test_a_value_service_at_another_step_is_an_error(tmp_path: Path) -> None:
    critic = Critic()
    rollouts = rollouts_of(write_record(tmp_path / "rollouts", *BATCHES), critic)
    critic.num_done = 1
    with pytest.raises(ContractError, match="at critic step 1, not 0"):
        await rollouts.next_group()


async def test_a_damaged_group_is_named_and_so_is_the_end(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "rollouts", *BATCHES)
    rollouts = rollouts_of(folder, None)
    data = bytearray(path_of(folder, 1).read_bytes())
    data[-1] ^= 1
    path_of(folder, 1).write_bytes(data)
    await batch_of(rollouts, 3)
    with pytest.raises(CodecError, match=r"step_000001.bin: group 1"):
        await rollouts.next_group()
    path_of(folder, 2).unlink()
    ended = rollouts_of(folder, None)
    await batch_of(ended, 3)
    with pytest.raises(CodecError):
        await ended.next_group()
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match="ends before step 0"):
        await rollouts_of(folder, None).next_group()


# ---------------------------------------------------------------------------------------------------------------------
# Whole replays, with everything of the orchestrator real


def as_replay(config: Config) -> Config:
    run = config.run.model_copy(update={"record": False})
    return config.model_copy(update={"run": run})


async def record(config: Config, run_dir: Path, server: Server, model_dir: Path) -> Stage:
    with staged(run_dir, server, model_dir) as stage:
        await play(config, stage)
    return stage


@pytest.mark.parametrize(
    ("schedule", "lag", "critic_only_steps"), [("critic_first", 0, 0), ("critic_first", 0, 2), ("overlap", 2, 1)]
)
async def test_a_replay_trains_what_the_run_trained(
    schedule: str, lag: int, critic_only_steps: int, tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Rollouts ran ahead and were scored by older critics: the stand-in's answer says by which."""
    config = config_of(
        max_steps=4,
        schedule=schedule,
        max_critic_lag=lag,
        max_off_policy_steps=2,
        critic_only_steps=critic_only_steps,
    )
    live = await record(config, tmp_path / "run", server, model_dir)
    before = {path: path.read_bytes() for path in live.run_dir.rglob("*") if path.is_file()}
    with staged(tmp_path / "replay", server, model_dir, replay_of=live.run_dir) as stage:
        await play(as_replay(config), stage)
    assert stage.policy.started == live.policy.started and stage.critic.started == live.critic.started
    assert stage.engine.num_asked == 0 and stage.engine.version == 0
    for stream in ("rollout", "credit", "critic", "policy"):
        assert steps_of(stage.rows(stream)) == steps_of(live.rows(stream))
    behind = [[row["credit/critic_steps_behind"] for row in each.rows("credit")] for each in (stage, live)]
    assert behind[0] == behind[1]
    same = ("reward/mean_admitted", "rollout/staleness", "rollout/length", "rollout/duration_s")
    for row, other in zip(stage.rows("rollout"), live.rows("rollout"), strict=True):
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
    assert not (stage.run_dir / "rollouts").exists()
    assert {path: path.read_bytes() for path in live.run_dir.rglob("*") if path.is_file()} == before


async def test_a_replay_with_refreshed_values_asks_for_them_one_by_one(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    config = config_of(max_steps=2, schedule="critic_first")
    assert config.value is not None
    config = config.model_copy(update={"value": config.value.model_copy(update={"refresh": "refreshed"})})
    with staged(tmp_path / "run", server, model_dir) as live:
        live.critic.score_s = 0.05
        await play(config, live)
    assert live.critic.most_scoring > 1
    with staged(tmp_path / "replay", server, model_dir, replay_of=live.run_dir) as stage:
        stage.critic.score_s = 0.05
        await play(as_replay(config), stage)
    assert steps_of(stage.rows("refresh")) == [0, 1] and stage.critic.most_scoring == 1


async def test_a_replay_goes_on_from_its_commit_with_the_same_groups(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: groups of step 2 and later were scored early, the replay is ended after step 2. Result: the later start
    asks the critic for nothing that was asked before."""
    config = committing(config_of(max_steps=4, schedule="critic_first", max_off_policy_steps=2), 2)
    live = await record(config, tmp_path / "run", server, model_dir)
    with staged(tmp_path / "replay", server, model_dir, replay_of=live.run_dir) as stage:
        stage.policy.held_step = 2
        run = asyncio.create_task(play(as_replay(config), stage))
        await until(lambda: len(stage.policy.started) == 3)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
    at = {"commit_dir": Commits(stage.run_dir / "checkpoints").path(2), "first_steps": (2, 2)}
    with staged(stage.run_dir, server, model_dir, replay_of=live.run_dir, **at) as again:
        await play(as_replay(config), again)
    assert again.policy.started == again.critic.started == [2, 3]
    for stream in ("rollout", "credit", "critic", "policy"):
        assert steps_of(again.rows(stream)) == [0, 1, 2, 3]
    live_rows, rows = live.rows("credit"), again.rows("credit")
    assert [row["credit/critic_steps_behind"] for row in rows] == [
        row["credit/critic_steps_behind"] for row in live_rows
    ]


def test_a_record_holds_what_its_run_trained_once(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "rollouts", *BATCHES)
    assert groups_of(tmp_path) == [["0", "1"], ["2", "4"], ["3", "5"]]
    assert [len(step.header.groups) for step in open_record(folder)] == [2, 2, 2]
    assert np.isfinite(open_record(folder)[0].read(0).samples[0].values).all()
