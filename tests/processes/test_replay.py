"""Nothing is lost: a replay that was ended on the way and resumed equals one that was not, bit for bit.

Notable:
- One run is recorded; replays of it are another algorithm each. All six are in `scripts/soak_replay.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.commits import Commits
from tests.replays import (
    CONFIG,
    SETTINGS,
    differences,
    kill_launcher_after_commit,
    random_state_differences,
    rows_of,
    run_replay,
)
from tests.runs import ROOT, Finished, processes_of, run_cli


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = run_cli(tmp_path_factory.mktemp("recorded") / "run", str(ROOT / CONFIG))
    assert run.code == 0, run.output[-3000:]
    return run


def test_a_run_says_where_its_record_is_and_how_large(recorded: Finished) -> None:
    assert "counterpoint replay" in recorded.output and "MiB" in recorded.output
    assert len(list((recorded.dir / "rollouts").glob("step_*.bin"))) == 6


def test_sao_whose_orchestrator_dies_within_a_commit_and_resumes_equals_sao_that_does_not(
    recorded: Finished, tmp_path: Path
) -> None:
    """Scenario: SIGKILL to the orchestrator when the parts of step 4 are written and the commit is not. Result: the
    resumed replay begins at step 2, and in the end nobody can tell. Nothing was written to the recorded run."""
    before = {path: path.stat().st_mtime_ns for path in recorded.dir.rglob("*")}
    whole = run_replay(recorded.dir, tmp_path / "whole", *SETTINGS["sao"])
    assert whole.code == 0, whole.output[-3000:]
    died = run_replay(recorded.dir, tmp_path / "run", *SETTINGS["sao"], fault="commit:before-marker@2:kill")
    assert died.code not in (0, 64, 78) and "orchestrator" in died.output
    assert Commits(died.dir / "checkpoints").steps() == [2] and ("rollout", 3) in rows_of(died.dir)
    resumed = run_replay(recorded.dir, tmp_path / "run", *SETTINGS["sao"], "--resume")
    assert resumed.code == 0, resumed.output[-3000:]
    assert list(differences(whole.dir, resumed.dir, step=6)) == []
    assert list(random_state_differences(resumed.dir, 2, 6)) == []
    assert Commits(resumed.dir / "checkpoints").load(6).epoch == 2
    assert not processes_of(resumed.dir) and not list((resumed.dir / "checkpoints").glob(".*"))
    assert {path: path.stat().st_mtime_ns for path in recorded.dir.rglob("*")} == before


def test_grpo_on_the_same_record_whose_launcher_is_killed_and_resumes_equals_grpo_that_is_not(
    recorded: Finished, tmp_path: Path
) -> None:
    """Scenario: SIGKILL to the launcher soon after the commit of step 2. Result: as above, without a value service."""
    whole = run_replay(recorded.dir, tmp_path / "whole", *SETTINGS["grpo"])
    assert whole.code == 0, whole.output[-3000:]
    assert not list((whole.dir / "logs").glob("value*")) and not list((whole.dir / "logs").glob("inference*"))
    kill_launcher_after_commit(recorded.dir, tmp_path / "run", 2, *SETTINGS["grpo"])
    assert Commits(tmp_path / "run" / "checkpoints").steps()[0] in (2, 4)
    resumed = run_replay(recorded.dir, tmp_path / "run", *SETTINGS["grpo"], "--resume")
    assert resumed.code == 0, resumed.output[-3000:]
    assert list(differences(whole.dir, resumed.dir, step=6)) == []
