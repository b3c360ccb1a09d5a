"""Settings of critic and algorithm as a run's rows show them, and the gate that ends a run whose engine is another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.assemble import Orchestra
from services.config.schema import Config
from services.wire.errors import AlarmRaised
from services.wire.grids import GridItem
from tests.runs import read_lines
from tests.stand_ins import Server, Stage, staged

RUN_DEADLINE_S = 20.0


def config_of(**sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "tiny:add"},
            "env": [{"type": "add", "max_turns": 1, "max_turn_tokens": 4, "max_trace_tokens": 16}],
            **sections,
        }
    )


async def play(config: Config, stage: Stage) -> None:
    async with asyncio.timeout(RUN_DEADLINE_S), Orchestra(config, stage.context) as orchestra:
        with stage.playing():
            await orchestra.play()


async def test_evpo_refreshed_values_critic_only_steps_and_mini_batches_show_in_the_rows(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: EVPO over the batch, a critic worth 0 everywhere, two critic-only steps of four, two mini-batches.
    Result: EVPO never takes the critic for its baseline; values are refreshed where the policy trains and only there;
    the policy's first row is of step 2 and makes version 1; every critic grid has two optimizer steps a pass."""
    config = config_of(
        algorithm={"type": "evpo", "scope": "batch"},
        value={"refresh": "refreshed", "mini_batches": 2, "warmup": {"critic_only_steps": 2}},
        orchestrator={"max_steps": 4, "batch_size": 4, "max_concurrent_rollouts": 4},
    )
    mini_batches: list[list[int]] = []

    def note(_: int, items: list[GridItem]) -> None:
        mini_batches.append([part.samples for part in items[0].header.mini_batches])

    with staged(tmp_path / "run", server, model_dir) as stage:
        stage.critic.before = note
        await play(config, stage)
    credit, refresh, policy = (stage.rows(stream) for stream in ("credit", "refresh", "policy"))
    assert [row["evpo/critic_fraction"] for row in credit] == [0.0] * 4
    assert [row["step"] for row in refresh] == [2, 3]
    assert all(row["credit/advantage_abs_mean_refreshed"] >= 0 and row["time/refresh_s"] > 0 for row in refresh)
    assert [(row["step"], row["policy/version"]) for row in policy] == [(2, 1), (3, 2)]
    assert [row["step"] for row in stage.rows("critic")] == [0, 1, 2, 3]
    assert mini_batches == [[2, 2]] * 4
    assert not any(
        name.startswith("alarm/") for stream in ("critic", "policy") for row in stage.rows(stream) for name in row
    )


async def test_a_run_whose_engine_disagrees_with_its_trainer_ends_after_the_first_step(
    tmp_path: Path, server: Server, model_dir: Path
) -> None:
    """Scenario: the trainer reports what sampling at temperature .6 in place of 1 looks like. Result: the run fails and
    names the causes, the row and the event are there, and `alarms = "off"` lets it pass."""
    mismatch = {
        "policy/mismatch_tokens": 8.0,
        "policy/mismatch_log_ratio": -0.034,
        "policy/mismatch_mean": 0.2,
        "policy/mismatch_max": 0.53,
    }
    for alarms in ("warn", "off"):
        config = config_of(
            algorithm={"type": "sao"},
            value={},
            orchestrator={"max_steps": 2, "batch_size": 2, "max_concurrent_rollouts": 4},
            monitor={"alarms": alarms},
        )
        with staged(tmp_path / alarms, server, model_dir) as stage:
            add_row = stage.policy.board.add_row
            stage.policy.board.add_row = lambda step, row, add=add_row: add(step, row | mismatch)
            if alarms == "off":
                await play(config, stage)
                assert len(stage.rows("policy")) == 2
                continue
            with pytest.RaisesGroup(AlarmRaised, flatten_subgroups=True) as caught:
                await play(config, stage)
            assert "temperature" in str(caught.value.exceptions[0])
            assert [row.get("alarm/logprob_mismatch") for row in stage.rows("policy")] == [1.0]
            (event,) = [e for e in read_lines(stage.run_dir / "events.jsonl") if e["event"] == "alarm"]
            assert event["name"] == "logprob_mismatch" and event["step"] == 0
