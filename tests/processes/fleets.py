"""Runs of small scripts in place of the real processes, for tests of the supervisor.

As a program: `python -m tests.processes.fleets DIR '{"orchestrator": "script", ...}' GRACE_S` supervises them and ends
with the launcher's exit code.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.models import ModelSource
from services.launch.planner import Plan, ProcessPlan, plan
from services.launch.rundir import create_run_dir
from services.launch.supervisor import Signals, Supervisor

CONFIG = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[runtime]
shutdown_grace_s = 3.0
"""
RECORD = """
import json, os, pathlib, sys, time
def fail(name, code, cause, secondary=False, delay_s=0.0):
    time.sleep(delay_s)
    path = pathlib.Path(RUN_DIR) / "logs" / "failures" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    row = dict(name=name, pid=os.getpid(), exit_code=code, cause=cause, time_s=time.time(), secondary=secondary)
    path.write_text(json.dumps(row))
    sys.exit(code)
"""
FOREVER = "import time; time.sleep(600)"


class Said:
    """A view that keeps what was said and can act when the processes have started."""

    def __init__(self, on_begin: Callable[[Plan], None] | None = None) -> None:
        self.lines: list[str] = []
        self.num_begins = 0
        self._on_begin = on_begin

    def say(self, message: str) -> None:
        self.lines.append(message)
        sys.stderr.write(message + "\n")
        sys.stderr.flush()

    def begin(self, plan: Plan) -> None:
        self.num_begins += 1
        self.say(f"begun {plan.context.dir}")
        if self._on_begin is not None:
            self._on_begin(plan)

    def tick(self) -> None:
        pass

    def end(self) -> None:
        pass


def small_config(folder: Path, *overrides: tuple[str, str]) -> Config:
    """A configuration that needs no model on disk."""
    path = folder / "small.toml"
    path.write_text(CONFIG)
    return resolve([path], [("run.dir", str(folder / "run")), *overrides]).config


def supervisor(config: Config, scripts: dict[str, str], view: Said, signals: Signals) -> Supervisor:
    """A supervisor whose processes are scripts; each finds its ports in `PORTS` and `RECORD`'s `fail`."""
    run_dir = Path(config.run.dir)
    create_run_dir(run_dir, config, overwrite=False)

    def lay_out(config: Config, ports: dict[str, int], **rest) -> Plan:
        layout = plan(config, ports, **rest)
        processes = [
            _script(process, scripts[process.name], run_dir) for process in layout.processes if process.name in scripts
        ]
        return dataclasses.replace(layout, processes=processes)

    return Supervisor(config, run_dir, ModelSource(run_dir), view, signals, lay_out=lay_out)


def _script(process: ProcessPlan, script: str, run_dir: Path) -> ProcessPlan:
    body = f"RUN_DIR = {str(run_dir)!r}\nPORTS = {process.ports!r}\n{RECORD}\n{script}"
    return dataclasses.replace(process, argv=[sys.executable, "-c", body])


def main() -> int:
    """Supervise the scripts given on the command line."""
    folder, scripts, grace_s = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    config = small_config(folder, ("runtime.shutdown_grace_s", grace_s))
    return supervisor(config, scripts, Said(), Signals()).run()


if __name__ == "__main__":
    sys.exit(main())
