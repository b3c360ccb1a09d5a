"""Check that the four packages of this project come from one folder.

Notable:
- Their names are common (`services`, `orchestrator`): a foreign package of the same name earlier on the path would
  be imported in silence. `find_spec` of a top-level package imports nothing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from services.wire.errors import ConfigError

ROOT_PACKAGES = ("services", "orchestrator", "value_service", "policy_trainer")


def project_root() -> Path:
    """The folder that holds the four packages."""
    return Path(__file__).resolve().parents[2]


def check_root() -> None:
    """Raise ConfigError (exit 78) naming every package that is missing or comes from elsewhere."""
    root = project_root()
    problems = []
    for name in ROOT_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            problems.append(f"package {name} is not importable; fix: put {root} first on PYTHONPATH")
        elif Path(spec.origin).resolve().parents[1] != root:
            problems.append(f"package {name} comes from {spec.origin}; fix: put {root} first on PYTHONPATH")
    if problems:
        raise ConfigError(problems)
