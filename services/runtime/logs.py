"""One log file per process, and warnings on stderr.

Notable:
- `RUN_DIR/logs/<name>.log` gets everything at the run's level; stderr gets one short line per warning or error.
- The launcher points stdout and stderr of a single process at that same file (append mode), so that library output
  and crashes land beside our lines; the stderr sink is then left out, or every warning would appear twice.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loguru import logger

FILE_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <7} {extra[process]} {message} ({name}:{line})"
SHORT_FORMAT = "{time:HH:mm:ss} {level: <7} {extra[process]}: {message}"


def log_path(run_dir: Path, name: str) -> Path:
    """The log file of process `name`."""
    return run_dir / "logs" / f"{name}.log"


def setup_logging(name: str, run_dir: Path, *, level: str = "INFO") -> None:
    """Send this process's log to its file, and warnings to stderr.

    Args:
        name: Process name, also the file's stem.
        run_dir: The run directory.
        level: Lowest level written to the file.
    """
    path = log_path(run_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.remove()
    logger.configure(extra={"process": name})
    # catch=True (the default): a full disk costs log lines, not the run
    # diagnose=False: a traceback with the values of variables would show tokens and prompts
    logger.add(path, level=level, format=FILE_FORMAT, diagnose=False)
    if not _is_stderr(path):
        logger.add(sys.stderr, level="WARNING", format=SHORT_FORMAT, colorize=False, diagnose=False, backtrace=False)


def _is_stderr(path: Path) -> bool:
    ours = os.stat(path)
    theirs = os.fstat(2)
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
