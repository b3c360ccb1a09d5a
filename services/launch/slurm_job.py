"""The launcher inside of a SLURM job: the same supervisor as on one machine, with the job's nodes as its machines.

Usage (in the batch script): `python -m services.launch.slurm_job --run-dir RUN [--resume]`

Notable:
- A job that SLURM has started before goes on from the newest commit; where it had not made one yet, from the start.
- The exit code is the run's: 75 means that there is a commit to go on from, and the script requeues the job.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.config.schema import Config, load_resolved
from services.launch.live import LiveView
from services.launch.report import summary
from services.launch.resume import resume_run, run_with_restarts
from services.launch.rundir import append_event, create_run_dir
from services.launch.slurm import CONFIG_FILE, JOB_FILE, LOG_PATTERN, SCRIPT
from services.launch.slurm_machines import JobMachines, machines_of_job
from services.launch.supervisor import View, run_dir_of, site_here, supervise
from services.runtime.commits import Commits
from services.runtime.roots import check_root
from services.wire.errors import EXIT_DONE, ConfigError, CounterpointError

KEPT = (CONFIG_FILE, JOB_FILE, SCRIPT, "events.jsonl")
"""What stays of a start without a commit when the job starts again, beside SLURM's log."""


def main(words: list[str]) -> int:
    """Carry out the job's run; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory, absolute")
    parser.add_argument("--config", type=Path, help="resolved configuration to make the run directory from")
    parser.add_argument("--resume", action="store_true", help="go on from the newest commit")
    parser.add_argument("--allow-fallback", action="store_true", help="... or an older one where that is damaged")
    args = parser.parse_args(words)
    try:
        check_root()
        return carry_out(args.run_dir, args.config, resume=args.resume, allow_fallback=args.allow_fallback)
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")
        return error.exit_code
    except CounterpointError as error:
        sys.stderr.write(f"counterpoint: {error}\n")
        return error.exit_code


def carry_out(
    run_dir: Path,
    config_file: Path | None = None,
    *,
    resume: bool = False,
    allow_fallback: bool = False,
    make_view: Callable[[], View] = LiveView,
) -> int:
    """Start, or go on with, the run of a directory on this job's nodes.

    Args:
        run_dir: The run directory.
        config_file: Makes the directory where it is not there yet.
        resume: Go on from the newest commit.
        allow_fallback: Where that is damaged, take an older one.
        make_view: Makes what shows progress.

    Returns:
        The exit code, as of `supervise`.

    Raises:
        ConfigError: The directory holds no run, or the job's nodes are not those of the configuration.
    """
    has_run = (run_dir / CONFIG_FILE).is_file()
    if not has_run and config_file is None:
        raise ConfigError([f"--run-dir: {run_dir} holds no run; fix: submit by `counterpoint run`"])
    config = load_resolved(config_file if config_file is not None and not has_run else run_dir / CONFIG_FILE)
    if not has_run:
        create_run_dir(run_dir, config, overwrite=False)
    if run_dir_of(config) != run_dir:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
    machines = machines_of_job(config, site_here())
    append_event(
        run_dir, "job_started", job_id=os.environ["SLURM_JOB_ID"], nodes=[host.name for host in machines.hosts]
    )
    view = make_view()
    for host in machines.hosts:
        view.say(f"node {host.name} ({host.address})")
    code = _run(config, run_dir, machines, view, resume=resume, allow_fallback=allow_fallback)
    if code == EXIT_DONE:
        view.say(summary(run_dir))
    return code


def _run(
    config: Config, run_dir: Path, machines: JobMachines, view: View, *, resume: bool, allow_fallback: bool
) -> int:
    was_started = (run_dir / "run.json").is_file()
    if resume or (was_started and Commits(run_dir / "checkpoints").steps()):
        return resume_run(config, view, machines=machines, allow_fallback=allow_fallback)
    if was_started:
        view.say("an earlier start of this job ended without a commit; starting anew")
        clear(run_dir)
    return run_with_restarts(config, view, machines=machines, start=partial(supervise, is_made=True))


def clear(run_dir: Path) -> None:
    """Remove what a start without a commit has left."""
    for path in run_dir.iterdir():
        if path.name in KEPT or path.match(LOG_PATTERN.replace("%j", "*")):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (run_dir / "logs").mkdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
