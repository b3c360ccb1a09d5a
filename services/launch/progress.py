"""What a person sees of a command that has one number to show: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from services.launch.planner import Plan
from services.runtime.progress import PROGRESS_FILE, Progress, read_progress

LINE_INTERVAL_S = 5.0
_LOOK_INTERVAL_S = 0.5


class ProgressView:
    """Shows `RUN_DIR/progress.json`; implements the supervisor's view."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Show it on `stream`, by default on standard error."""
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._run_dir: Path | None = None
        self._bar: Bar | None = None
        self._next_look = self._next_line = 0.0
        self._last_line = ""
        self._started = time.monotonic()

    def say(self, message: str) -> None:
        """Print one line, above the bar while there is one."""
        self._console.print(message, markup=False, soft_wrap=True)

    def begin(self, plan: Plan) -> None:
        """Start to show the run."""
        self._run_dir, self._started = plan.context.run_dir, time.monotonic()
        (self._run_dir / PROGRESS_FILE).unlink(missing_ok=True)  # an earlier start's
        self.say(f"started {', '.join(process.name for process in plan.processes)}; logs in {self._run_dir}/logs")
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, TextColumn("{task.fields[note]}"), console=self._console)
            self._bar.add_task("starting", total=None, note="")
            self._bar.start()

    def tick(self) -> None:
        """Look at the file when it is time."""
        if self._run_dir is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_INTERVAL_S
        progress = read_progress(self._run_dir)
        if progress is None:
            return
        if self._bar is not None:
            (task,) = self._bar.task_ids
            changes = {"completed": progress.done, "total": progress.total, "note": progress.note}
            self._bar.update(task, description=progress.unit, **changes)
        elif time.monotonic() >= self._next_line:
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        line = f"{progress.done}/{progress.total} {progress.unit}" + (f" | {progress.note}" if progress.note else "")
        self._next_line = time.monotonic() + LINE_INTERVAL_S
        if line != self._last_line:
            self.say(f"[{time.monotonic() - self._started:5.0f} s] {line}")
            self._last_line = line

    def end(self) -> None:
        """Leave the terminal as it was, with the last state shown; may be called twice."""
        progress = read_progress(self._run_dir) if self._run_dir is not None else None
        if progress is not None and self._bar is None:
            self._print(progress)
        if self._bar is not None:
            self.tick()
            self._bar.stop()
            self._bar = None
        self._run_dir = None
