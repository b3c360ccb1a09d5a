"""`counterpoint record CONFIG`: rollouts of the configured model as rows for `counterpoint pretrain-value`.

Notable:
- The plan is a run's own, of which only inference is kept; what drives the rollouts takes the orchestrator's place.
- Its directory is `runs/<run.name>-record` unless `run.dir` is given. A corpus of several policies is several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from services.config.schema import Config
from services.config.tasks import RESTORABLE
from services.launch.planner import Plan, plan
from services.launch.pretrain import at_once, resolve_beside, with_module
from services.launch.supervisor import View, run_dir_of, supervise
from services.wire.errors import ConfigError, UsageError

SUFFIX = "-record"
_MODULES = ("orchestrator.main", "orchestrator.record_rows")


def record(
    paths: Sequence[str],
    overrides: Sequence[tuple[str, str]],
    view: View,
    *,
    rows: int | None = None,
    suffixes: int = 0,
    policy_id: str | None = None,
    overwrite: bool = False,
) -> tuple[int, Path]:
    """Carry out a recording.

    Args:
        paths: TOML files; later ones win.
        overrides: Settings on top of them.
        view: Shows progress.
        rows: Whole rollouts; None = as many as the run would train on.
        suffixes: Continuations of each rollout's prefix; 0 = none.
        policy_id: Who samples; None = the run's name.
        overwrite: Remove an earlier recording in the same directory.

    Returns:
        The exit code, and the folder of the rows.

    Raises:
        UsageError: numbers that make no sense.
        ConfigError: the configuration, or environments that cannot be cut.
    """
    if suffixes < 0 or (rows is not None and rows < 1):
        raise UsageError("--rows must be at least 1, --suffixes at least 0")
    config = resolve_beside(paths, overrides, SUFFIX)
    if suffixes:
        _check_cuttable(config)
    words = ["--policy-id", policy_id or config.run.name, "--suffixes", str(suffixes)]
    num_rows = rows or config.orchestrator.max_steps * config.orchestrator.batch_size
    lay_out = partial(recording_plan, words=["--rows", str(num_rows), *words])
    code = supervise(config, view, overwrite=overwrite, lay_out=lay_out)
    return code, run_dir_of(config) / "rows"


def recording_plan(*args: Any, words: list[str], **rest: Any) -> Plan:
    """As `plan`, of the engines, which need no router then, and the recorder alone."""
    layout = plan(*args, **rest)
    engines = [at_once(process) for process in layout.processes if process.name.startswith("inference")]
    (orchestrator,) = (process for process in layout.processes if process.name == "orchestrator")
    recorder = with_module(orchestrator, *_MODULES)
    recorder = replace(recorder, name="recorder", argv=[*recorder.argv, *words])
    return replace(layout, processes=[*engines, recorder], final="recorder")


def _check_cuttable(config: Config) -> None:
    problems: list[str] = []
    for index, env in enumerate(config.env):
        if env.type not in RESTORABLE:
            fix = f"record without --suffixes, or with type = {', '.join(sorted(RESTORABLE))}"
            problems.append(
                f"env[{index}].type: {env.type} cannot be brought into the middle of an episode; fix: {fix}"
            )
        if env.prefix_file is not None:
            fix = "record without --suffixes, or delete it"
            problems.append(f"env[{index}].prefix_file: its rollouts are continuations already; fix: {fix}")
        if env.reward.overlong_limit_tokens is not None or env.reward.length_penalty:
            what = "punishing length counts the tokens of whole rollouts, a suffix has only its own"
            problems.append(f"env[{index}].reward: {what}; fix: record without --suffixes, or delete it")
    if problems:
        raise ConfigError(problems)
