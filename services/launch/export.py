"""What `counterpoint export` takes out of a run directory, decided before torch is imported.

Notable:
- A commit holds both roles. Where a run has none yet, its newest snapshot is the policy all the same; a critic is
  nowhere else.
- What the command line got wrong is 64; a run that holds nothing to export is 78.
"""

from __future__ import annotations

import re
from pathlib import Path

from services.config.schema import load_resolved
from services.runtime.commits import Commits
from services.wire.errors import ConfigError, UsageError

MODULE = "services.training.export_run"
_SNAPSHOT = re.compile(r"v(\d{6,})")


def export_words(run_dir: Path, role: str, step: int | None, out: Path) -> list[str]:
    """Arguments of the child process that reads and writes the tensors.

    Args:
        run_dir: A run directory.
        role: "policy" or "critic".
        step: Finished steps of the wanted commit (or version of the snapshot); None = the newest.
        out: Folder to make.

    Raises:
        UsageError: no run there, a critic of a run without one, a step that is not there, or a target in use.
        ConfigError: the run holds nothing of this role yet.
    """
    if not (run_dir / "config.resolved.toml").is_file() or not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is no run directory")
    if role == "critic" and load_resolved(run_dir / "config.resolved.toml").value is None:
        raise UsageError(f"--role critic: {run_dir} trained without a critic")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name a new folder")
    steps = Commits(run_dir / "checkpoints").steps()
    if steps:
        return _words(run_dir, role, "--commit", _chosen(step, steps, f"{run_dir} has no commit of step"), out)
    if role == "critic":
        what = f"{run_dir} holds no commit, and a critic is saved nowhere else"
        raise ConfigError([f"checkpoint.interval_steps: {what}; fix: train on with it set"])
    versions = _snapshots(run_dir / "weights")
    if not versions:
        what = f"{run_dir} holds neither a commit nor a snapshot of the policy"
        raise ConfigError([f"checkpoint.interval_steps: {what}; fix: let it finish a step"])
    missing = f"{run_dir} has no commit, and no snapshot of version"
    return _words(run_dir, role, "--snapshot", _chosen(step, versions, missing), out)


def _words(run_dir: Path, role: str, kind: str, number: int, out: Path) -> list[str]:
    return [str(run_dir), "--role", role, kind, str(number), str(out)]


def _chosen(step: int | None, known: list[int], missing: str) -> int:
    if step is None:
        return known[0]
    if step not in known:
        raise UsageError(f"--step {step}: {missing} {step}; there are {', '.join(map(str, sorted(known)))}")
    return step


def _snapshots(weights: Path) -> list[int]:
    """Versions, newest first."""
    found = [_SNAPSHOT.fullmatch(path.name) for path in weights.glob("v*")]
    return sorted((int(match[1]) for match in found if match), reverse=True)
