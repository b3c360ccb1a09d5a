"""`--resume`: the rest of a run, from its newest commit, as another epoch of the same run.

Notable:
- What a commit is of must be what it is resumed as: algorithm, model, tokenizer, support and batches may not differ,
  each difference being named with both values. Layouts, learning rates and lengths may.
- The new start has the next epoch: messages of an earlier one, should any of it still live, are refused.
- `deployment.max_restarts`: the same without being asked, after a process was lost (69), never after anything else.
- Records of earlier failures are kept beside the new ones, under their epoch's number.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.config.context import RunContext
from services.config.identity import identity_of
from services.config.schema import Config, to_toml
from services.launch.machines import Machines
from services.launch.planner import Plan, plan
from services.launch.rundir import append_event, hold_run_dir
from services.launch.supervisor import Signals, Supervisor, View, model_of, run_dir_of, supervise
from services.runtime.commits import Commits
from services.runtime.durable import write_atomic
from services.runtime.marker import Commit
from services.wire.errors import EXIT_DEPENDENCY_LOST, ConfigError


def run_with_restarts(
    config: Config,
    view: View,
    *,
    overwrite: bool = False,
    machines: Machines | None = None,
    start: Callable[..., int] = supervise,
) -> int:
    """Carry out a run from nothing; after the loss of a process go on from the newest commit, as often as allowed.

    Args:
        config: The resolved configuration; `deployment.max_restarts` says how often.
        view: Shows progress.
        overwrite: Remove an earlier run in the same directory.
        machines: Where the processes start; None = on this one.
        start: Makes the first start, as `supervise` does.

    Returns:
        The exit code, as of `supervise`.

    Raises:
        ConfigError: The run directory is in use.
        CannotWrite: It cannot be made.
    """
    code = start(config, view, overwrite=overwrite, machines=machines)
    commits = Commits(run_dir_of(config) / "checkpoints")
    for number in range(1, config.deployment.max_restarts + 1):
        if code != EXIT_DEPENDENCY_LOST or not commits.steps():
            break
        view.say(f"restart {number} of {config.deployment.max_restarts}")
        code = resume_run(config, view, machines=machines)
    return code


def resume_run(
    config: Config,
    view: View,
    *,
    lay_out: Callable[..., Plan] = plan,
    allow_fallback: bool = False,
    machines: Machines | None = None,
) -> int:
    """Carry out the rest of a run from its newest commit.

    Args:
        config: As it is now; its run directory is the earlier start's.
        view: Shows progress.
        lay_out: Makes the plan, as `plan` does.
        allow_fallback: Where the newest commit is damaged, take the one before it.
        machines: Where the processes start; None = on this one.

    Returns:
        The exit code, as of `supervise`.

    Raises:
        ConfigError: There is nothing to go on from, or the commit is of another run than this.
        DamagedCommit: The newest commit is damaged.
    """
    run_dir = run_dir_of(config)
    signals = Signals()
    try:
        with hold_run_dir(run_dir):
            earlier = _earlier_start(run_dir)
            commit = newest_commit(run_dir, config, Path(earlier.model_dir), allow_fallback=allow_fallback)
            next_epoch = max(earlier.epoch, commit.epoch) + 1

            def continued(*args: Any, epoch: int, run_id: str, **rest: Any) -> Plan:
                layout = lay_out(*args, epoch=next_epoch, run_id=earlier.run_id, **rest)
                context = layout.context.model_copy(update={"commit_dir": str(commit.folder)})
                return replace(layout, context=context)

            _put_failures_aside(run_dir, earlier.epoch)
            write_atomic(run_dir / "config.resolved.toml", to_toml(config))
            append_event(run_dir, "resumed", step=commit.step, epoch=next_epoch)
            view.say(f"going on after step {commit.step} of {run_dir} (epoch {next_epoch})")
            model = model_of(config, machines)
            code = Supervisor(config, run_dir, model, view, signals, lay_out=continued, machines=machines).run()
            append_event(run_dir, "run_ended", exit_code=code)
            return code
    finally:
        view.end()
        signals.close()


def newest_commit(run_dir: Path, config: Config, model_dir: Path, *, allow_fallback: bool) -> Commit:
    """The commit that a run goes on from, verified, and of the run that `config` describes.

    Raises:
        ConfigError: There is none, or it is of another run; every difference at once.
        DamagedCommit: It is damaged.
    """
    commit = Commits(run_dir / "checkpoints").newest(allow_fallback=allow_fallback)
    if commit is None:
        raise ConfigError([f"run.dir: {run_dir} has no commit to go on from; fix: start anew with --overwrite"])
    now = identity_of(config, model_dir)
    differing = [
        f"{key}: {now.get(key)!r} here, {before!r} in {commit.folder}; fix: give what it was"
        for key, before in commit.identity.items()
        if now.get(key) != before
    ]
    if differing:
        raise ConfigError(differing)
    return commit


def _earlier_start(run_dir: Path) -> RunContext:
    path = run_dir / "run.json"
    if not path.is_file():
        raise ConfigError([f"run.dir: {run_dir} holds no run; fix: start it without --resume"])
    return RunContext.model_validate(json.loads(path.read_text()))


def _put_failures_aside(run_dir: Path, epoch: int) -> None:
    shutil.rmtree(run_dir / "logs" / "asked-to-end", ignore_errors=True)
    failures = run_dir / "logs" / "failures"
    if failures.is_dir():
        failures.rename(failures.with_name(f"failures-epoch-{epoch}"))
