"""Cases that need a real process group: functions that every rank runs, all of them in one torchrun a world size.

Notable:
- A case is `name(ranks, folder)`: it asserts on every rank; a module of cases registers them with `@case(world)`.
- `tests/processes/group_worker.py` runs them, `tests/processes/test_groups.py` shows each as a test.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from services.training.ranks import Ranks

Case: TypeAlias = Callable[[Ranks, Path], None]
CASES: dict[tuple[int, str], Case] = {}
"""By world size and name."""


def case(*worlds: int) -> Callable[[Case], Case]:
    """Register a function for these world sizes."""

    def register(function: Case) -> Case:
        for world in worlds:
            name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"
            assert (world, name) not in CASES, f"two cases are called {name}"
            CASES[world, name] = function
        return function

    return register


def load_all() -> None:
    """Import every module of cases."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
