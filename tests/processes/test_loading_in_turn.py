"""Roles that share devices, as real processes: each loads once the one before it sleeps, and the first still waits."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.launch.models import MODELS_DIR
from services.launch.partial import partial_run
from services.launch.planner import ProcessPlan
from tests.runs import ROOT, processes_of

RECIPE = ROOT / "configs" / "demo" / "time_shared.toml"


def state_of(process: ProcessPlan) -> tuple[int, bytes]:
    """What its ready URL says."""
    try:
        with urllib.request.urlopen(process.ready_url, timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_policy_critic_and_engine_load_one_after_another_and_only_the_engine_stays_awake(tmp_path: Path) -> None:
    """Scenario: all three are started at once; whoever is not ready is asked for ten times a second.
    Result: they are ready in that order, never two at a time; both trainers sleep; all end by themselves."""
    run_dir, waiting = tmp_path / "run", []
    config = resolve([RECIPE], [("run.dir", str(run_dir))]).config

    def on_wait(names: list[str]) -> None:
        if names not in waiting:
            waiting.append(list(names))

    names = ["inference", "policy", "value"]
    with partial_run(config, names, run_id="test", models_dir=ROOT / MODELS_DIR, on_wait=on_wait) as run:
        states = {process.name: state_of(process) for process in run.processes}
    assert waiting == [["inference", "policy", "value"], ["inference", "value"], ["inference"]]
    asleep = (503, b'{"state":"asleep"}')
    assert states == {"inference": (200, b""), "policy": asleep, "value": asleep}
    assert run.killed == [] and not processes_of(run_dir)


class Enough(Exception):
    """Of waiting."""


def test_processes_that_still_wait_for_others_end_as_soon_as_they_are_told_to(tmp_path: Path) -> None:
    """Scenario: critic and engine wait for a policy that nobody starts; after a second the run is told to end.
    Result: long before the grace time, after which they would be killed, nothing is left."""
    run_dir, told = tmp_path / "run", []
    config = resolve([RECIPE], [("run.dir", str(run_dir)), ("runtime.shutdown_grace_s", "60")]).config
    started = time.monotonic()

    def on_wait(names: list[str]) -> None:
        if time.monotonic() - started > 1.0:
            assert len([argv for argv in processes_of(run_dir).values() if "services.runtime.after" in argv]) >= 2
            told.append(time.monotonic())
            raise Enough

    names = ["inference", "value"]
    with (
        pytest.raises(Enough),
        partial_run(config, names, run_id="test", models_dir=ROOT / MODELS_DIR, on_wait=on_wait),
    ):
        pass
    assert time.monotonic() - told[0] < 10.0
    assert not processes_of(run_dir)
