"""What must hold of a run that was killed or told to end, and of the next start in its directory.

Notable:
- Every check is a generator of problems: none is good.
- The next start is `--resume`, or where nothing had been committed its refusal and `--overwrite`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soak_book import read_lines
from soak_phases import MAX_STEPS, NUM_RANKS, UPDATES_PER_BATCH, Run, left_of, taken_ports

from services.config.system import RuntimeConfig
from services.runtime.commits import Commits
from services.wire.errors import EXIT_CONFIG, EXIT_DONE, CounterpointError

GRACE_S: float = RuntimeConfig().shutdown_grace_s
MARGIN_S = 5.0
"""For interpreters to end on a loaded machine."""
REFUSAL_DEADLINE_S = 60.0
_RUN_DEADLINE_S = 240.0
STREAMS = ("rollout", "credit", "critic", "policy")


def wait_until_gone(run: Run, context: dict[str, Any], at: float, bound_s: float) -> tuple[float, list[str]]:
    """Stay until nothing of a run is left; seconds since `at`, and what does not hold.

    Args:
        run: Its launcher may still live.
        context: Its `run.json`.
        at: When it was killed or told to end, on the monotonic clock.
        bound_s: It must be gone by then.
    """
    last = at + bound_s + REFUSAL_DEADLINE_S
    code = run.ended(last - time.monotonic())
    while left_of(context["run_id"], run.dir) and time.monotonic() < last:
        time.sleep(0.05)
    gone_s = time.monotonic() - at
    problems = [] if code is not None else [f"the launcher still runs after {gone_s:.0f} s"]
    if left := left_of(context["run_id"], run.dir):
        problems.append(f"left after {gone_s:.0f} s: {left}")
    elif gone_s > bound_s:
        problems.append(f"all was gone after {gone_s:.1f} s, not {bound_s:g}")
    if ports := taken_ports(context):
        problems.append(f"ports still taken: {ports}")
    return gone_s, problems


def start_again(run_dir: Path, seed: int, resumed_at: int | None) -> tuple[str, list[str]]:
    """Go on from the newest commit, or where there is none be refused and start anew.

    Args:
        run_dir: Of the run that has ended.
        seed: The same as before.
        resumed_at: Step of its newest commit.

    Returns:
        How it went, and what does not hold.
    """
    problems = [] if resumed_at is not None else [*_refusal_problems(run_dir, seed)]
    word = "--overwrite" if resumed_at is None else "--resume"
    run, code = Run.start(run_dir, seed, word), None
    try:
        code = run.ended(_RUN_DEADLINE_S)
        if code != EXIT_DONE:
            problems.append(f"{word} ended with {code}:\n{run.output[-1500:]}")
        else:
            problems += _whole_run_problems(run, resumed_at)
    except json.JSONDecodeError as error:  # a line that was cut in two, and the next start went on from
        problems.append(f"a line of a file is no JSON: {error}: {error.doc[:200]}")
    finally:
        run.kill()
    return f"{word}, {code}", problems


def commit_problems(run_dir: Path, step: int) -> Iterator[str]:
    """The newest commit is whole, and of a step."""
    try:
        commit = Commits(run_dir / "checkpoints").newest(allow_fallback=False)
    except CounterpointError as error:
        yield f"the last commit: {error}"
        return
    if commit is None or commit.step != step:
        yield f"the last commit is of step {commit.step if commit else None}"


def _refusal_problems(run_dir: Path, seed: int) -> Iterator[str]:
    refused = Run.start(run_dir, seed, "--resume")
    code = refused.ended(REFUSAL_DEADLINE_S)
    refused.kill()
    if code != EXIT_CONFIG or "no commit to go on from" not in refused.output:
        yield f"--resume without a commit ended with {code} and said: {refused.output[-300:]}"


def _whole_run_problems(run: Run, resumed_at: int | None) -> Iterator[str]:
    context = run.context
    if left := left_of(context["run_id"], run.dir):
        yield f"left after the whole run: {left}"
    yield from _ledger_problems(run.dir, resumed_at, context["epoch"])
    yield from _row_problems(run.dir)
    unfinished = [path for path in run.dir.rglob("*") if path.suffix in (".part", ".trash", ".tmp")]
    if unfinished:
        yield f"unfinished after the whole run: {[str(path.relative_to(run.dir)) for path in unfinished]}"
    yield from commit_problems(run.dir, MAX_STEPS)


def _ledger_problems(run_dir: Path, resumed_at: int | None, epoch: int) -> Iterator[str]:
    """Every epoch trained a row of steps once a rank, and those that count are the run's, none left out."""
    if epoch != (1 if resumed_at is None else 2):
        yield f"the last start had epoch {epoch}"
    for stream, num_ranks in NUM_RANKS.items():
        entries = read_lines(run_dir / "logs" / f"ledger-{stream}.jsonl")
        trained = {e: [(x["step"], x["rank"]) for x in entries if x["epoch"] == e] for e in (1, 2)}
        if len(entries) != sum(map(len, trained.values())):
            yield f"{stream}: entries of other epochs"
        for number, first in ((1, 0), (2, resumed_at or 0)):
            steps = len(trained[number]) // num_ranks
            whole = [(first + step, rank) for step in range(steps) for rank in range(num_ranks)]
            if trained[number] != whole:
                yield f"{stream}: epoch {number} trained {trained[number]}"
        lineage = len(trained[1]) // num_ranks if resumed_at is None else resumed_at + len(trained[2]) // num_ranks
        if lineage != MAX_STEPS or (resumed_at is not None and len(trained[1]) < resumed_at * num_ranks):
            yield f"{stream}: of {MAX_STEPS} steps, epochs trained {trained}, resumed at {resumed_at}"


def _row_problems(run_dir: Path) -> Iterator[str]:
    rows = read_lines(run_dir / "metrics.jsonl")
    for stream in STREAMS:
        steps = [row["step"] for row in rows if row["stream"] == stream]
        if steps != [*range(MAX_STEPS)]:
            yield f"metrics.jsonl: {stream} has rows of steps {steps}"
    updates = [row["value/updates"] for row in rows if row["stream"] == "critic"]
    if updates != [UPDATES_PER_BATCH * (step + 1) for step in range(len(updates))]:
        yield f"metrics.jsonl: the critic's updates are {updates}"
    versions = [row["policy/version"] for row in rows if row["stream"] == "policy"]
    if versions != [step + 1 for step in range(len(versions))]:
        yield f"metrics.jsonl: the policy's versions are {versions}"
