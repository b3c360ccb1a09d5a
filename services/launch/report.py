"""What a run did: the summary at its end, `counterpoint report`, and the curves as a picture.

Notable:
- Everything is read from the run directory; a run that failed or is still going can be reported on as well.
- matplotlib is imported only when a picture is drawn, with the Agg backend: no display is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.launch.rows import Series, accuracies, chart, read_rows, series, sparkline
from services.wire.errors import UsageError

PANELS = (
    ("mean reward", "rollout", "reward/mean"),
    ("explained variance", "critic", "value/explained_variance"),
    ("value loss", "critic", "value/loss"),
    ("policy loss", "policy", "policy/loss"),
    ("policy entropy", "policy", "policy/entropy"),
    ("KL to the sampler", "policy", "policy/kl_rollout"),
    ("staleness (versions)", "rollout", "rollout/staleness"),
    ("answer length (tokens)", "rollout", "rollout/length"),
)
"""Title, stream and metric of each curve."""


def summary(run_dir: Path) -> str:
    """Render a run as text: the reward curve, how it began and ended, and where the files are.

    Args:
        run_dir: A run directory.
    """
    rows = read_rows(run_dir)
    reward = series(rows, "rollout", "reward/mean")
    lines = [f"run {run_dir.name}: {len(reward)} steps", ""]
    if len(reward):
        lines += ["mean reward", *chart(reward), "", *_facts(rows, reward), ""]
    else:
        lines += ["no finished step yet", ""]
    return "\n".join(lines + _files(run_dir))


def text_report(run_dir: Path) -> str:
    """Render the summary and one line per further curve.

    Args:
        run_dir: A run directory.

    Raises:
        UsageError: It is not one.
    """
    if not (run_dir / "config.resolved.toml").is_file():
        raise UsageError(f"{run_dir} is not a run directory (it has no config.resolved.toml)")
    rows = read_rows(run_dir)
    lines = [summary(run_dir), "", "curves"]
    for title, stream, name in PANELS:
        data = series(rows, stream, name)
        if len(data):
            ends = f"{data.values[0]:.4g} -> {data.values[-1]:.4g}"
            lines.append(f"  {title:<24}{sparkline(data.values):<34}{ends}")
    return "\n".join(lines)


def draw(run_dirs: list[Path], target: Path) -> None:
    """Draw the curves of one or several runs into one PNG.

    Args:
        run_dirs: Run directories; each is one line of every panel.
        target: File to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(3, 3, figsize=(13, 9), constrained_layout=True)
    axes = list(grid.flat)
    for run_dir in run_dirs:
        rows = read_rows(run_dir)
        for axis, (_, stream, name) in zip(axes, PANELS, strict=False):
            data = series(rows, stream, name)
            axis.plot(data.steps, data.values, linewidth=1.3, label=run_dir.name)
        for env, data in accuracies(rows).items():
            axes[-1].plot(data.steps, data.values, marker="o", label=f"{run_dir.name}: {env}")
    for axis, title in zip(axes, [*(panel[0] for panel in PANELS), "greedy accuracy"], strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
    if axes[-1].lines:
        axes[-1].legend(fontsize=8)
    if len(run_dirs) > 1:
        axes[0].legend(fontsize=8)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _facts(rows: list[dict[str, Any]], reward: Series) -> list[str]:
    facts = [("reward, first tenth -> last tenth", f"{reward.first_tenth():.3f} -> {reward.last_tenth():.3f}")]
    variance = series(rows, "critic", "value/explained_variance")
    if len(variance):
        facts.append(("explained variance, last tenth", f"{variance.last_tenth():.3f}"))
    staleness = series(rows, "rollout", "rollout/staleness")
    if len(staleness):
        facts.append(("staleness, mean (versions)", f"{sum(staleness.values) / len(staleness):.2f}"))
    for env, data in accuracies(rows).items():
        if len(data):
            facts.append((f"greedy accuracy on {env}", f"{data.values[0]:.3f} -> {data.values[-1]:.3f}"))
    facts += [("ALARM", text) for text in _alarms(rows)]
    dropped = _dropped(rows)
    if dropped:
        facts.append(("rollouts dropped", ", ".join(f"{cause} {count}" for cause, count in dropped.items())))
    if rows:
        facts.append(("training time", f"{max(row.get('time_s', 0.0) for row in rows):.0f} s"))
    return [f"  {name:<36}{text}" for name, text in facts]


def _alarms(rows: list[dict[str, Any]]) -> list[str]:
    """Each alarm with the steps that it was on in."""
    prefix = "alarm/"
    steps: dict[str, list[int]] = {}
    for row in rows:
        for key in row:
            if key.startswith(prefix):
                steps.setdefault(key.removeprefix(prefix), []).append(row["step"])
    return [f"{name} in {len(on)} step(s), {min(on)} to {max(on)}; events.jsonl says why" for name, on in steps.items()]


def _dropped(rows: list[dict[str, Any]]) -> dict[str, int]:
    prefix = "rollout/dropped/"
    totals: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(prefix) and value:
                totals[key.removeprefix(prefix)] = totals.get(key.removeprefix(prefix), 0) + round(value)
    return totals


def _size_of(folder: Path) -> str:
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


def _files(run_dir: Path) -> list[str]:
    notes = {
        "metrics.jsonl": "one row a step and stream",
        "traces.jsonl": "some rollouts, token by token",
        "rollouts": f"every batch as it was scored, {_size_of(run_dir / 'rollouts')}: what `counterpoint replay` reads",
        "checkpoints": "commits: what --resume goes on from and `counterpoint export` reads",
        "weights": "policy snapshots (Hugging Face folders)",
        "logs": "one log a process",
        "config.resolved.toml": "the whole configuration",
    }
    found = [(name, note) for name, note in notes.items() if (run_dir / name).exists()]
    return [f"files in {run_dir}", *(f"  {name:<22}{note}" for name, note in found)]
