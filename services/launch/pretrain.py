"""`counterpoint pretrain-value CONFIG`: the critic's group alone, on files of recorded returns.

Notable:
- The plan is a run's own, of which only the critic's group is kept, with another module.
- Its directory is `runs/<run.name>-pretrain` unless `run.dir` is given: the same CONFIG can then be run beside it.
- What it ends with: `RUN_DIR/critic` for `value.init_from`, `pretraining.png`, and the rows in `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.config.corpus import manifests_of, pretraining_config
from services.config.deployment_checks import beyond_this_machine
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.models import MODELS_DIR, model_source
from services.launch.planner import Plan, ProcessPlan, plan
from services.launch.resume import resume_run
from services.launch.rows import read_rows, series
from services.launch.supervisor import View, run_dir_of, site_here, supervise
from services.runtime.after import split_wait
from services.runtime.progress import read_progress
from services.wire.errors import EXIT_DONE, EXIT_PREEMPTED, ConfigError

SUFFIX = "-pretrain"
PICTURE = "pretraining.png"
_MODULES = ("value_service.main", "value_service.pretrain")
NUM_BINS = 10
"""Of calibration."""


def pretrain_value(
    paths: Sequence[str],
    overrides: Sequence[tuple[str, str]],
    view: View,
    *,
    overwrite: bool = False,
    resume: bool = False,
) -> tuple[int, Path]:
    """Carry out a pretraining run.

    Args:
        paths: TOML files; later ones win.
        overrides: Settings on top of them.
        view: Shows progress.
        overwrite: Remove an earlier run in the same directory.
        resume: Go on from the newest commit of an earlier start in the same directory.

    Returns:
        The exit code, and the run directory.

    Raises:
        ConfigError: the configuration, or a manifest of the files that does not fit it.
    """
    config = pretraining_config(resolve_beside(paths, overrides, SUFFIX))
    model = model_source(config.model.path, root=site_here().root, models_dir=MODELS_DIR)
    manifests_of(config, model.dir if model.is_complete else None)
    run_dir = run_dir_of(config)
    if resume:
        code = resume_run(config, view, lay_out=pretraining_plan)
    else:
        code = supervise(config, view, overwrite=overwrite, lay_out=pretraining_plan)
    progress = read_progress(run_dir)
    if code == EXIT_DONE and not (progress is not None and progress.is_finished):
        return EXIT_PREEMPTED, run_dir  # somebody told the group itself to end, and it committed
    if code == EXIT_DONE:
        draw(run_dir)
    return code, run_dir


def resolve_beside(paths: Sequence[str], overrides: Sequence[tuple[str, str]], suffix: str) -> Config:
    """A configuration whose run directory, unless one is given, is that of its run with a suffix."""
    resolved = resolve(paths, overrides)
    config = resolved.config
    if problems := beyond_this_machine(config):
        raise ConfigError(problems)
    if resolved.origins.get(("run", "dir")) != "runs/<run.name>":
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": config.run.dir + suffix})})


def pretraining_plan(*args: Any, **rest: Any) -> Plan:
    """As `plan`, of the critic's group alone."""
    layout = plan(*args, **rest)
    (value,) = (process for process in layout.processes if process.name == "value")
    return replace(layout, processes=[at_once(with_module(value, *_MODULES))], final="value")


def with_module(process: ProcessPlan, before: str, after: str) -> ProcessPlan:
    """The same process with another module, which listens on nothing."""
    argv = [after if word == before else word for word in process.argv]
    return replace(process, argv=argv, ports={}, ready_url="")


def at_once(process: ProcessPlan) -> ProcessPlan:
    """The same process without a wait for those of a run that it shares devices with: they are not there."""
    return replace(process, argv=split_wait(process.argv)[1])


def pretraining_summary(run_dir: Path) -> str:
    """Render what a pretraining run came to: held-out explained variance, and how well the values are calibrated.

    Args:
        run_dir: Of the run.
    """
    last = _last_measured(run_dir)
    lines = [f"pretraining {run_dir.name}: {len(series(read_rows(run_dir), 'pretrain', 'value/loss'))} updates", ""]
    if not last:
        return "\n".join([*lines, "nothing was held out", "", *_files(run_dir)])
    lines.append(f"{'held out':<24}{'rows':>8}{'tokens':>10}{'EV':>9}{'EV by rollout':>15}{'AUC':>8}{'bias':>9}")
    for row in last:
        numbers = [
            f"{row['rows']:>8}",
            f"{round(row['value/loss_tokens']):>10}",
            f"{_shown(row, 'value/explained_variance'):>9}",
            f"{_shown(row, 'value/explained_variance_by_trace'):>15}",
            f"{_shown(row, 'value/auc'):>8}",
            f"{_shown(row, 'value/bias'):>9}",
        ]
        lines.append(f"  {row.get('policy_id', 'all'):<22}" + "".join(numbers))
    lines += ["", f"{'calibration':<24}{'tokens':>10}{'mean value':>12}{'mean return':>13}"]
    for number, tokens, value, target in _bins(last[0]):
        lines.append(f"  {'bin ' + str(number + 1):<22}{round(tokens):>10}{value:>12.3f}{target:>13.3f}")
    return "\n".join([*lines, f"  error {_shown(last[0], 'value/calibration_error')}", "", *_files(run_dir)])


def draw(run_dir: Path) -> None:
    """Draw `RUN_DIR/pretraining.png`: explained variance over updates, and the calibration at the end.

    Args:
        run_dir: Of the run.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = read_rows(run_dir)
    overall = [row for row in rows if "policy_id" not in row]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    name = "value/explained_variance"
    for stream, label, style in (
        ("pretrain", "training batch, before its update", "-"),
        ("held_out", "held out", "o-"),
    ):
        data = series(overall, stream, name)
        left.plot(data.steps, data.values, style, linewidth=1.2, label=label)
    left.axhline(0.0, color="grey", linewidth=0.8)
    left.set(title="explained variance", xlabel="update", ylim=(max(-1.0, left.get_ylim()[0]), 1.0))
    left.legend(fontsize=8)
    bins = list(_bins(next(iter(_last_measured(run_dir)), {})))
    right.plot([value for _, _, value, _ in bins], [target for *_, target in bins], "o-")
    if bins:
        ends = [min(min(value, target) for *_, value, target in bins), max(max(v, t) for *_, v, t in bins)]
        right.plot(ends, ends, color="grey", linewidth=0.8)
    right.set(title="calibration, held out", xlabel="mean value of a bin", ylabel="mean return")
    figure.savefig(run_dir / PICTURE, dpi=110)
    pyplot.close(figure)


def _last_measured(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the last measurement: of all held-out rows, then of each policy."""
    rows = [row for row in read_rows(run_dir) if row.get("stream") == "held_out"]
    newest = max((row["step"] for row in rows), default=None)
    found = {row.get("policy_id"): row for row in rows if row["step"] == newest}  # a later start measures again
    return list(found.values())


def _bins(row: dict[str, Any]) -> list[tuple[int, float, float, float]]:
    """Number, tokens, mean value and mean return of each calibration bin that holds a token."""
    found = []
    for number in range(NUM_BINS):
        tokens, value, target = (
            row.get(f"value/calibration/{number}/{name}") for name in ("tokens", "value", "return")
        )
        if tokens and value is not None and target is not None:
            found.append((number, tokens, value, target))
    return found


def _shown(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return f"{value:.3f}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _files(run_dir: Path) -> list[str]:
    notes = {
        "critic": "for value.init_from",
        PICTURE: "explained variance and calibration",
        "metrics.jsonl": "one row an update, and one a measurement and policy",
        "checkpoints": "for --resume, and `counterpoint export --role critic`",
        "logs": "one log a process",
    }
    found = [(name, note) for name, note in notes.items() if (run_dir / name).exists()]
    return [f"files in {run_dir}", *(f"  {name:<22}{note}" for name, note in found)]
