"""The kill -9 matrix: every process killed in every phase of a real run, and what a user then finds.

    python scripts/soak.py [--only PROCESS/PHASE] [--minutes N] [--seed S] [--dir DIR] [--out FILE]

Notable:
- A cell is a run of the demo made small, one SIGKILL, and the next start: `--resume`, or where nothing had been
  committed its refusal and `--overwrite`. Less than a minute each on two cores; 72 of them.
- What must hold: all is gone in time; the launcher names the killed process and ends with 69; no process, port or
  unfinished file is left; the next start goes to the last step; every step trained once a rank; each row once.
- Cells come in diagonals, so that a short soak has met every process and every phase. Results are kept in DIR: the next
  soak runs the cells that have none, or that failed. The page is about all of them.
- A run in which the phase was not seen is no result: it is made again, three times at most.
- Exit 0 only if no cell of this soak failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from soak_phases import (
    MAX_STEPS,
    PHASES,
    ROOT,
    UPDATES_PER_BATCH,
    VICTIMS,
    Hit,
    Missed,
    Run,
    Victim,
    kill_in,
    left_of,
    taken_ports,
)

from services.config.system import RuntimeConfig
from services.runtime.commits import Commits
from services.wire.errors import EXIT_BUG, EXIT_CONFIG, EXIT_DEPENDENCY_LOST, EXIT_DONE, CounterpointError

LAUNCHER_BOUND_S = 10.0
"""For everything to be gone after the launcher's death."""
GRACE_S: float = RuntimeConfig().shutdown_grace_s
SETTLE_S = 4.0
"""The launcher's look for the root of a failure."""
MARGIN_S = 5.0
"""For interpreters to end on a loaded machine."""
MAX_TRIES = 3
_RUN_DEADLINE_S = 240.0
_REFUSAL_DEADLINE_S = 60.0
RANKS = {"critic": 2, "policy": 1}
STREAMS = ("rollout", "credit", "critic", "policy")


@dataclasses.dataclass
class Result:
    """What became of a cell."""

    process: str
    phase: str
    seed: int
    problems: list[str]
    tries: int = 1
    step: int = 0
    """batches collected when the look-out for the phase began"""
    confirmed: bool = False
    word_age_ms: float = 0.0
    gone_s: float = 0.0
    """from the SIGKILL until nothing of the run was left"""
    code: int | None = None
    """the launcher's"""
    commits: list[int] = dataclasses.field(default_factory=list)
    """on disk after the kill"""
    went_on: str = ""
    seconds: float = 0.0
    date: str = ""

    @property
    def cell(self) -> str:
        """`PROCESS/PHASE`."""
        return f"{self.process}/{self.phase}"


# ---------------------------------------------------------------------------------------------------------------------
# One cell


def run_cell(victim: Victim, phase: str, seed: int, folder: Path) -> Result:
    """Kill, look, start again, look; a missed phase is tried again."""
    started, result = time.monotonic(), Result(victim.name, phase, seed, [])
    result.date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    for result.tries in range(1, MAX_TRIES + 1):
        dice = random.Random(f"{seed} {victim.name} {phase} {result.tries}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run = Run.start(folder / "run", seed, "--overwrite")
        try:
            hit = kill_in(run, victim, phase, dice, MAX_STEPS - 1 - result.tries)
            result.problems = [*_after_the_kill(run, victim, phase, hit, result)]
            result.problems += _next_start(run.dir, result)
            break
        except Missed as error:
            result.problems = [f"the phase was never hit: {error}"]
        finally:
            run.kill()
    result.seconds = time.monotonic() - started
    if not result.problems:
        shutil.rmtree(folder)
    return result


def _after_the_kill(run: Run, victim: Victim, phase: str, hit: Hit, result: Result) -> Iterator[str]:
    """What does not hold of the run's end."""
    is_launcher = victim.process == "launcher"
    bound_s = LAUNCHER_BOUND_S if is_launcher else GRACE_S + SETTLE_S + MARGIN_S
    context = run.context
    result.step, result.confirmed, result.word_age_ms = hit.step, hit.confirmed, hit.word_age_ms
    result.code = run.ended(bound_s + _REFUSAL_DEADLINE_S)
    while left_of(context["run_id"], run.dir) and time.monotonic() - hit.at < bound_s + _REFUSAL_DEADLINE_S:
        time.sleep(0.05)
    result.gone_s = time.monotonic() - hit.at
    if result.code is None:
        yield f"the launcher still runs after {result.gone_s:.0f} s"
    if left := left_of(context["run_id"], run.dir):
        yield f"left after {result.gone_s:.0f} s: {left}"
    elif result.gone_s > bound_s:
        yield f"all was gone after {result.gone_s:.1f} s, not {bound_s:g}"
    if ports := taken_ports(context):
        yield f"ports still taken: {ports}"
    if not is_launcher:
        last = next((line for line in reversed(run.output.splitlines()) if line.strip()), "")
        named = f"{victim.blamed} failed first (exit code {EXIT_DEPENDENCY_LOST}): killed by SIGKILL; log: "
        is_blamed = result.code == EXIT_DEPENDENCY_LOST and last.startswith(named)
        if not is_blamed and not (phase == "drain" and result.code == EXIT_DONE):
            yield f"ended with {result.code} and said: {last[:300]}"
    result.commits = Commits(run.dir / "checkpoints").steps()


def _next_start(run_dir: Path, result: Result) -> Iterator[str]:
    """Go on from the newest commit, or where there is none be refused and start anew; what does not hold of that."""
    resumed_at = result.commits[0] if result.commits else None
    if resumed_at is None:
        refused = Run.start(run_dir, result.seed, "--resume")
        code = refused.ended(_REFUSAL_DEADLINE_S)
        refused.kill()
        if code != EXIT_CONFIG or "no commit to go on from" not in refused.output:
            yield f"--resume without a commit ended with {code} and said: {refused.output[-300:]}"
    word = "--overwrite" if resumed_at is None else "--resume"
    run = Run.start(run_dir, result.seed, word)
    try:
        code = run.ended(_RUN_DEADLINE_S)
        result.went_on = f"{word}, {code}"
        if code != EXIT_DONE:
            yield f"{word} ended with {code}:\n{run.output[-1500:]}"
            return
        context = run.context
        if left := left_of(context["run_id"], run_dir):
            yield f"left after the whole run: {left}"
        yield from _ledger_problems(run_dir, resumed_at, context["epoch"])
        yield from _row_problems(run_dir)
        yield from _file_problems(run_dir)
    except json.JSONDecodeError as error:  # a line that the kill cut in two, and the next start went on from
        yield f"a line of a file is no JSON: {error}: {error.doc[:200]}"
    finally:
        run.kill()


def _ledger_problems(run_dir: Path, resumed_at: int | None, epoch: int) -> Iterator[str]:
    """Every epoch trained a row of steps once a rank, and those that count are the run's, none left out."""
    if epoch != (1 if resumed_at is None else 2):
        yield f"the last start had epoch {epoch}"
    for stream, num_ranks in RANKS.items():
        path = run_dir / "logs" / f"ledger-{stream}.jsonl"
        entries = _read_lines(path)
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
    rows = _read_lines(run_dir / "metrics.jsonl")
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


def _file_problems(run_dir: Path) -> Iterator[str]:
    unfinished = [path for path in run_dir.rglob("*") if path.suffix in (".part", ".trash", ".tmp")]
    if unfinished:
        yield f"unfinished after the whole run: {[str(path.relative_to(run_dir)) for path in unfinished]}"
    try:
        commit = Commits(run_dir / "checkpoints").newest(allow_fallback=False)
    except CounterpointError as error:
        yield f"the last commit: {error}"
        return
    if commit is None or commit.step != MAX_STEPS:
        yield f"the last commit is of step {commit.step if commit else None}"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# ---------------------------------------------------------------------------------------------------------------------
# The matrix

_INTRODUCTION = (
    "# The kill -9 matrix",
    "",
    "A small run of the demo (SAO, critic on two ranks, 6 steps, a commit every 2), one process ended by SIGKILL",
    "in one phase, and the next start: `--resume`, or where no commit existed its refusal (78) and then",
    "`--overwrite`. A cell is `ok` if",
    "",
    f"1. all was gone in time: {LAUNCHER_BOUND_S:g} s after the launcher's death, else `runtime.shutdown_grace_s` "
    f"({GRACE_S:g} s),",
    f"   {SETTLE_S:g} s to find the root, and {MARGIN_S:g} s for a loaded machine;",
    "2. the launcher ended with 69 and one line that names the killed process (killed itself, it says nothing; in",
    "   `drain`, after the last commit, 0 is right too);",
    "3. no process with the run's mark, no port and, after the next start, no unfinished file was left;",
    "4. the next start went to the last step and ended with 0;",
    "5. every epoch trained each step once a rank and in order, those that count leave none out, `metrics.jsonl`",
    "   has every step of rollout, credit, critic and policy once, and the last commit verifies.",
    "",
    "The victim is frozen, the phase looked for again, and only then the SIGKILL follows. `~` marks cells in which",
    "only the victim's own status page tells the phase: it said so that many milliseconds before its end. `load`",
    "is a random moment before the victim's service is ready, `drain` one within 0.2 s of the last commit.",
    "",
)


def cells_in_order(seed: int) -> list[tuple[Victim, str]]:
    """All cells: diagonal by diagonal, which ones and from where drawn from the seed."""
    dice = random.Random(seed)
    shifts = dice.sample(range(len(PHASES)), len(PHASES))
    victims = dice.sample(VICTIMS, len(VICTIMS))
    places = {victim: number for number, victim in enumerate(victims)}
    return [(victim, PHASES[(places[victim] + shift) % len(PHASES)]) for shift in shifts for victim in victims]


def load(path: Path) -> dict[str, Result]:
    """The newest result of every cell."""
    results = [Result(**line) for line in _read_lines(path)]
    return {result.cell: result for result in results}


def page(results: dict[str, Result], command: str) -> str:
    """The results as Markdown."""
    done = [results[f"{v.name}/{p}"] for v in VICTIMS for p in PHASES if f"{v.name}/{p}" in results]
    failed = [result for result in done if result.problems]
    dates = sorted(result.date for result in done)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy", "pyzmq"))
    others = [result.gone_s for result in done if result.process != "launcher"]
    launcher = [result.gone_s for result in done if result.process == "launcher"]
    lines = [
        *_INTRODUCTION,
        f"Command: `{command}`. Date: {dates[0]} to {dates[-1]} UTC. Machine: {_machine()}. "
        f"Python {platform.python_version()}, {packages}.",
        "",
        f"{len(done)} of {len(VICTIMS) * len(PHASES)} cells were run, {len(failed)} failed. Slowest end: "
        f"{max(launcher, default=0):.1f} s after the launcher's death, {max(others, default=0):.1f} s after another's. "
        f"Runs repeated because the phase was missed: {sum(result.tries - 1 for result in done)}.",
        "",
        f"| | {' | '.join(PHASES)} |",
        f"|---|{'---|' * len(PHASES)}",
    ]
    lines += [f"| {v.name} | {' | '.join(_mark(results.get(f'{v.name}/{p}')) for p in PHASES)} |" for v in VICTIMS]
    lines += [
        "",
        "Each cell: batches collected when the look-out for the phase began, how sure the phase is, seconds until all",
        "was gone, the launcher's exit code, commits on disk then, how the next start went, seconds of the whole cell.",
        "",
        "| process | phase | from step | seen | gone s | code | commits | next start | cell s |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(result) for result in done),
    ]
    if failed:
        lines += ["", "What failed:", "", *(f"- {r.cell}: {_first_line(r)}" for r in failed)]
    return "\n".join(lines) + "\n"


def _mark(result: Result | None) -> str:
    if result is None:
        return ""
    return "FAILED" if result.problems else "ok" if result.confirmed else "ok ~"


def _row(result: Result) -> str:
    seen = "confirmed" if result.confirmed else f"~ {result.word_age_ms:.0f} ms"
    commits = " ".join(map(str, result.commits)) or "none"
    return (
        f"| {result.process} | {result.phase} | {result.step} | {seen} | {result.gone_s:.1f} | {result.code} "
        f"| {commits} | {result.went_on} | {result.seconds:.0f} |"
    )


def _first_line(result: Result) -> str:
    return " / ".join(problem.splitlines()[0] for problem in result.problems)


def _machine() -> str:
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="PROCESS/PHASE", help="one cell; either part may be left out, as in `/commit`"
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no cell after so many (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the moments and the runs (default: 0)")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "runs" / "soak", help="runs and results (default: runs/soak)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.md", help="the page")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run under way is ended too
    args.dir = args.dir.resolve()
    args.dir.mkdir(parents=True, exist_ok=True)
    book, until = args.dir / "cells.jsonl", time.monotonic() + 60 * args.minutes
    results, failed = load(book), 0
    process, _, phase = (args.only or "").partition("/")
    for victim, at in cells_in_order(args.seed):
        before = results.get(f"{victim.name}/{at}")
        wanted = process in ("", victim.name) and phase in ("", at)
        if not wanted or (not args.only and before is not None and not before.problems):
            continue
        if time.monotonic() > until:
            print("the time is up", flush=True)
            break
        result = run_cell(victim, at, args.seed, args.dir / f"{victim.name}-{at}")
        results[result.cell] = result
        failed += bool(result.problems)
        with book.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        args.out.write_text(page(results, shlex.join(["python", "scripts/soak.py", *sys.argv[1:]])))
        said = f"FAILED: {_first_line(result)}" if result.problems else f"ok, {result.went_on}"
        print(f"{result.cell:<28}{result.seconds:5.0f} s  gone in {result.gone_s:4.1f} s  {said}", flush=True)
    return EXIT_BUG if failed else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
