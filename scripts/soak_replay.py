"""Resume equivalence of one algorithm: on one record, 2N steps equal N steps, a kill, and N more, bit for bit.

Notable:
- One small run is recorded, once for all; then each algorithm replays it three times: whole; ended on the way; resumed.
- Every other algorithm is ended by SIGKILL to the launcher after a commit, the others by SIGKILL to the orchestrator
  within one.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from soak_book import Row
from soak_phases import ROOT

from tests.replays import (
    CONFIG,
    SETTINGS,
    differences,
    kill_launcher_after_commit,
    random_state_differences,
    rows_of,
    run_replay,
)
from tests.runs import Finished, run_cli

NUM_STEPS = 6
"""of CONFIG"""
CUT_AT = 2
"""the commit after which, or within which, the replay is ended"""
RECORDED = "recorded"


class Unfinished(Exception):
    """A run that should have gone to its end did not."""


@dataclasses.dataclass
class Replay(Row):
    """What became of an algorithm."""

    algorithm: str
    ended_by: str = ""
    resumed_after: int = 0
    """step of the commit that the resumed start went on from"""
    num_rows: int = 0
    """rows of metrics that were compared, each with every number but times"""

    @property
    def key(self) -> str:
        """The algorithm."""
        return self.algorithm

    @property
    def said(self) -> str:
        """A few words on a good one."""
        return f"equal bit for bit, {self.ended_by}"


BOOK, ROW = "replays.jsonl", Replay


def keys_in_order(_seed: int) -> list[str]:
    """All algorithms that a replay can be of."""
    return list(SETTINGS)


def prepare(folder: Path) -> None:
    """Record the run that all replay, unless it is there."""
    target = folder / RECORDED
    if not (target / "checkpoints" / f"step_{NUM_STEPS:06d}" / "COMMIT.json").is_file():
        shutil.rmtree(target, ignore_errors=True)
        _ended(run_cli(target, str(ROOT / CONFIG)), "the run to be recorded")


def run(key: str, _seed: int, folder: Path) -> Replay:
    """Whole against cut and resumed."""
    source, words, result = folder.with_name(RECORDED), SETTINGS[key], Replay(key)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cut = folder / "cut"
    try:
        whole = _ended(run_replay(source, folder / "whole", *words), "the whole replay")
        if list(SETTINGS).index(key) % 2:
            result.ended_by = "SIGKILL to the launcher after a commit"
            kill_launcher_after_commit(source, cut, CUT_AT, *words)
        else:
            result.ended_by = "SIGKILL to the orchestrator within a commit"
            died = run_replay(source, cut, *words, fault=f"commit:before-marker@{CUT_AT}:kill")
            assert died.code != 0, "the fault did not strike"
        resumed = _ended(run_replay(source, cut, *words, "--resume"), "the resumed replay")
        result.resumed_after = int(resumed.context["commit_dir"].rpartition("_")[2])
        result.problems = [*differences(whole.dir, resumed.dir, step=NUM_STEPS)]
        result.problems += random_state_differences(resumed.dir, CUT_AT, NUM_STEPS)
        result.num_rows = len(rows_of(whole.dir))
    except (AssertionError, Unfinished) as error:
        result.problems = [f"{type(error).__name__}: {error}"]
    if not result.problems:
        shutil.rmtree(folder)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The table

_INTRODUCTION = (
    "## Resume equivalence",
    "",
    f"One recorded run ({NUM_STEPS} steps, several turns, critic on two ranks, a commit every {CUT_AT}), replayed by",
    "each algorithm: whole, and cut by a SIGKILL and resumed. `equal` says that nothing differs, bit for bit, at the",
    "last step: weights, buffers, both moments and random state of every trainer, the published snapshots, baselines",
    "and cursors of the orchestrator, groups under way, the traces, and every number of every row of `metrics.jsonl`",
    "but times. How far that promise goes: the two starts had one layout, one machine and one set of packages.",
    "",
    "| algorithm | ended by | resumed after step | rows compared | result | s | where |",
    "|---|---|---|---|---|---|---|",
)


def section(rows: dict[str, Replay], letters: dict[tuple[str, str, int], str]) -> list[str]:
    """The results as Markdown."""
    done = [rows[name] for name in SETTINGS if name in rows]
    return [*_INTRODUCTION, *(_line(row, letters[row.place]) for row in done)]


def _line(row: Replay, letter: str) -> str:
    result = f"{len(row.problems)} DIFFERENCES" if row.problems else "equal"
    return (
        f"| {row.algorithm} | {row.ended_by} | {row.resumed_after} | {row.num_rows} | {result} | {row.seconds:.0f} "
        f"| {letter} |"
    )


def _ended(run: Finished, what: str) -> Finished:
    if run.code != 0:
        raise Unfinished(f"{what} ended with {run.code}:\n{run.output[-2000:]}")
    return run
