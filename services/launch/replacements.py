"""What a run can lose for a while, and is started again in its place: engines behind the router, the router, its guard.

Notable:
- Their requests are sent again by the orchestrator, which also fills an empty router, and brings an engine the current
  weights before it is used: no other process notices, and nothing is trained again.
- Lost means killed by a signal, or ended with 0 without having been told to. Who ends with a code of its own says what
  is wrong, and ends the run like any other process: a wrong setting does not mend itself.
- So often at most; a process that keeps dying is a failure.
- An engine that takes turns with trainers on its GPUs is not started again: it would load beside whoever is awake. Its
  loss ends the run, which goes on from its newest commit (`deployment.max_restarts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from services.launch.fleet import Fleet
from services.launch.planner import ProcessPlan
from services.launch.rundir import append_event
from services.runtime.lifecycle import request_path
from services.wire.errors import EXIT_DONE

MAX_REPLACEMENTS = 5
"""Of one process in one start of a run."""
ROUTER_PARTS = ("router", "router-guard")
SEVERAL = "inference-"
"""Engines have numbers where there are several."""


class Replacements:
    """Starts lost processes of a fleet again."""

    def __init__(
        self,
        run_dir: Path,
        processes: Iterable[ProcessPlan],
        start: Callable[[ProcessPlan], None],
        *,
        take_turns: bool = False,
    ) -> None:
        """Make it for one fleet.

        Args:
            run_dir: The run directory.
            processes: All of the run's; those that may be replaced are found by their names.
            start: Starts one in its place.
            take_turns: Whether engines share their GPUs with trainers.
        """
        self._run_dir = run_dir
        self._replaceable = {
            process.name: process
            for process in processes
            if process.name in ROUTER_PARTS or (process.name.startswith(SEVERAL) and not take_turns)
        }
        self._start = start
        self._counts: Counter[str] = Counter()

    def look(self, fleet: Fleet) -> bool:
        """Replace what was lost; whether anything was."""
        lost = [name for name, code in fleet.exits().items() if self._is_lost(name, code)]
        for name in lost:
            self._counts[name] += 1
            append_event(self._run_dir, "process_replaced", process=name, exit_code=fleet.exits().get(name))
            self._start(self._replaceable[name])
        return bool(lost)

    def _is_lost(self, name: str, code: int) -> bool:
        if name not in self._replaceable or self._counts[name] >= MAX_REPLACEMENTS:
            return False
        return code > 128 or (code == EXIT_DONE and not request_path(self._run_dir, name).exists())
