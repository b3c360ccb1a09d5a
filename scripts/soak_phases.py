"""One real run to be killed: started, watched until it is in a phase, and one process of it ended by SIGKILL there.

Notable:
- Phases are seen from outside: status pages asked every few milliseconds, and unfinished folders on disk.
- The victim is frozen first and the phase looked for again; only if it is still on does the SIGKILL follow. Where only
  the victim could say, its last word, some milliseconds old, must do: the cell is marked so.
- Ranks are found below their torchrun agent by LOCAL_RANK in their environment, so also before they report anything.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.launch.models import MODELS_DIR, model_source
from services.runtime.auth import run_token
from services.runtime.durable import rename_dir
from services.runtime.guard import descendants
from services.runtime.ports import foreign_owner, is_free
from services.wire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/demo/sao.toml"
MAX_STEPS = 6
INTERVAL_STEPS = 2
UPDATES_PER_BATCH = 8
SMALL = (
    *("--orchestrator.batch_size", "16", "--orchestrator.max_steps", str(MAX_STEPS), "--eval", "none"),
    *("--checkpoint.interval_steps", str(INTERVAL_STEPS)),
    # long enough to be seen
    *("--value.updates_per_batch", str(UPDATES_PER_BATCH), "--policy.mini_batches", "4"),
    *("--inference.max_num_seqs", "4"),
)
SHARED_VARIABLE = "COUNTERPOINT_SOAK_SHARED"
"""Set in a soak's environment, its runs are time-shared: one rank a role, so that engine and trainers are as many."""
IS_SHARED = SHARED_VARIABLE in os.environ
NUM_RANKS = {"critic": 1 if IS_SHARED else 2, "policy": 1}
if IS_SHARED:
    SMALL = (
        *SMALL,
        *("--deployment.sharing", "time", "--deployment.num_value_gpus", "none"),
        *("--orchestrator.max_off_policy_steps", "0"),
    )
POLL_S = 0.002
RUN_ID_MARK = b"COUNTERPOINT_RUN_ID="
PHASE_DEADLINE_S = 150.0
_ASK_DEADLINE_S = 2.0


@dataclass(frozen=True)
class Victim:
    """A process of the run."""

    name: str
    """As in the matrix."""
    process: str
    """As in `run.json`."""
    rank: int | None = None
    """Of a torchrun group; None = the agent, or a process without ranks."""
    service: str = ""
    """What it answers for."""
    blamed: str = ""
    """What the launcher must call it; "" = it ends without a word."""


VICTIMS = (
    Victim("launcher", "launcher"),
    Victim("orchestrator", "orchestrator", None, "orchestrator", "orchestrator"),
    Victim("critic-rank-0", "value", 0, "critic", "value-0"),
    *([] if IS_SHARED else [Victim("critic-rank-1", "value", 1, "", "value-1")]),
    Victim("critic-agent", "value", None, "", "value"),
    Victim("policy-rank-0", "policy", 0, "policy", "policy-0"),
    Victim("policy-agent", "policy", None, "", "policy"),
    Victim("inference", "inference", None, "inference", "inference"),
)
PHASES = ("load", "idle", "rollout", "score", "critic-step", "policy-step", "publishing", "commit", "drain")


class Missed(Exception):
    """The run went past the phase before anybody saw it."""


@dataclass
class Page:
    """One status page, asked over one connection."""

    url: str
    path: str
    token_file: str | None = None
    _connection: http.client.HTTPConnection | None = None

    def ask(self) -> dict[str, Any] | None:
        """Its JSON ({} where it has none); None while nobody answers with 200."""
        address = urlsplit(self.url)
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(
                    address.hostname or "", address.port, timeout=_ASK_DEADLINE_S
                )
            token = run_token(self.token_file)
            headers = {"Authorization": token.header()} if token is not None else {}
            self._connection.request("GET", self.path, headers=headers)
            reply = self._connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException, ConfigError):  # the last: the token of a new start is being made
            self.close()
            return None
        if reply.status != 200:
            return None
        return json.loads(body) if body.startswith(b"{") else {}

    def close(self) -> None:
        """Forget the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@dataclass
class Run:
    """One start of the command line in a run directory."""

    dir: Path
    log: Path
    process: subprocess.Popen[bytes]
    pages: dict[str, Page] = field(default_factory=dict)

    @classmethod
    def start(cls, run_dir: Path, seed: int, *words: str) -> Run:
        """Start `counterpoint run`; its output goes beside the run directory."""
        log = run_dir.with_name(f"{run_dir.name}{''.join(words)}.out")
        argv = [sys.executable, "-m", "services.launch", "run", CONFIG, "--run.dir", str(run_dir), *SMALL]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*argv, "--seed", str(seed), *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"COLUMNS": "200"},
            )
        return cls(run_dir, log, process)

    @property
    def context(self) -> dict[str, Any]:
        """`run.json`; {} before it is there."""
        path = self.dir / "run.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def output(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def ended(self, within_s: float) -> int | None:
        """Exit code; None if it has not ended in time."""
        try:
            return self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it, whatever it does; its guards end the rest."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for page in self.pages.values():
            page.close()

    def open_pages(self) -> None:
        """Know where to ask; call it once `run.json` is there."""
        context = self.context
        token_file = context["token_file"]
        self.pages = {
            "orchestrator": Page(context["orchestrator_url"], "/status", token_file),
            "policy": Page(context["policy_url"], "/status", token_file),
            "critic": Page(context["value_url"], "/status", token_file),
            "inference": Page(context["inference_urls"][0], "/health"),
        }

    def pid_of(self, victim: Victim) -> int | None:
        """The process to kill; None while it is not there."""
        if victim.process == "launcher":
            return self.process.pid
        pid = self.context.get("pids", {}).get(victim.process)
        if pid is None or victim.rank is None:
            return pid
        mark = f"LOCAL_RANK={victim.rank}".encode()
        return next((child for child in descendants(pid) if mark in environment(child)), None)


def make_model() -> None:
    """Make the demo's model where runs look for it, unless it is there."""
    source = model_source("tiny:add", root=ROOT, models_dir=ROOT / MODELS_DIR)
    if not source.is_complete:
        part = source.dir.with_name(f"{source.dir.name}.{os.getpid()}.part")  # another soak may be making it too
        part.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(source.make_argv(part), cwd=ROOT, check=True)
        if not source.dir.is_dir():
            rename_dir(part, source.dir)


def environment(pid: int) -> list[bytes]:
    """A process's environment as it was started with; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def left_of(run_id: str, run_dir: Path) -> dict[int, str]:
    """Living processes that carry the run's id in their environment, or name its directory."""
    mark, found = RUN_ID_MARK + run_id.encode(), {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue  # ended meanwhile
        words = command.split(b"\0")
        if pid != os.getpid() and (str(run_dir).encode() in words or (run_id and mark in environment(pid))):
            found[pid] = b" ".join(words).decode(errors="replace")
    return found


def taken_ports(context: dict[str, Any]) -> list[int]:
    """Ports of a start that somebody still listens on; a run beside it, which may have chosen them since, aside."""
    urls = [*context.get("inference_urls", []), *(v for k, v in context.items() if k.endswith("_url") and v)]
    ports = [port for url in urls if (port := urlsplit(url).port) is not None and not is_free(port)]
    return [port for port in ports if not _is_of_another_run(foreign_owner(port, ()), context["run_id"])]


def _is_of_another_run(pid: int | None, run_id: str) -> bool:
    marks = [entry for entry in environment(pid or 0) if entry.startswith(RUN_ID_MARK)]
    return bool(marks) and marks != [RUN_ID_MARK + run_id.encode()]


# ---------------------------------------------------------------------------------------------------------------------
# Phases


def is_on(phase: str, run: Run, *, without: str = "") -> bool | None:
    """Is the run in a phase now; None where only the service `without` could say."""

    def ask(service: str) -> dict[str, Any] | None:
        return run.pages[service].ask()

    match phase:
        case "idle":
            if without:
                return None
            groups = [ask("policy"), ask("critic")]
            rested = all(g is not None and g["state"] in ("idle", "asleep") and g["steps_done"] == 0 for g in groups)
            return rested and ask("inference") is not None and ask("orchestrator") is not None
        case "rollout":
            if without == "orchestrator":
                return None
            page = ask("orchestrator")
            return page is not None and page["in_flight"] > 0  # the batch before may be training meanwhile
        case "score" | "critic-step" | "policy-step":
            service = "policy" if phase == "policy-step" else "critic"
            if without == service:
                return None
            page = ask(service)
            return page is not None and page["state"] == ("scoring" if phase == "score" else "training")
        case "publishing":
            return _is_publishing(run, without)
        case "commit":
            return bool(list((run.dir / "checkpoints").glob(".step_*.part")))
        case "drain":
            return (run.dir / "checkpoints" / f"step_{MAX_STEPS:06d}" / "COMMIT.json").is_file()
    raise ValueError(phase)


def _is_publishing(run: Run, without: str) -> bool | None:
    """A snapshot is being written, or is whole and not yet what the engines serve."""
    if list((run.dir / "weights").glob(".v*.part")):
        return True
    if without == "orchestrator":
        return None
    page = run.pages["orchestrator"].ask()
    newest = max((int(path.name[1:]) for path in (run.dir / "weights").glob("v[0-9]*")), default=0)
    return page is not None and newest > page["engine_version"]


@dataclass(frozen=True)
class Hit:
    """How a process was killed."""

    step: int
    """Batches that had been collected when the look-out for the phase began."""
    confirmed: bool
    """Was the phase still on with the victim frozen; False where only its own last word says so."""
    word_age_ms: float
    """From that word, or from the question before the freeze, to the SIGKILL."""
    at: float
    """On the monotonic clock."""


def kill_in(run: Run, victim: Victim, phase: str, dice: random.Random, attempt: int) -> Hit:
    """Wait until the run is in a phase and end the victim there, looking out from a random step on.

    Args:
        run: Just started.
        victim: Which process.
        phase: One of `PHASES`.
        dice: Draws the moment.
        attempt: Counts from 1; a later one looks out earlier.

    Raises:
        Missed: It never was, as far as could be seen.
    """
    until = time.monotonic() + PHASE_DEADLINE_S
    pid = wait_for_pid(run, victim, until)
    run.open_pages()
    if phase == "load":
        wait_while_loading(run, victim, dice.uniform(0.0, 6.0 / attempt))
        return _strike(run, pid, 0, True, time.monotonic())
    step = 0
    if phase not in ("idle", "drain"):
        step = wait_for_step(run, dice.randint(1, MAX_STEPS - 1 - attempt), until)
    if phase == "drain":
        delay_s = dice.uniform(0.0, 0.2) / 4 ** (attempt - 1)  # a fast machine is done sooner
        while not is_on(phase, run):
            pause(run, until)
        time.sleep(delay_s)
        return _strike(run, pid, MAX_STEPS, True, time.monotonic())
    while True:
        asked = time.monotonic()
        if is_on(phase, run):
            _freeze(run, pid)
            still = is_on(phase, run, without=victim.service)
            if still is not False:
                return _strike(run, pid, step, still is not None, asked)
            os.kill(pid, signal.SIGCONT)
        pause(run, until)


def wait_for_pid(run: Run, victim: Victim, until: float) -> int:
    """Stay until the victim is there."""
    while not run.context.get("pids"):
        pause(run, until)
    while (pid := run.pid_of(victim)) is None:
        pause(run, until)
    return pid


def wait_while_loading(run: Run, victim: Victim, delay_s: float) -> None:
    """At any moment up to when what the victim belongs to, or for the launcher and orchestrator anybody, is ready.

    Raises:
        Missed: It was ready before.
    """
    belongs_to = {"value": "critic", "policy": "policy", "inference": "inference"}.get(victim.process, "policy")
    time.sleep(delay_s)
    page = run.pages[belongs_to].ask()
    if page is not None and page.get("state") != "loading":
        raise Missed(f"{belongs_to} was ready already")


def wait_for_step(run: Run, wanted: int, until: float) -> int:
    """Stay until so many batches have been collected; returns how many have."""
    step = 0
    while step < wanted:
        page = run.pages["orchestrator"].ask()
        step = page["step"] if page is not None else 0
        pause(run, until)
    return step


def pause(run: Run, until: float) -> None:
    """Between two looks.

    Raises:
        Missed: The run has ended, or the time is up.
    """
    if run.process.poll() is not None:
        raise Missed(f"the run ended with {run.process.returncode}")
    if time.monotonic() > until:
        raise Missed(f"not in {PHASE_DEADLINE_S:g} s")
    time.sleep(POLL_S)


def _freeze(run: Run, pid: int) -> None:
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        raise Missed("the process had ended") from None


def _strike(run: Run, pid: int, step: int, confirmed: bool, asked: float) -> Hit:
    if (pid == run.process.pid and run.process.poll() is not None) or not environment(pid):
        raise Missed("the process had ended")  # one that nobody has reaped yet has no environment either
    os.kill(pid, signal.SIGKILL)
    now = time.monotonic()
    return Hit(step, confirmed, 1000 * (now - asked), now)
