"""What a run will write, against what its disk has: commits, weight snapshots, the record of its rollouts.

Notable:
- Commits are the large part: 12 bytes a trained parameter of policy and critic each, and one more while one is made.
- A disk that cannot take one commit ends in exit code 73 after the first interval, so it is refused at the start. One
  that could fill up by the last step is said in the plan: the record is an upper bound, for few rollouts are full.
- Looked at where the run directory will be, in the nearest folder that is there; nothing is made.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from services.config.layers import COMMAND_LINE
from services.config.resolve import Resolved
from services.config.schema import Config
from services.launch.models import MODELS_DIR, model_source
from services.launch.supervisor import run_dir_of, site_here
from services.packing.shapes import ModelShapes, model_shapes
from services.packing.storage import commit_bytes, snapshot_bytes
from services.runtime.commits import Commits
from services.wire.errors import ConfigError

RECORD_TOKEN_BYTES, CRITIC_TOKEN_BYTES = 10, 8
"""Of a recorded token: ids, masks and log-probabilities; with a critic its value too, and what it takes."""


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes of a whole run."""

    commit: int
    num_commits: int
    """kept at once, the one that is being made included"""
    snapshot: int
    num_snapshots: int
    record: int
    """at most"""

    @property
    def total(self) -> int:
        """At the fullest moment."""
        return self.commit * self.num_commits + self.snapshot * self.num_snapshots + self.record

    def to_json(self) -> dict[str, int]:
        """Bytes and counts by name."""
        return {
            "commit_bytes": self.commit,
            "num_commits": self.num_commits,
            "snapshot_bytes": self.snapshot,
            "num_snapshots": self.num_snapshots,
            "record_bytes": self.record,
            "total_bytes": self.total,
        }


def estimate_disk(config: Config, shapes: ModelShapes) -> DiskEstimate:
    """What a run takes on disk.

    Args:
        config: The resolved configuration.
        shapes: Of the model.
    """
    orchestrator, kept = config.orchestrator, config.checkpoint
    commit = commit_bytes(shapes, config.policy)
    if config.value is not None:
        commit += commit_bytes(shapes, config.value)
    num_made = 1 + (orchestrator.max_steps // kept.interval_steps if kept.interval_steps else 0)
    num_for_good = orchestrator.max_steps // kept.keep_every_steps if kept.keep_every_steps else 0
    token_bytes = RECORD_TOKEN_BYTES + (CRITIC_TOKEN_BYTES if config.value is not None else 0)
    longest = max(env.max_trace_tokens for env in config.env)
    tokens = orchestrator.max_steps * orchestrator.batch_size * longest
    return DiskEstimate(
        commit=commit,
        num_commits=min(num_made, kept.keep_last + 1 + num_for_good),
        snapshot=snapshot_bytes(shapes, config.policy),
        num_snapshots=config.run.keep_snapshots + 1,
        record=token_bytes * tokens if config.run.record else 0,
    )


def free_bytes(folder: Path) -> int:
    """What a run in this folder, which may be absent, can write."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    return shutil.disk_usage(there).free


def shapes_of(config: Config) -> ModelShapes | None:
    """The model's shapes, where its files say them; the tiny model's before it is made."""
    site = site_here()
    model = model_source(config.model.path, root=site.root, models_dir=MODELS_DIR, python=site.python)
    return model_shapes(model.dir if model.is_complete else None)


def refuse_where_no_commit_fits(resolved: Resolved) -> None:
    """End before anything starts where the disk cannot take one commit.

    Raises:
        ConfigError: With the place of `run.dir`.
    """
    config = resolved.config
    shapes, run_dir = shapes_of(config), run_dir_of(config)
    if shapes is None:
        return
    problem = commit_problem(estimate_disk(config, shapes).commit, free_bytes(run_dir), run_dir)
    if problem is not None:
        origin = resolved.origins.get(("run", "dir"), "")
        place = origin if ":" in origin or origin == COMMAND_LINE else "default"
        raise ConfigError([f"{place}: run.dir: {problem}"])


def commit_problem(commit: int, free: int, run_dir: Path) -> str | None:
    """Why no commit fits, with the fix; None where one does."""
    if commit <= free:
        return None
    what = f"one commit takes {readable(commit)}, and {readable(free)} are free at {run_dir}"
    return f"{what}; fix: free some, or choose another disk with --run.dir DIR"


def earlier_commits(run_dir: Path) -> list[int]:
    """Steps of the commits that `--resume` could go on from, newest first."""
    return Commits(run_dir / "checkpoints").steps()


def readable(num_bytes: int) -> str:
    """Bytes for people."""
    if num_bytes >= 2**40:
        return f"{num_bytes / 2**40:.2f} TiB"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
