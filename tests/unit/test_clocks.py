"""Wall clocks may jump: they are written down for people, and nothing waits by them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN_DOWN = {
    "services/runtime/lifecycle.py",  # when a process failed: the earliest is named
    "services/runtime/marker.py",  # when a commit was made
    "services/launch/rundir.py",
    "orchestrator/routing.py",
    "orchestrator/checkpointer.py",
    "orchestrator/alarms.py",
    "orchestrator/turns.py",
}
"""Events with their time."""
COMPARED = {"services/runtime/leases.py"}
"""How old another host's lease is; ASSUMPTIONS.md says so."""
WALL_CLOCKS = {
    "time.time",
    "time.time_ns",
    "time.localtime",
    "time.gmtime",
    "datetime.now",
    "datetime.utcnow",
    "date.today",
}


def users_of_a_wall_clock() -> set[str]:
    found = set()
    for package in ("services", "orchestrator", "value_service", "policy_trainer"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and any(ast.unparse(node).endswith(clock) for clock in WALL_CLOCKS):
                    found.add(str(path.relative_to(ROOT)))
                if isinstance(node, ast.ImportFrom) and node.module == "time":
                    assert not {name.name for name in node.names} & {"time", "time_ns"}, path
    return found


def test_a_wall_clock_is_written_down_and_never_waited_by() -> None:
    assert users_of_a_wall_clock() <= WRITTEN_DOWN | COMPARED
    for name in WRITTEN_DOWN & users_of_a_wall_clock():
        for line in (ROOT / name).read_text().splitlines():
            assert "time.time()" not in line or "time_s" in line, (name, line)
