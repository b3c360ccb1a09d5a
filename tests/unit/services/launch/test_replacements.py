"""Engines behind a router, the router and its guard are started again when they are lost; nobody else is, and no
engine that takes turns on its GPUs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.launch.fleet import Fleet
from services.launch.planner import ProcessPlan
from services.launch.replacements import MAX_REPLACEMENTS, Replacements
from services.runtime.lifecycle import request_path
from tests.runs import read_lines

SLEEPS = "import time; time.sleep(600)"


def process(name: str, code: str = SLEEPS) -> ProcessPlan:
    return ProcessPlan(name, [sys.executable, "-c", code], {}, 1)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "logs").mkdir()
    fleet = Fleet(tmp_path, "run")
    yield fleet
    fleet.kill()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def kill(fleet: Fleet, name: str) -> None:
    os.kill(fleet.pids()[name], signal.SIGKILL)
    until(lambda: name in fleet.exits())


@pytest.mark.parametrize("name", ["inference-0", "inference-11", "router", "router-guard"])
def test_a_killed_part_of_routing_is_replaced_so_often_at_most(name: str, fleet: Fleet, tmp_path: Path) -> None:
    plan = process(name)
    replacements = Replacements(tmp_path, [plan], fleet.start)
    fleet.start(plan)
    pids = [fleet.pids()[name]]
    assert not replacements.look(fleet)
    for _ in range(2):
        kill(fleet, name)
        assert replacements.look(fleet)
        assert not fleet.exits()
        pids.append(fleet.pids()[name])
    assert len(set(pids)) == 3
    for _ in range(MAX_REPLACEMENTS - 2):
        kill(fleet, name)
        assert replacements.look(fleet)
    kill(fleet, name)
    assert not replacements.look(fleet) and fleet.exits() == {name: 137}
    events = read_lines(tmp_path / "events.jsonl")
    assert [(row["event"], row["process"], row["exit_code"]) for row in events] == [
        ("process_replaced", name, 137)
    ] * MAX_REPLACEMENTS


@pytest.mark.parametrize("name", ["inference", "policy", "value", "orchestrator"])
def test_no_other_process_is_replaced(name: str, fleet: Fleet, tmp_path: Path) -> None:
    plan = process(name)
    fleet.start(plan)
    kill(fleet, name)
    assert not Replacements(tmp_path, [plan], fleet.start).look(fleet)


def test_an_engine_that_takes_turns_with_trainers_is_not_replaced_and_its_router_is(
    fleet: Fleet, tmp_path: Path
) -> None:
    plans = [process("inference-0"), process("router")]
    for plan in plans:
        fleet.start(plan)
    replacements = Replacements(tmp_path, plans, fleet.start, take_turns=True)
    kill(fleet, "router")
    assert replacements.look(fleet) and not fleet.exits()
    kill(fleet, "inference-0")
    assert not replacements.look(fleet) and fleet.exits() == {"inference-0": 137}


def test_a_part_that_says_by_its_code_what_is_wrong_is_not_replaced(fleet: Fleet, tmp_path: Path) -> None:
    plans = [process(f"inference-{code}", f"raise SystemExit({code})") for code in (1, 69, 70, 78)]
    for plan in plans:
        fleet.start(plan)
    until(lambda: len(fleet.exits()) == len(plans))
    assert not Replacements(tmp_path, plans, fleet.start).look(fleet)


def test_a_part_that_was_told_to_end_is_not_replaced_and_one_that_just_left_is(fleet: Fleet, tmp_path: Path) -> None:
    told, left = process("inference-0", ""), process("router", "")
    request_path(tmp_path, "inference-0").parent.mkdir(parents=True)
    request_path(tmp_path, "inference-0").touch()
    started: list[str] = []
    for plan in (told, left):
        fleet.start(plan)
    until(lambda: len(fleet.exits()) == 2)
    assert Replacements(tmp_path, [told, left], lambda plan: started.append(plan.name)).look(fleet)
    assert started == ["router"]
