"""An orchestrator and its roles in one process: commits, and then removes old commits; a test says where it dies.

Usage: python commit_child.py FOLDER STEP EPOCH KEEP_LAST [LIMIT_BYTES ROLE_META_BYTES IDENTITY_BYTES]

With a limit no file may grow beyond it (RLIMIT_FSIZE), and the commit is tried twice, as at two intervals. `hold` in
place of STEP reads the newest commit until the process is killed.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from pathlib import Path

from services.runtime.commits import Attempts, Commits
from services.runtime.faults import point
from services.runtime.manifests import write_manifest
from services.wire.errors import CannotWrite
from tests.commits import ROLES, write_role


def commit(commits: Commits, step: int, epoch: int, meta_bytes: int = 0, identity_bytes: int = 0) -> None:
    """The whole sequence, with the points that belong to roles."""
    part = commits.begin(step)
    try:
        for role in ROLES:
            write_role(part / role, step, epoch, on_half=lambda: point("shard:half"))
            if meta_bytes:
                write_manifest(part / role, {"ballast": "x" * meta_bytes})
            point("roles:between")
    except OSError as error:
        commits.abandon(step)
        raise CannotWrite(f"a shard of step {step}: {error.strerror}") from error
    except CannotWrite:
        commits.abandon(step)
        raise
    identity = {"algorithm": "sao", "step": step} | ({"ballast": "x" * identity_bytes} if identity_bytes else {})
    commits.commit(step, ROLES, run_id="run", epoch=epoch, identity=identity)


def main(folder: Path, step: int, epoch: int, keep_last: int, *limits: int) -> None:
    """Commit once; with a limit twice."""
    commits, attempts = Commits(folder), Attempts()
    commits.sweep()
    if limits:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0], limits[0]))
    for each in (step, step + 1) if limits else (step,):
        try:
            commit(commits, each, epoch, *limits[1:])
        except CannotWrite as error:
            print(f"failed {each}: {error}", flush=True)
            attempts.failed(each, error)
        else:
            attempts.succeeded()
            commits.prune(keep_last=keep_last)


def hold(folder: Path) -> None:
    """Read the newest commit, and never be done with it."""
    commits = Commits(folder)
    with commits.reading(commits.steps()[0]):
        print("reading", flush=True)
        time.sleep(300)


if __name__ == "__main__":
    if sys.argv[2] == "hold":
        hold(Path(sys.argv[1]))
    try:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    except CannotWrite as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
