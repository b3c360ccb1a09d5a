"""Who failed first, and why: from exit codes, failure records and torchrun's log.

Notable:
- A failure record that only says "I lost somebody" (`DependencyLost`) is secondary: it names the victim's neighbour.
- A rank that was killed leaves no record; torchrun's agent logs its exit code as a negative signal number.
- Evidence from after the launcher began to end the run is a consequence, never a cause.
- A log goes on where an earlier start of the run ended: what that wrote says nothing about this one.
- In a job's log of a group that spans nodes, srun puts the node's number before each line: torchrun's local ranks are
  that node's. What srun itself says there is about the step, not about why it ended.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launch.planner import ProcessPlan
from services.runtime.lifecycle import read_failures
from services.runtime.logs import log_path
from services.wire.errors import EXIT_BUG, EXIT_DEPENDENCY_LOST

_TORCHRUN_KILLED = (
    re.compile(  # at once
        r"^(?:(?P<node>\d+): )?.*failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+)", re.MULTILINE
    ),
    re.compile(  # in the table at the end
        r"^(?:(?P<node>\d+): )?.*\(local_rank: (?P<rank>\d+)\)\s+(?:\d+: )?\s*exitcode\s*: -(?P<signal>\d+)",
        re.MULTILINE,
    ),
)
_LABEL = re.compile(r"^\d+: ")
_STEP_SAYS = ("srun: ", "slurmstepd")
_RANK_ENDED = re.compile(r"exitcode\s*: (?P<code>-?\d+)")
_RAISED = re.compile(r"[\w.]+(Error|Exception)\b")
_ASKING = {signal.SIGTERM, signal.SIGINT}  # never the cause: torchrun ends the other ranks with the first
_TAIL_BYTES = 200_000


@dataclass(frozen=True)
class Blame:
    """The first failure of a run."""

    name: str
    """Process, or rank of a process."""
    cause: str
    exit_code: int
    """What the launcher ends with."""
    log: Path
    is_primary: bool
    """False when the process only reports the loss of another one."""

    def __str__(self) -> str:
        return f"{self.name} failed first (exit code {self.exit_code}): {self.cause}; log: {self.log}"


def find_blame(
    run_dir: Path, processes: list[ProcessPlan], exits: dict[str, int], log_starts: Mapping[str, int] | None = None
) -> Blame | None:
    """Name the first failure known so far.

    Args:
        run_dir: The run directory.
        processes: What was started.
        exits: Exit codes of the processes that have ended.
        log_starts: Bytes that each process's log held before it was started; None = logs are all of this start.

    Returns:
        None while nothing explains a failure; a secondary blame when only losses of others are known.
    """
    starts = log_starts or {}
    owners = {rank: process.name for process in processes for rank in process.rank_names}
    records = [record for record in read_failures(run_dir) if record.name in owners]
    # a step that spans nodes ends with the largest code of its tasks: the other node's may be SLURM's own kill
    explained = {owners[record.name] for record in records}
    spread = {process.name for process in processes if len(process.nodes) > 1}
    killed = _killed(run_dir, processes, exits, starts, explained & spread)
    if killed is not None:
        return killed
    for record in sorted(records, key=lambda record: (record.secondary, record.time_s)):
        log = log_path(run_dir, record.name)
        blame = Blame(record.name, record.cause, record.exit_code, log, not record.secondary)
        if blame.is_primary:
            return blame
        return _unrecorded(run_dir, processes, exits, {owners[record.name] for record in records}, starts) or blame
    return _unrecorded(run_dir, processes, exits, set(), starts)


def ranks_were_told(run_dir: Path, process: ProcessPlan, log_starts: Mapping[str, int]) -> bool:
    """Did ranks of a group end by a signal that asks for it, which they could not answer yet, and none otherwise.

    Args:
        run_dir: The run directory.
        process: The group.
        log_starts: Bytes that each process's log held before it was started.
    """
    if not process.is_group:
        return False
    tail = _tail(log_path(run_dir, process.name), log_starts.get(process.name, 0))
    codes = {int(found["code"]) for found in _RANK_ENDED.finditer(tail)}
    return bool(codes) and {-code for code in codes} <= _ASKING


def _killed(
    run_dir: Path,
    processes: list[ProcessPlan],
    exits: dict[str, int],
    log_starts: Mapping[str, int],
    explained: set[str],
) -> Blame | None:
    """A process or rank that a signal ended; of processes whose ranks explain it themselves only a rank."""
    for process in processes:
        code = exits.get(process.name, 0)
        log = log_path(run_dir, process.name)
        if process.is_group:
            tail = _tail(log, log_starts.get(process.name, 0))
            for found in (match for pattern in _TORCHRUN_KILLED for match in pattern.finditer(tail)):
                if int(found["signal"]) not in _ASKING:
                    cause = f"killed by {_signal_name(int(found['signal']))}"
                    ranks_before = int(found["node"] or 0) * (process.num_ranks // len(process.nodes))
                    rank = f"{process.name}-{ranks_before + int(found['rank'])}"
                    return Blame(rank, cause, EXIT_DEPENDENCY_LOST, log, True)
        if code > 128 and process.name not in explained:
            return Blame(process.name, f"killed by {_signal_name(code - 128)}", EXIT_DEPENDENCY_LOST, log, True)
    return None


def _unrecorded(
    run_dir: Path,
    processes: list[ProcessPlan],
    exits: dict[str, int],
    recorded: set[str],
    log_starts: Mapping[str, int],
) -> Blame | None:
    """A process that ended without a failure record: before its boundary began, or too early but without an error."""
    for process in processes:
        if process.name not in exits or process.name in recorded:
            continue
        code = exits[process.name]
        log = log_path(run_dir, process.name)
        if code == 0:
            return Blame(process.name, "ended while the run needed it", EXIT_DEPENDENCY_LOST, log, True)
        tail = _tail(log, log_starts.get(process.name, 0))
        last = _last_words(tail, is_group=process.is_group)
        cause = f"ended with code {code}: {last[:300]}"
        return Blame(process.name, cause, EXIT_BUG if code == 1 else code, log, True)
    return None


def _last_words(tail: str, *, is_group: bool) -> str:
    """The last line that is not empty; of a group the last error, which torchrun's own report follows."""
    lines = [_LABEL.sub("", line).strip() for line in tail.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_STEP_SAYS)]
    errors = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
    return (errors if is_group and errors else ["no output", *lines])[-1]


def _tail(path: Path, start: int) -> str:
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
