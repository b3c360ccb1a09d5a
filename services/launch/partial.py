"""Some processes of a run without the others: for a dry run, or a test, that plays the missing ones itself.

Notable:
- The same planner, ports, run directory and guards as `counterpoint run`; only the supervisor is left out, so whoever
  asks for the processes also notices when one of them ends.
- Leaving the block ends everything and waits until it is gone.
- A group that takes turns is ready when it sleeps: whoever asks for it has to wake it.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.config.ports import fixed_ports, port_names
from services.config.schema import Config
from services.launch.blame import find_blame
from services.launch.fleet import Fleet
from services.launch.models import MODELS_DIR, model_source
from services.launch.planner import Plan, ProcessPlan, plan
from services.launch.rundir import create_run_dir, hold_run_dir, write_context
from services.launch.supervisor import run_dir_of, site_here
from services.runtime.auth import make_secrets
from services.runtime.ports import PortReservation
from services.wire.errors import ConfigError, DeadlineExceeded, DependencyLost

POLL_S = 0.1
_PROBE_DEADLINE_S = 2.0
_MAX_STATE_BYTES = 200
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the proxy settings


class PartLost(DependencyLost):
    """A process of a partial run ended; `exit_code` is what its own failure calls for."""

    def __init__(self, cause: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(cause)


@dataclass
class PartialRun:
    """What `partial_run` started."""

    plan: Plan
    processes: list[ProcessPlan]
    fleet: Fleet
    killed: list[str] = field(default_factory=list)
    """Once the block is left: processes that did not end by themselves within the grace time."""

    def exit_code(self) -> int:
        """What whoever needs these processes ends with, once one has ended or failed."""
        blame = find_blame(self.plan.context.run_dir, self.processes, self.fleet.exits())
        return blame.exit_code if blame is not None else DependencyLost.exit_code

    def failure(self) -> str | None:
        """Which process has ended or failed, and why; None while all are at work."""
        exits = self.fleet.exits()
        blame = find_blame(self.plan.context.run_dir, self.processes, exits)
        if blame is not None and (exits or blame.is_primary):
            return str(blame)
        return f"{', '.join(exits)} has ended" if exits else None


@contextmanager
def partial_run(
    config: Config,
    names: Iterable[str],
    *,
    run_id: str,
    overwrite: bool = False,
    models_dir: Path = MODELS_DIR,
    on_wait: Callable[[list[str]], None] = lambda waiting: None,
    lay_out: Callable[..., Plan] = plan,
    hurry: Callable[[], bool] = lambda: False,
) -> Iterator[PartialRun]:
    """Start the named processes of a run and wait until each is ready.

    Args:
        config: The resolved configuration.
        names: Of `inference`, `policy`, `value`, `orchestrator`.
        run_id: Identity of the run on the wire.
        overwrite: Remove an earlier run in the same directory.
        models_dir: Where made models are kept.
        on_wait: Called about ten times a second with the names not yet ready.
        lay_out: Makes the plan, as `plan` does.
        hurry: Asked while the processes end; true ends them by force.

    Raises:
        ConfigError: The run directory is in use, or the model is still to be made.
        DependencyLost: A process ended before it was ready; the message says why.
        DeadlineExceeded: One was not ready within `runtime.startup_deadline_s`.
    """
    run_dir, site = run_dir_of(config), site_here()
    model = model_source(config.model.path, root=site.root, models_dir=models_dir, python=site.python)
    if not model.is_complete:
        raise ConfigError(
            [f"model.path: {config.model.path} has not been made; fix: counterpoint make-tiny {model.dir}"]
        )
    fixed = fixed_ports(config)
    chosen = [name for name in port_names(config) if name not in fixed]
    with hold_run_dir(run_dir), PortReservation(chosen, avoid=fixed.values()) as reservation:
        create_run_dir(run_dir, config, overwrite=overwrite)
        ports = fixed | reservation.ports
        layout = lay_out(config, ports, run_dir=run_dir, run_id=run_id, epoch=1, model=model, site=site)
        make_secrets(layout.context.token_file)
        write_context(layout.context)
        wanted = set(names)
        processes = [process for process in layout.processes if process.name in wanted]
        run = PartialRun(layout, processes, Fleet(run_dir, run_id))
        try:
            for process in processes:
                run.fleet.start(process)
            _wait_ready(run, config.runtime.startup_deadline_s, on_wait)
            yield run
        finally:
            run.killed = run.fleet.stop(config.runtime.shutdown_grace_s, hurry)


def _wait_ready(run: PartialRun, deadline_s: float, on_wait: Callable[[list[str]], None]) -> None:
    ends = time.monotonic() + deadline_s
    waiting = run.processes
    while waiting := [process for process in waiting if not _answers(process.ready_url)]:
        failure = run.failure()
        if failure is not None:
            raise PartLost(failure, run.exit_code())
        if time.monotonic() > ends:
            raise DeadlineExceeded(f"{', '.join(process.name for process in waiting)} to be ready", deadline_s)
        on_wait([process.name for process in waiting])
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    try:
        with _opener.open(url, timeout=_PROBE_DEADLINE_S) as reply:
            return reply.status == 200
    except urllib.error.HTTPError as error:
        with contextlib.suppress(OSError):
            return b'"asleep"' in error.read(_MAX_STATE_BYTES)
        return False
    except OSError:  # nobody there yet, or an HTTP error: both mean "not ready"
        return False
