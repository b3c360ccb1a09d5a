"""One cell of the kill -9 matrix: a small run, one process of it ended by SIGKILL in one phase, and the next start.

Notable:
- What must hold: all is gone in time; the launcher names the killed process and ends with 69; no process, port or
  unfinished file is left; the next start goes to the last step; every step trained once a rank; each row once.
- Cells come in diagonals, so that a short soak has met every process and every phase.
- A run in which the phase was not seen is no result: it is made again, three times at most.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from soak_book import Row
from soak_checks import GRACE_S, MARGIN_S, start_again, wait_until_gone
from soak_phases import PHASES, VICTIMS, Hit, Missed, Run, Victim, kill_in, make_model

from services.runtime.commits import Commits
from services.wire.errors import EXIT_DEPENDENCY_LOST, EXIT_DONE

LAUNCHER_BOUND_S = 10.0
"""For everything to be gone after the launcher's death."""
SETTLE_S = 4.0
"""The launcher's look for the root of a failure."""
MAX_TRIES = 3


@dataclasses.dataclass
class Kill(Row):
    """What became of a cell."""

    process: str
    phase: str
    seed: int
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

    @property
    def key(self) -> str:
        """`PROCESS/PHASE`."""
        return f"{self.process}/{self.phase}"

    @property
    def said(self) -> str:
        """A few words on a good cell."""
        return f"gone in {self.gone_s:.1f} s, {self.went_on}"


BOOK, ROW = "cells.jsonl", Kill


def prepare(_folder: Path) -> None:
    """Make the demo's model, so that cells at once do not make it each."""
    make_model()


def keys_in_order(seed: int) -> list[str]:
    """All cells: diagonal by diagonal, which ones and from where drawn from the seed."""
    dice = random.Random(seed)
    shifts = dice.sample(range(len(PHASES)), len(PHASES))
    victims = dice.sample(VICTIMS, len(VICTIMS))
    places = {victim: number for number, victim in enumerate(victims)}
    return [f"{v.name}/{PHASES[(places[v] + shift) % len(PHASES)]}" for shift in shifts for v in victims]


def run(key: str, seed: int, folder: Path) -> Kill:
    """Kill, look, start again, look; a missed phase is tried again."""
    name, _, phase = key.partition("/")
    victim, result = next(v for v in VICTIMS if v.name == name), Kill(name, phase, seed)
    for result.tries in range(1, MAX_TRIES + 1):
        dice = random.Random(f"{seed} {name} {phase} {result.tries}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = Run.start(folder / "run", seed, "--overwrite")
        try:
            hit = kill_in(started, victim, phase, dice, result.tries)
            result.problems = [*_after_the_kill(started, victim, phase, hit, result)]
            result.went_on, more = start_again(started.dir, seed, next(iter(result.commits), None))
            result.problems += more
            break
        except Missed as error:
            result.problems = [f"the phase was never hit: {error}"]
        finally:
            started.kill()
    if not result.problems:
        shutil.rmtree(folder)
    return result


def _after_the_kill(run: Run, victim: Victim, phase: str, hit: Hit, result: Kill) -> Iterator[str]:
    """What does not hold of the run's end."""
    is_launcher = victim.process == "launcher"
    bound_s = LAUNCHER_BOUND_S if is_launcher else GRACE_S + SETTLE_S + MARGIN_S
    result.step, result.confirmed, result.word_age_ms = hit.step, hit.confirmed, hit.word_age_ms
    result.gone_s, problems = wait_until_gone(run, run.context, hit.at, bound_s)
    yield from problems
    result.code = run.process.returncode
    if not is_launcher:
        last = next((line for line in reversed(run.output.splitlines()) if line.strip()), "")
        named = f"{victim.blamed} failed first (exit code {EXIT_DEPENDENCY_LOST}): killed by SIGKILL; log: "
        is_blamed = result.code == EXIT_DEPENDENCY_LOST and last.startswith(named)
        if not is_blamed and not (phase == "drain" and result.code == EXIT_DONE):
            yield f"ended with {result.code} and said: {last[:300]}"
    result.commits = Commits(run.dir / "checkpoints").steps()


# ---------------------------------------------------------------------------------------------------------------------
# The matrix

_INTRODUCTION = (
    "## The kill -9 matrix",
    "",
    "A small run of the demo (SAO, 6 steps, a commit every 2), one process ended by SIGKILL",
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


def section(rows: dict[str, Kill], letters: dict[tuple[str, str, int], str]) -> list[str]:
    """The results as Markdown."""
    done = [rows[key] for v in VICTIMS for p in PHASES if (key := f"{v.name}/{p}") in rows]
    others = [row.gone_s for row in done if row.process != "launcher"]
    launcher = [row.gone_s for row in done if row.process == "launcher"]
    return [
        *_INTRODUCTION,
        f"{len(done)} of {len(VICTIMS) * len(PHASES)} cells were run, {sum(bool(r.problems) for r in done)} failed. "
        "Slowest end: "
        f"{max(launcher, default=0):.1f} s after the launcher's death, {max(others, default=0):.1f} s after another's. "
        f"Runs repeated because the phase was missed: {sum(row.tries - 1 for row in done)}.",
        "",
        f"| | {' | '.join(PHASES)} |",
        f"|---|{'---|' * len(PHASES)}",
        *(f"| {v.name} | {' | '.join(_mark(rows.get(f'{v.name}/{p}')) for p in PHASES)} |" for v in VICTIMS),
        "",
        "Each cell: batches collected when the look-out for the phase began, how sure the phase is, seconds until all",
        "was gone, the launcher's exit code, commits on disk then, how the next start went, seconds of the whole cell,",
        "and where it was made.",
        "",
        "| process | phase | from step | seen | gone s | code | commits | next start | cell s | where |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row, letters[row.place]) for row in done),
    ]


def _mark(row: Kill | None) -> str:
    if row is None:
        return ""
    return "FAILED" if row.problems else "ok" if row.confirmed else "ok ~"


def _line(row: Kill, letter: str) -> str:
    seen = "confirmed" if row.confirmed else f"~ {row.word_age_ms:.0f} ms"
    commits = " ".join(map(str, row.commits)) or "none"
    return (
        f"| {row.process} | {row.phase} | {row.step} | {seen} | {row.gone_s:.1f} | {row.code} "
        f"| {commits} | {row.went_on} | {row.seconds:.0f} | {letter} |"
    )
