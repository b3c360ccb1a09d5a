"""`[slurm]`: how a run with `deployment.kind = "slurm"` is submitted, and what its nodes need before Python starts.

Notable:
- Every value ends up in a shell script, so each passes an allow-list of characters here and is quoted there. Only
  `setup` is shell, by its nature: its lines are the user's own.
- What the keys cannot say, `extra` (lines of sbatch), `srun` (words of every step) and `template` (the whole script)
  can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from services.config.base import Section
from services.config.toml_lines import KeyPath

SlurmProblem = tuple[KeyPath, str, str, tuple[KeyPath, ...]]
"""Path, what is wrong, the fix, and further paths that were read."""

_NAME = re.compile(r"[A-Za-z0-9_.,:+@/=\[\]-]+")
_PATH = re.compile(r"[A-Za-z0-9_.,:+@/=~-]+")
_WORD = re.compile(r"[A-Za-z0-9_.,:+@/=~\[\]{}*-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_MEMORY = re.compile(r"\d+[KMGT]?")
_EXTRA = re.compile(r"#SBATCH --?[A-Za-z][A-Za-z0-9-]*([= ][A-Za-z0-9_.,:+@/=~\[\]()&|*!-]+)?")
_ALLOWED = "letters, digits and a few of . , : + @ / = - [ ]"


class SlurmConfig(Section):
    """`[slurm]`."""

    account: str = ""
    """Who pays; empty = the site's default, as with every key here that names something."""
    partition: str = ""
    qos: str = ""
    """Quality of service, where a site tells its queues apart by it."""
    time: str = ""
    """Limit of one start, as "8:00:00" or "2-00:00:00". A run that needs more is requeued and goes on."""
    nodelist: str = ""
    """Nodes that must be among the job's, as "n[1-4]"."""
    exclude: str = ""
    """Nodes that must not."""
    exclusive: bool = True
    """Whole nodes. On shared ones CPUs and memory have to be asked for by `extra`."""
    memory: str = "0"
    """Host memory of each node, as "200G"; "0" = all of it; empty = the site's default."""
    request_gpus: bool = True
    """With `deployment.device = "cuda"`: ask for `deployment.gpus_per_node` GPUs on each node. False where a site's
    partitions hand them out by themselves, or `extra` asks."""
    extra: list[str] = []
    """More lines of the script's head, as "#SBATCH --reservation=maintenance"."""
    setup: list[str] = []
    """Shell lines before anything of ours starts, as "export NCCL_IB_HCA=mlx5". Not quoted: they are shell."""
    modules: list[str] = []
    """Environment modules to load, as "cuda/12.8"."""
    venv: str = ""
    """Virtual environment of the job, on the shared file system; empty = the interpreter that submits."""
    container: list[str] = []
    """Words before every process's command, as ["apptainer", "exec", "--nv", "/images/train.sif"]. The launcher itself
    stays outside, where srun is."""
    container_python: str = ""
    """Interpreter inside of the container; empty = the launcher's, at the same path."""
    srun: list[str] = []
    """More words for the srun of every step, as "--container-image=/images/train.sqsh"."""
    template: str = ""
    """A Jinja template in place of slurm/job.sbatch.j2."""
    signal_lead_s: int = Field(default=600, ge=30, le=65535)
    """The job is told so long before its time limit, and where the site says so before a pre-emption too. The run
    commits within `runtime.shutdown_grace_s`, which must be less."""
    requeue: bool = True
    """Put the job back into the queue when it was told to end and has committed; it goes on from there."""


def slurm_problems(section: SlurmConfig, *, shutdown_grace_s: float) -> Iterator[SlurmProblem]:
    """Why a job cannot be made of the section.

    Args:
        section: `[slurm]`.
        shutdown_grace_s: What the run may take to end.
    """
    for key, text in _single(section):
        if text and not _ALLOW[key].fullmatch(text):
            yield ("slurm", key), f"{text!r} has characters that no job script takes", f"use {_FIX[key]}", ()
    for key in ("extra", "setup", "modules", "container", "srun"):
        for index, text in enumerate(getattr(section, key)):
            if not _ALLOW[key].fullmatch(text):
                yield ("slurm", key), f"entry {index + 1}, {text!r}, cannot be used", f"use {_FIX[key]}", ()
    if section.template and not Path(section.template).is_file():
        yield ("slurm", "template"), f"there is no file {section.template}", "correct it, or delete the key", ()
    if section.signal_lead_s <= shutdown_grace_s:
        grace = ("runtime", "shutdown_grace_s")
        what = f"the job is told {section.signal_lead_s} s before its end, and the run may take {shutdown_grace_s:g} s"
        yield ("slurm", "signal_lead_s"), what, "raise it, or lower runtime.shutdown_grace_s", (grace,)


def _single(section: SlurmConfig) -> Iterator[tuple[str, str]]:
    for key in _ALLOW:
        value = getattr(section, key)
        if isinstance(value, str):
            yield key, value


_ALLOW = {
    **dict.fromkeys(("account", "partition", "qos", "nodelist", "exclude"), _NAME),
    **dict.fromkeys(("venv", "container_python", "template"), _PATH),
    **dict.fromkeys(("container", "srun"), _WORD),
    "time": _TIME,
    "memory": _MEMORY,
    "modules": _PATH,
    "extra": _EXTRA,
    "setup": re.compile(r"[^\x00-\x1f\x7f]+"),
}
_FIX = {
    **dict.fromkeys(_ALLOW, _ALLOWED),
    "time": 'minutes, "hours:minutes:seconds" or "days-hours:minutes:seconds"',
    "memory": 'a number with K, M, G or T, such as "200G"',
    "extra": 'one option a line, such as "#SBATCH --reservation=name"',
    "setup": "one shell line without control characters an entry",
}
