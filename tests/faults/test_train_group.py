"""Faults within a train group, on two real ranks of the critic: every rank ends in time and says what was wrong.

Notable:
- Every test starts one torchrun group of the tiny model, so there are as few as there can be. Grids at odds with each
  other are also told in `tests/processes/cases/grids_at_odds.py`, many in one group.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.config.context import RunContext
from services.launch.models import ModelSource
from services.launch.planner import Plan, plan
from services.launch.rundir import create_run_dir
from services.launch.supervisor import Signals, Supervisor
from tests.faults.broken_sender import BrokenSender
from tests.faults.train_groups import (
    DEADLINE_S,
    ENDLESS,
    MARGIN_S,
    Group,
    config_of,
    critic_group,
    grid,
    is_gone,
    record_of,
    send,
)
from tests.processes.fleets import Said
from tests.runs import post, processes_of, read_lines, wait_until

ROW = [7, 3, 250, 11, 90, 4, 4, 18]
"""Token ids of a fixed branch."""


def scores(group: Group) -> list[float]:
    """All values of the fixed branch; equal bit for bit while the weights are."""
    code, reply = post(f"{group.context.value_url}/v1/score", {"token_ids": ROW})
    assert code == 200, reply
    return [*reply["values"], reply["bootstrap_value"]]


def test_a_starved_rank_ends_all_ranks_by_name(tmp_path: Path, tiny_model: Path) -> None:
    """Scenario: a broken sender gives data rank 0 its item and forgets data rank 1."""
    with critic_group(tmp_path / "run", tiny_model) as group:
        assert group.context.critic_grid_url is not None
        with BrokenSender(group.context.critic_grid_url) as sender:
            sender.deliver("critic", {0: grid()[0]}, deadline_s=20)
            began = time.time()
            records = [record_of(tmp_path / "run", rank, within_s=DEADLINE_S + 2 * MARGIN_S) for rank in (0, 1)]
        blame = group.blamed(within_s=MARGIN_S)
        log = group.log()
    for record in records:
        assert record.cause == "PreflightError: step 0: rank(s) [1] received no grid item in time"
        assert record.exit_code == 70 and not record.secondary
        assert record.time_s - began < DEADLINE_S + MARGIN_S
    assert blame.name in ("value-0", "value-1") and blame.exit_code == 70 and "rank(s) [1]" in blame.cause
    assert re.search(r"exitcode\s*: 70", log), "the process itself ends with the code that its record tells"


def test_a_killed_rank_ends_an_idle_group(tmp_path: Path, tiny_model: Path) -> None:
    """Scenario: no grid, no request, and rank 1 dies. The survivor notices with its next heartbeat."""
    with critic_group(tmp_path / "run", tiny_model) as group:
        killed_at = time.time()
        os.kill(group.pids[1], signal.SIGKILL)
        record = record_of(tmp_path / "run", 0, within_s=DEADLINE_S + MARGIN_S)
        blame = group.blamed(within_s=2 * MARGIN_S)
        assert all(is_gone(pid) for pid in group.pids)
    assert record.cause.startswith("PeerLost: rank 0 lost its peers in a command broadcast (deadline 4 s): ")
    assert record.exit_code == 69 and record.secondary
    assert record.time_s - killed_at < DEADLINE_S + MARGIN_S
    assert (blame.name, blame.cause, blame.exit_code) == ("value-1", "killed by SIGKILL", 69)


def test_a_rank_killed_in_the_middle_of_a_step_ends_the_group_and_names_the_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    with critic_group(tmp_path / "run", tiny_model, ENDLESS) as group:
        group.begin_step()
        killed_at = time.time()
        os.kill(group.pids[1], signal.SIGKILL)
        record = record_of(tmp_path / "run", 0, within_s=DEADLINE_S + MARGIN_S)
        blame = group.blamed(within_s=2 * MARGIN_S)
        assert all(is_gone(pid) for pid in group.pids)
    assert re.match(r"PeerLost: rank 0 lost its peers in (an?|the) [a-z ]+ of step 0 \(deadline 4 s\): ", record.cause)
    assert record.exit_code == 69 and record.secondary
    assert record.time_s - killed_at < DEADLINE_S + MARGIN_S
    assert (blame.name, blame.cause, blame.exit_code) == ("value-1", "killed by SIGKILL", 69)


def test_a_rank_frozen_in_the_middle_of_a_step_is_missed_by_the_deadline_and_killed(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Scenario: SIGSTOP for rank 1 while it trains, under the real launcher.

    Result: rank 0 says which collective and who stands still; the launcher ends with 69, and the frozen one is gone
    before anybody can wake it.
    """
    run_dir = tmp_path / "run"
    config = config_of(run_dir, tiny_model, ENDLESS)
    create_run_dir(run_dir, config, overwrite=False)
    contexts: queue.Queue[RunContext] = queue.Queue()
    frozen: dict[str, float] = {}

    def freeze() -> None:
        group = Group.when_ready(contexts.get())
        group.begin_step()
        frozen.update(pid=group.pids[1], at_s=time.time())
        os.kill(group.pids[1], signal.SIGSTOP)

    hand = threading.Thread(target=freeze, daemon=True)
    hand.start()
    view = Said(on_begin=lambda layout: contexts.put(layout.context))
    signals = Signals()
    try:
        code = Supervisor(config, run_dir, ModelSource(tiny_model), view, signals, lay_out=only_the_critic).run()
    finally:
        signals.close()
    ended_at_s = time.time()
    assert frozen, "the run ended before anybody was frozen"
    record = record_of(run_dir, 0, within_s=1)
    assert re.match(r"PeerLost: rank 0 lost its peers in (an?|the) [a-z ]+ of step 0 \(deadline 4 s\): ", record.cause)
    assert f"rank 1 (pid {frozen['pid']}) is stopped" in record.cause
    assert record.time_s - frozen["at_s"] < DEADLINE_S + MARGIN_S
    assert code == 69 and f"value-0 failed first (exit code 69): {record.cause}" in view.lines[-1]
    assert ended_at_s - record.time_s < config.runtime.shutdown_grace_s + MARGIN_S
    assert [event["killed"] for event in read_lines(run_dir / "events.jsonl") if event["event"] == "stopped"] == [
        ["value"]
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int(frozen["pid"]), signal.SIGCONT)
    assert not processes_of(run_dir)


def test_the_third_non_finite_update_in_a_row_ends_the_run_and_the_weights_stay(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Scenario: in three grids in a row one target of 3e38, a finite f32, makes the squared error of one rank infinite.

    Result: after the first two the critic's values are the same bit for bit, and the third
    ends the group, naming rank, micro-batch and sample.
    """
    with critic_group(tmp_path / "run", tiny_model) as group:
        before = scores(group)
        for step in (0, 1):
            send(group.context, grid(step, extreme=3e38))
            wait_until(lambda n=step + 1: group.status()["steps_done"] == n, deadline_s=30, what="the step")
            row = group.status()["rows"][str(step)]
            assert row["value/nonfinite"] == 1 and row["value/updates"] == 0
            assert None not in (row.get("value/loss", 0.0), row.get("value/grad_norm", 0.0)), "null is not a number"
            assert scores(group) == before
        assert np.abs(before).max() > 0.05, "a head that says something"
        send(group.context, grid(2, extreme=3e38))
        records = [record_of(tmp_path / "run", rank, within_s=DEADLINE_S + 2 * MARGIN_S) for rank in (0, 1)]
        blame = group.blamed(within_s=2 * MARGIN_S)
        log = group.log()
    data_rank, number = place_of_extreme()
    for record in records:
        assert record.exit_code == 70 and not record.secondary
        assert record.cause.startswith("NonFiniteError: 3 updates in a row had a non-finite loss or gradient")
        assert (
            f"rank {data_rank}: loss is inf at micro-batch 0 (step 2: sample {number} of 11 tokens, returns up to 3e+38"
            in record.cause
        )
        assert f"rank {1 - data_rank}: loss" not in record.cause
    assert blame.exit_code == 70 and blame.cause.startswith("NonFiniteError")
    assert log.count("is skipped") == 2, "one warning for each refused update that did not end the run"


def place_of_extreme() -> tuple[int, int]:
    """Data rank and sample number of the target of 3e38."""
    for data_rank, item in enumerate(grid(extreme=3e38)):
        ends = np.cumsum(item.arrays["lengths"])
        for position in np.flatnonzero(item.arrays["returns"] > 1e38):
            return data_rank, int(np.searchsorted(ends, position, side="right"))
    raise AssertionError("no such target")


def only_the_critic(*args: Any, **kwargs: Any) -> Plan:
    """A plan whose orchestrator sleeps, without inference and policy."""
    layout = plan(*args, **kwargs)
    kept = {process.name: process for process in layout.processes}
    asleep = dataclasses.replace(kept["orchestrator"], argv=[sys.executable, "-c", "import time; time.sleep(600)"])
    return dataclasses.replace(layout, processes=[kept["value"], asleep])
