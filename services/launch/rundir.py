"""The run directory as the launcher makes it: configuration, context, events, and the rule for a used one.

Notable:
- A used directory is refused unless `--overwrite`, and even then only removed if it is recognisably a run of ours and
  no launcher is at work in it.
- Whoever works in a run directory holds a host-wide name derived from its path; the hold ends with the process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from pathlib import Path

from services.config.context import RunContext
from services.config.schema import Config, to_toml
from services.runtime.durable import write_atomic
from services.runtime.ports import hold_name
from services.wire.errors import CannotWrite, ConfigError

MARKS = ("run.json", "config.resolved.toml")
"""Files that make a folder a run directory of ours."""


def hold_run_dir(run_dir: Path) -> socket.socket:
    """Hold a run directory for as long as this process lives, or until the returned socket is closed.

    Raises:
        ConfigError: Another launcher holds it.
    """
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:24]
    hold = hold_name(f"run-{digest}")
    if hold is None:
        raise ConfigError([f"run.dir: another launcher is running in {run_dir}; fix: wait, or choose --run.dir DIR"])
    return hold


def create_run_dir(run_dir: Path, config: Config, *, overwrite: bool) -> None:
    """Make a fresh run directory with the resolved configuration and a `logs` folder in it.

    Args:
        run_dir: Absolute path.
        config: Written as `config.resolved.toml`.
        overwrite: Remove what an earlier run left there.

    Raises:
        ConfigError: The directory is used and may not be removed.
        CannotWrite: It cannot be made.
    """
    try:
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            _check_removable(run_dir, overwrite)
            shutil.rmtree(run_dir)
        (run_dir / "logs").mkdir(parents=True)
    except OSError as error:
        raise CannotWrite(f"cannot make {run_dir}: {error.strerror}") from error
    write_atomic(run_dir / "config.resolved.toml", to_toml(config))


def write_context(context: RunContext) -> None:
    """Write `run.json`."""
    write_atomic(context.run_dir / "run.json", json.dumps(context.model_dump(mode="json"), indent=1) + "\n")


def append_event(run_dir: Path, event: str, **facts: object) -> None:
    """Add one line to `events.jsonl`: what the launcher did or saw, with its unix time."""
    line = json.dumps({"time_s": round(time.time(), 3), "event": event, **facts})
    try:
        with open(run_dir / "events.jsonl", "a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise CannotWrite(f"cannot write {run_dir / 'events.jsonl'}: {error.strerror}") from error


def _check_removable(run_dir: Path, overwrite: bool) -> None:
    is_run = run_dir.is_dir() and any((run_dir / mark).is_file() for mark in MARKS)
    if not is_run:
        fix = "choose another directory with --run.dir DIR"
        raise ConfigError([f"run.dir: {run_dir} exists and is not a run directory; fix: {fix}"])
    if not overwrite:
        fix = "pass --overwrite to remove it, or choose another with --run.dir DIR"
        raise ConfigError([f"run.dir: {run_dir} holds an earlier run; fix: {fix}"])
