"""One cell of the matrix of signals: a small run that is told to end, one process of it or all, and the next start.

Notable:
- SIGTERM to one process, or to every process of the run at once as a batch system does it; SIGINT to the launcher as by
  Ctrl-C. `twice` is a second one to the same, up to two seconds later.
- What must hold: all is gone in time and by itself; the launcher ends with 75 where a commit exists, else with
  128 + signal; nobody calls it a failure; no step that was trained is lost; the next start goes to the last step.
- A second signal to the launcher ends everything at once, so that a step may be lost; the last commit is whole.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from soak_book import Row, read_lines
from soak_checks import GRACE_S, MARGIN_S, commit_problems, start_again, wait_until_gone
from soak_phases import (
    MAX_STEPS,
    PHASE_DEADLINE_S,
    VICTIMS,
    Missed,
    Run,
    Victim,
    is_on,
    left_of,
    make_model,
    pause,
    wait_for_pid,
    wait_for_step,
    wait_while_loading,
)

from services.runtime.commits import Commits
from services.wire.errors import EXIT_DONE, EXIT_PREEMPTED

CTRL_C = Victim("launcher, SIGINT", "launcher")
ALL = Victim("all at once", "launcher")
TOLD = (CTRL_C, *VICTIMS, ALL)
MOMENTS = ("load", "rollout", "critic-step", "policy-step", "commit", "twice")
AT_ONCE_S = 5.0
"""After a second signal to the launcher."""
MAX_TRIES = 3


@dataclasses.dataclass
class Told(Row):
    """What became of a cell."""

    process: str
    moment: str
    seed: int
    tries: int = 1
    step: int = 0
    """batches collected when the look-out for the moment began"""
    gone_s: float = 0.0
    """from the last signal until nothing of the run was left"""
    code: int | None = None
    """the launcher's"""
    trained: int = 0
    """steps of the policy by then"""
    commits: list[int] = dataclasses.field(default_factory=list)
    went_on: str = ""

    @property
    def key(self) -> str:
        """`PROCESS/MOMENT`."""
        return f"{self.process}/{self.moment}"

    @property
    def said(self) -> str:
        """A few words on a good cell."""
        return f"{self.code} in {self.gone_s:.1f} s, {self.went_on}"


BOOK, ROW = "signals.jsonl", Told


def prepare(_folder: Path) -> None:
    """Make the demo's model, so that cells at once do not make it each."""
    make_model()


def keys_in_order(seed: int) -> list[str]:
    """All cells, in an order drawn from the seed."""
    keys = [f"{victim.name}/{moment}" for victim in TOLD for moment in MOMENTS]
    return random.Random(seed).sample(keys, len(keys))


def run(key: str, seed: int, folder: Path) -> Told:
    """Tell it to end, look, start again, look; a missed moment is tried again."""
    name, _, moment = key.partition("/")
    victim, result = next(v for v in TOLD if v.name == name), Told(name, moment, seed)
    for result.tries in range(1, MAX_TRIES + 1):
        dice = random.Random(f"{seed} {name} {moment} {result.tries}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = Run.start(folder / "run", seed, "--overwrite")
        try:
            told_at = _tell(started, victim, dice, result)
            result.problems = [*_after_the_end(started, victim, told_at, result)]
            result.went_on, more = start_again(started.dir, seed, next(iter(result.commits), None))
            result.problems += more
            break
        except Missed as error:
            result.problems = [f"the moment was never hit: {error}"]
        finally:
            started.kill()
    if not result.problems:
        shutil.rmtree(folder)
    return result


def _tell(started: Run, victim: Victim, dice: random.Random, result: Told) -> float:
    """Wait for the moment and send the signal, or both; when the last was sent."""
    until = time.monotonic() + PHASE_DEADLINE_S
    pid = wait_for_pid(started, victim, until)
    started.open_pages()
    if result.moment == "load":
        wait_while_loading(started, victim, dice.uniform(0.0, 6.0 / result.tries))
    else:
        result.step = wait_for_step(started, dice.randint(1, MAX_STEPS - 1 - result.tries), until)
        while not is_on("rollout" if result.moment == "twice" else result.moment, started):
            pause(started, until)
    _send(started, victim, pid)
    if result.moment == "twice":
        time.sleep(dice.uniform(0.0, 2.0))
        _send(started, victim, pid)
    return time.monotonic()


def _send(started: Run, victim: Victim, pid: int) -> None:
    everybody = left_of(started.context["run_id"], started.dir) if victim is ALL else {}
    for each in sorted({pid, *everybody}):
        try:
            os.kill(each, signal.SIGINT if victim is CTRL_C else signal.SIGTERM)
        except ProcessLookupError:
            continue  # the first signal ended it already


def _after_the_end(started: Run, victim: Victim, told_at: float, result: Told) -> Iterator[str]:
    """What does not hold of the run's end."""
    ends_at_once = result.moment == "twice" and victim.process == "launcher"
    bound_s = AT_ONCE_S if ends_at_once else GRACE_S + MARGIN_S * (1 if victim.process == "launcher" else 2)
    result.gone_s, problems = wait_until_gone(started, started.context, told_at, bound_s)
    yield from problems
    result.code = started.process.returncode
    result.commits = Commits(started.dir / "checkpoints").steps()
    ledger = read_lines(started.dir / "logs" / "ledger-policy.jsonl")
    result.trained = max((entry["step"] + 1 for entry in ledger), default=0)
    if result.code == EXIT_DONE and result.commits[:1] == [MAX_STEPS]:
        raise Missed("the run had come to its end")
    number = signal.SIGINT if victim is CTRL_C else signal.SIGTERM
    last = next((line for line in reversed(started.output.splitlines()) if line.strip()), "")
    if result.code != (EXIT_PREEMPTED if result.commits else 128 + number):
        yield f"ended with {result.code}, commits {result.commits}, and said: {last[:300]}"
    if result.commits:
        yield from commit_problems(started.dir, result.commits[0])
        if "--resume" not in last:
            yield f"said nothing of --resume: {last[:300]}"
    if ends_at_once:
        return
    if result.trained and result.commits[:1] != [result.trained]:
        yield f"steps were lost: {result.trained} trained, commits {result.commits}"
    if failures := [path.read_text() for path in (started.dir / "logs" / "failures").glob("*")]:
        yield f"an end on request was called a failure: {failures}"
    events = {event["event"]: event for event in read_lines(started.dir / "events.jsonl")}
    if "stopped_by_signal" not in events:
        yield f"the launcher saw no signal: {events}"
    elif killed := events["stopped_by_signal"]["killed"]:
        yield f"did not end by themselves: {killed}"


# ---------------------------------------------------------------------------------------------------------------------
# The matrix

_INTRODUCTION = (
    "## Told to end",
    "",
    "The same small run, and SIGTERM to one process of it, or to all at once (guards included), or SIGINT to the",
    "launcher. `twice`: the same again within two seconds. A cell is `ok` if",
    "",
    f"1. all was gone, and every port free, within `runtime.shutdown_grace_s` ({GRACE_S:g} s) and {MARGIN_S:g} s for",
    f"   a loaded machine (twice that where the launcher was not told itself), or {AT_ONCE_S:g} s after a second",
    "   signal to the launcher;",
    "2. the launcher ended with 75 where a commit existed, else with 128 + signal, and the newest commit verifies;",
    "3. everybody ended by himself and nobody called it a failure; the newest commit was of the last step trained",
    "   (neither is asked of an end at once);",
    "4. the next start went to the last step, as in the matrix above.",
    "",
)


def section(rows: dict[str, Told], letters: dict[tuple[str, str, int], str]) -> list[str]:
    """The results as Markdown."""
    done = [rows[key] for v in TOLD for m in MOMENTS if (key := f"{v.name}/{m}") in rows]
    slowest = max((row.gone_s for row in done if row.moment != "twice"), default=0)
    return [
        *_INTRODUCTION,
        f"{len(done)} of {len(TOLD) * len(MOMENTS)} cells were run, {sum(bool(r.problems) for r in done)} failed. "
        f"Slowest end: {slowest:.1f} s. Runs repeated because the moment was missed: "
        f"{sum(row.tries - 1 for row in done)}.",
        "",
        f"| told | {' | '.join(MOMENTS)} |",
        f"|---|{'---|' * len(MOMENTS)}",
        *(f"| {v.name} | {' | '.join(_mark(rows.get(f'{v.name}/{m}')) for m in MOMENTS)} |" for v in TOLD),
        "",
        "Each cell: batches collected when the look-out for the moment began, seconds until all was gone, the",
        "launcher's exit code, steps that the policy had trained, commits then, how the next start went, seconds of",
        "the whole cell, and where it was made.",
        "",
        "| told | moment | from step | gone s | code | trained | commits | next start | cell s | where |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row, letters[row.place]) for row in done),
    ]


def _mark(row: Told | None) -> str:
    return "" if row is None else "FAILED" if row.problems else f"ok, {row.code}"


def _line(row: Told, letter: str) -> str:
    commits = " ".join(map(str, row.commits)) or "none"
    return (
        f"| {row.process} | {row.moment} | {row.step} | {row.gone_s:.1f} | {row.code} | {row.trained} | {commits} "
        f"| {row.went_on} | {row.seconds:.0f} | {letter} |"
    )
