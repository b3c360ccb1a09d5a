"""What the benchmarks share: best-of-n timing, and the line that says where it was taken."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True)
class Timing:
    """The best of several repetitions; the two need not be of the same one."""

    wall_s: float
    cpu_s: float
    """the process's own time, all threads together"""


def timed(work: Callable[[], Any], repeats: int) -> Timing:
    """Time `work` `repeats` times, after one that does not count where there are several."""
    if repeats > 1:
        work()
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Timing(min(walls), min(cpus))


def machine(command: str, packages: Sequence[str], load: float) -> str:
    """A paragraph with command, date, machine and versions; `load` is the load average when the benchmark began."""
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    cores = os.cpu_count() or 1
    busy = f"busy (load {load:.1f}: compare CPU times)" if load > 0.5 * cores else f"idle (load {load:.1f})"
    return (
        f"Command: `{command}`. Date: {time.strftime('%Y-%m-%d')}. Machine: {_processor()}, {cores} cores, {busy}. "
        f"Python {platform.python_version()}, {versions}."
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{platform.machine()} {names[0]}" if names else platform.machine()
