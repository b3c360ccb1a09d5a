"""`counterpoint serve-value CONFIG`: the value service alone, until it is told to end.

Notable:
- The planner, run directory and guards of a run, and one process group of it; nothing but `[model]`, `[value]` and the
  number of its ranks is needed of a configuration, and nothing else of it is checked.
- The directory is `runs/<name>-serve` unless the configuration names one. What an earlier service left there goes; a
  directory with anything of a run in it is refused.
- On GPUs the critic gets the first ones: there is no policy before it. Wherever a run would have it, as many of this
  machine's are taken.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.config.deployment import DeploymentConfig
from services.config.machine import num_gpus
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.models import MODELS_DIR, model_source
from services.launch.partial import POLL_S, PartialRun, PartLost, partial_run
from services.launch.planner import Plan, plan
from services.launch.supervisor import Signals, run_dir_of, site_here
from services.runtime.durable import rename_dir
from services.wire.errors import ConfigError, DependencyLost

SUFFIX = "-serve"
_OF_A_RUN = ("metrics.jsonl", "traces.jsonl", "rollouts", "checkpoints", "weights")
"""Of these a service that was alone leaves none."""


class _Stopped(Exception):
    """A signal came before the service was ready."""


def serve_value(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], *, overwrite: bool, say: Callable[[str], None]
) -> int:
    """Serve a critic until SIGINT or SIGTERM.

    Args:
        paths: TOML files.
        overrides: Settings on top of them.
        overwrite: Remove a run in the same directory.
        say: Prints one line.

    Returns:
        130 or 143, after the signal that ended it.

    Raises:
        ConfigError: The configuration cannot be served.
        DependencyLost: The service ended by itself; the message says why.
        DeadlineExceeded: It was not ready within `runtime.startup_deadline_s`.
    """
    config = serving_config(paths, overrides)
    run_dir = run_dir_of(config)
    overwrite = overwrite or not any((run_dir / name).exists() for name in _OF_A_RUN)
    signals = Signals()

    def on_wait(_waiting: list[str]) -> None:
        if signals.count:
            raise _Stopped

    try:
        _make_model(config, say)
        run_id = f"{config.run.name}-{secrets.token_hex(4)}"
        started = partial_run(
            config,
            ["value"],
            run_id=run_id,
            overwrite=overwrite,
            on_wait=on_wait,
            lay_out=_alone,
            hurry=signals.twice,
        )
        with started as run:
            _announce(run, config, say)
            _wait(run, signals)
    except _Stopped:
        pass
    finally:
        signals.close()
    return 128 + signals.first


def serving_config(paths: Sequence[str], overrides: Sequence[tuple[str, str]]) -> Config:
    """The configuration of a service that is alone.

    Raises:
        ConfigError: with one line per problem.
    """
    resolved = resolve(paths, overrides, only_critic=True)
    config, origins = resolved.config, resolved.origins
    deployment = DeploymentConfig(num_value_gpus=config.num_value_gpus, device=config.deployment.device)
    config = config.model_copy(update={"deployment": deployment})
    if deployment.device == "cuda" and config.num_value_gpus > num_gpus():
        what = f"{config.num_value_gpus} GPUs are needed, but {num_gpus()} are here"
        raise ConfigError([f'deployment.num_value_gpus: {what}; fix: lower it, or choose device = "cpu"'])
    if origins.get(("run", "dir")) == "runs/<run.name>":
        run = config.run.model_copy(update={"dir": config.run.dir + SUFFIX})
        config = config.model_copy(update={"run": run})
    return config


def _alone(config: Config, *args: Any, **kwargs: Any) -> Plan:
    """The plan of a run whose critic has the first GPUs."""
    layout = plan(config, *args, **kwargs)
    if config.deployment.device == "cpu":
        return layout
    devices = kwargs["site"].gpu_names(range(config.num_value_gpus))
    processes = [
        replace(process, env={**process.env, "CUDA_VISIBLE_DEVICES": devices}, gpus=list(range(config.num_value_gpus)))
        if process.name == "value"
        else process
        for process in layout.processes
    ]
    return replace(layout, processes=processes)


def _make_model(config: Config, say: Callable[[str], None]) -> None:
    """Make the tiny model where it is missing."""
    site = site_here()
    model = model_source(config.model.path, root=site.root, models_dir=MODELS_DIR, python=site.python)
    if model.is_complete:
        return
    say(f"making the model {config.model.path} (once; kept in {model.dir})")
    part = model.dir.with_name(f"{model.dir.name}.{os.getpid()}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": site.search_path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    code = subprocess.run(model.make_argv(part), env=env, stdout=sys.stderr, check=False).returncode
    if code:
        raise DependencyLost(f"the model {config.model.path} could not be made (exit code {code})")
    if not model.dir.is_dir():
        rename_dir(part, model.dir)


def _announce(run: PartialRun, config: Config, say: Callable[[str], None]) -> None:
    assert config.value is not None
    say(f"listening on {run.plan.context.value_url}")
    token_file = config.value.token_file or run.plan.context.token_file
    if token_file is not None:
        say(f"token in {Path(token_file).resolve()}")


def _wait(run: PartialRun, signals: Signals) -> None:
    while not signals.count:
        failure = run.failure()
        if failure is not None and not signals.count:
            raise PartLost(failure, run.exit_code())
        time.sleep(POLL_S)
