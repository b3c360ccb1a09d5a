"""The supervisor: make the run directory, start the processes, watch them, end them all, name what failed first.

Notable:
- The orchestrator's exit 0 is the normal end. Any other end of any process is a failure and ends the run, but for a
  lost engine behind a router, or part of the router: these are started again (`replacements.py`).
- On a failure the supervisor waits a moment for the root: a process that lost its neighbour often ends before the
  neighbour's own death is visible through torchrun.
- Ports lost to a foreign program between choice and bind: all ports are chosen anew and everything starts again, at
  most five times.
- First SIGINT or SIGTERM, to this process or any other of the run: the orchestrator is asked to commit, then all end,
  within `runtime.shutdown_grace_s`. Second: at once.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Protocol

from services.config.ports import fixed_ports
from services.config.schema import Config
from services.launch.blame import Blame, find_blame, ranks_were_told
from services.launch.fleet import Fleet
from services.launch.machines import LocalMachine, LostPorts, Machines, Ports
from services.launch.models import MODELS_DIR, ModelSource, model_source
from services.launch.planner import Plan, ProcessPlan, Site, plan, process_env
from services.launch.replacements import Replacements
from services.launch.rundir import append_event, create_run_dir, hold_run_dir, write_context
from services.runtime.auth import make_secrets
from services.runtime.commits import Commits
from services.runtime.durable import rename_dir
from services.runtime.lifecycle import request_path
from services.runtime.roots import project_root
from services.wire.errors import EXIT_DEPENDENCY_LOST, EXIT_DONE, EXIT_PREEMPTED, ConfigError

MAX_PORT_TRIES = 5
POLL_S = 0.1
_LOOK_INTERVAL_S = 0.5
COMMIT_SHARE = 0.7
"""Of `runtime.shutdown_grace_s`: what a commit on the way out may take."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_SETTLE_S = 4.0
"""How long to look for the root of a failure when only its consequences are visible."""


class View(Protocol):
    """What shows a run to a person."""

    def say(self, message: str) -> None:
        """Print one line."""
        ...

    def begin(self, plan: Plan) -> None:
        """The processes have been started."""
        ...

    def tick(self) -> None:
        """Called about ten times a second while the run is on."""
        ...

    def end(self) -> None:
        """The run has ended; leave the terminal as it was."""
        ...


@dataclass
class Attempt:
    """How one start of the fleet ended."""

    exit_code: int = EXIT_DONE
    blame: Blame | None = None
    lost_ports: LostPorts | None = None


class Signals:
    """Counts SIGINT and SIGTERM; restores the old handlers when closed."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def twice(self) -> bool:
        """Whether a second signal asked for the immediate end."""
        return self.count > 1

    def close(self) -> None:
        """Put the old handlers back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)


def run_dir_of(config: Config) -> Path:
    """The run directory, absolute."""
    return Path(config.run.dir).resolve()


def site_here() -> Site:
    """This checkout, this interpreter."""
    return Site(
        project_root(),
        sys.executable,
        os.environ.get("PYTHONPATH", ""),
        torch_version=_torch_version(),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # a launcher that stays outside of the processes' container
        return ""


def model_of(config: Config, machines: Machines | None = None) -> ModelSource:
    """Where the run's model comes from."""
    site = machines.site if machines is not None else site_here()
    return model_source(config.model.path, root=site.root, models_dir=MODELS_DIR, python=site.python)


def supervise(
    config: Config,
    view: View,
    *,
    overwrite: bool = False,
    lay_out: Callable[..., Plan] = plan,
    machines: Machines | None = None,
    is_made: bool = False,
) -> int:
    """Carry out a run from nothing to its end.

    Args:
        config: The resolved configuration.
        view: Shows progress.
        overwrite: Remove an earlier run in the same directory.
        lay_out: Makes the plan, as `plan` does.
        machines: Where the processes start; None = on this one.
        is_made: The run directory has been made, and is fresh.

    Returns:
        The exit code: 0; after a signal 75 where there is a commit to resume from, else 130 or 143; else that of the
        process that failed first.

    Raises:
        ConfigError: The run directory is in use.
        CannotWrite: It cannot be made.
    """
    run_dir = run_dir_of(config)
    signals = Signals()
    try:
        with hold_run_dir(run_dir):
            if not is_made:
                create_run_dir(run_dir, config, overwrite=overwrite)
            model = model_of(config, machines)
            code = Supervisor(config, run_dir, model, view, signals, lay_out=lay_out, machines=machines).run()
            append_event(run_dir, "run_ended", exit_code=code)
            return code
    finally:
        view.end()
        signals.close()


class Supervisor:
    """One run from its fresh directory to its end."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        model: ModelSource,
        view: View,
        signals: Signals,
        *,
        lay_out: Callable[..., Plan] = plan,
        machines: Machines | None = None,
    ) -> None:
        self._lay_out = lay_out
        self._machines = machines or LocalMachine(site_here())
        self._site = self._machines.site
        self._model = model
        self._config = config
        self._run_dir = run_dir
        self._view = view
        self._signals = signals
        self._run_id = f"{config.run.name}-{secrets.token_hex(4)}"

    def run(self) -> int:
        """Make the model, start everything, stay to the end; returns the exit code."""
        if not self._model.is_complete:
            attempt = self._make_model(self._model)
            if attempt.exit_code != EXIT_DONE:
                return self._report(attempt)
        avoid = set(fixed_ports(self._config).values())
        attempt = Attempt()
        for _ in range(MAX_PORT_TRIES):
            attempt = self._start_and_watch(avoid)
            if not attempt.lost_ports:
                break
            avoid |= {port for port, _ in attempt.lost_ports.values()}
            append_event(self._run_dir, "ports_lost", ports={k: v[0] for k, v in attempt.lost_ports.items()})
        return self._report(attempt)

    def _make_model(self, model: ModelSource) -> Attempt:
        """Make the model folder in a child; it gets its name only when it is complete."""
        part = model.dir.with_name(f"{model.dir.name}.{os.getpid()}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        env = process_env(self._config, self._site, [])
        process = ProcessPlan("model", model.make_argv(part), env, 1)
        self._view.say(f"making the model {self._config.model.path} (once; kept in {model.dir})")
        started = time.monotonic()
        attempt = self.watch([process], final="model")
        if attempt.exit_code == EXIT_DONE and not model.dir.is_dir():
            rename_dir(part, model.dir)
            self._view.say(f"made it in {time.monotonic() - started:.0f} s")
        return attempt

    def _start_and_watch(self, avoid: set[int]) -> Attempt:
        with self._machines.reserve(self._config, avoid, self._run_id) as held:
            layout = self._lay_out(
                self._config,
                held.ports,
                hosts=self._machines.hosts,
                run_dir=self._run_dir,
                run_id=self._run_id,
                epoch=1,
                model=self._model,
                site=self._site,
            )
            lost = held.taken()
            if lost:
                return Attempt(EXIT_DEPENDENCY_LOST, lost_ports=self._retryable(lost))
            make_secrets(layout.context.token_file)
            write_context(layout.context)
            return self.watch(layout.processes, final=layout.final, layout=layout, held=held)

    def watch(
        self, processes: list[ProcessPlan], *, final: str, layout: Plan | None = None, held: Ports | None = None
    ) -> Attempt:
        """Start processes and stay until all of them have ended.

        Args:
            processes: What to start, all at once.
            final: The process whose exit 0 is the normal end.
            layout: The plan they belong to; None for a process before the run.
            held: Its ports.
        """
        fleet = Fleet(self._run_dir, self._run_id)
        try:
            for process in processes:
                fleet.start(self._machines.placed(process))
            append_event(self._run_dir, "processes_started", pids=self._note_pids(fleet, layout))
            if layout is not None:
                self._view.begin(layout)
            self._wait(fleet, processes, layout)
            return self._conclude(fleet, processes, final, held)
        finally:
            fleet.kill()
            self._machines.end_leftovers()

    def _note_pids(self, fleet: Fleet, layout: Plan | None) -> dict[str, int]:
        pids = fleet.pids()
        if layout is not None:
            write_context(layout.context.model_copy(update={"pids": {"launcher": os.getpid(), **pids}}))
        return pids

    def _wait(self, fleet: Fleet, processes: list[ProcessPlan], layout: Plan | None) -> None:
        """Return at a signal, at an exit, or when a rank is known to have failed (its torchrun agent ends later).

        A rank that only lost a peer counts: the peer may be frozen, and the agent would wait half a minute for it. What
        the run can lose for a while is started again instead.
        """
        replacements = Replacements(
            self._run_dir,
            processes,
            lambda lost: fleet.start(self._machines.placed(lost)),
            take_turns=self._config.deployment.sharing == "time",
        )
        next_look = time.monotonic() + _LOOK_INTERVAL_S
        while not self._signals.count:
            if replacements.look(fleet):
                self._note_pids(fleet, layout)
            if fleet.exits():
                return
            self._view.tick()
            time.sleep(POLL_S)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_INTERVAL_S
                if find_blame(self._run_dir, processes, {}, fleet.log_starts) is not None:
                    return

    def _conclude(self, fleet: Fleet, processes: list[ProcessPlan], final: str, held: Ports | None) -> Attempt:
        grace_s = self._config.runtime.shutdown_grace_s
        if self._signals.count or self._was_asked_to_end(fleet, processes, final):
            return self._preempt(fleet, final, time.monotonic() + grace_s)
        if fleet.exits().get(final) == EXIT_DONE:
            late = fleet.stop(grace_s, self._signals.twice)
            append_event(self._run_dir, "finished", killed=late)
            return Attempt()
        lost = self._retryable(held.lost(fleet.own_pids())) if held is not None else {}
        blame = self._settle(fleet, processes)
        if self._was_asked_to_end(fleet, processes, final):  # seen later than the loss it was to others
            return self._preempt(fleet, final, time.monotonic() + grace_s)
        append_event(self._run_dir, "process_failed", exits=fleet.exits(), first=str(blame))
        late = fleet.stop(grace_s, lambda: self._signals.count > 0)
        append_event(self._run_dir, "stopped", killed=late)
        return Attempt(blame.exit_code if blame else EXIT_DEPENDENCY_LOST, blame, lost)

    def _was_asked_to_end(self, fleet: Fleet, processes: list[ProcessPlan], final: str) -> bool:
        """Did processes end because somebody told one to, by SIGTERM or SIGINT, rather than fail or just leave."""
        exits, starts = fleet.exits(), fleet.log_starts
        blame = find_blame(self._run_dir, processes, {}, starts)
        told = {each.name for each in processes if self._says_it_was_told(each)}
        unready = {each.name for each in processes if ranks_were_told(self._run_dir, each, starts)}
        if not (exits or unready) or (blame is not None and (blame.is_primary or not unready)):
            return False
        return all(
            code in (EXIT_PREEMPTED, *STOPPED)
            or (code == EXIT_DONE and name != final and name in told)
            or name in unready
            or (code == EXIT_DEPENDENCY_LOST and bool(unready))  # it lost those
            for name, code in exits.items()
        )

    def _says_it_was_told(self, process: ProcessPlan) -> bool:
        return any(request_path(self._run_dir, name).exists() for name in process.rank_names)

    def _preempt(self, fleet: Fleet, final: str, until: float) -> Attempt:
        """Let the run commit between two steps while its trainers still live, then end everything.

        The share of the grace time that it may take leaves the rest of the run enough to end in order.
        """
        commit_until = until - (1 - COMMIT_SHARE) * self._config.runtime.shutdown_grace_s
        fleet.ask_to_end(final)
        while final not in fleet.exits() and time.monotonic() < commit_until and not self._signals.twice():
            self._view.tick()
            time.sleep(POLL_S)
        late = fleet.stop(max(0.0, until - time.monotonic()), self._signals.twice)
        number = self._signals.first or signal.SIGTERM
        steps = Commits(self._run_dir / "checkpoints").steps()
        append_event(self._run_dir, "stopped_by_signal", signal=number, killed=late, commits=steps)
        return Attempt(EXIT_PREEMPTED if steps else 128 + number)

    def _settle(self, fleet: Fleet, processes: list[ProcessPlan]) -> Blame | None:
        """Look for the root of a failure; give up after a moment, or when every process has ended."""
        until = time.monotonic() + _SETTLE_S
        while True:
            all_ended = len(fleet.exits()) == len(processes)
            blame = find_blame(self._run_dir, processes, fleet.exits(), fleet.log_starts)
            if (blame is not None and blame.is_primary) or all_ended or time.monotonic() > until or self._signals.count:
                return blame
            time.sleep(POLL_S)

    def _retryable(self, lost: LostPorts) -> LostPorts:
        """Refuse to go on when a lost port is one that the configuration fixes."""
        fixed = fixed_ports(self._config)
        problems = [
            f"{name.replace('_', ' ')} {port} is fixed in the configuration but taken (by pid {owner or 'unknown'}); "
            "fix: free it, or remove the key so that a port is chosen"
            for name, (port, owner) in lost.items()
            if name in fixed
        ]
        if problems:
            raise ConfigError(problems)
        return lost

    def _report(self, attempt: Attempt) -> int:
        self._view.end()
        if attempt.lost_ports:
            listed = ", ".join(f"{name} {p} (pid {o or 'unknown'})" for name, (p, o) in attempt.lost_ports.items())
            self._view.say(f"ports were taken by other programs {MAX_PORT_TRIES} times in a row; the last: {listed}")
            return EXIT_DEPENDENCY_LOST
        if attempt.blame is not None:
            self._view.say(str(attempt.blame))
        elif attempt.exit_code == EXIT_PREEMPTED:
            self._view.say(f"stopped; everything of {self._run_dir} has ended; go on with --resume")
        elif attempt.exit_code != EXIT_DONE:
            self._view.say(f"stopped (exit code {attempt.exit_code}); everything of {self._run_dir} has ended")
        return attempt.exit_code
