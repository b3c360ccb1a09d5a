"""The supervisor with small real processes: who failed first, signals, lost ports, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.launch.rundir import hold_run_dir
from services.launch.supervisor import MAX_PORT_TRIES, Signals, supervise
from services.wire.errors import ConfigError
from tests.processes.fleets import FOREVER, Said, small_config, supervisor

ROOT = Path(__file__).parents[2]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
GRANDCHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
BIND = """
import socket
while not pathlib.Path(RUN_DIR, f"go-{PORTS['http_port']}").exists():  # the test says when
    time.sleep(0.02)
with socket.create_server(("127.0.0.1", PORTS["http_port"])):
    time.sleep(600)
"""


def with_scripts(tmp_path: Path, view: Said | None = None, **scripts: str) -> tuple[int, list[str]]:
    """Run a fleet; processes not named sleep."""
    view = view or Said()
    everybody = {name: scripts.get(name, FOREVER) for name in ("inference", "policy", "value", "orchestrator")}
    signals = Signals()
    try:
        code = supervisor(small_config(tmp_path), everybody, view, signals).run()
    finally:
        signals.close()
    return code, view.lines


def living(run_id: str) -> list[int]:
    """Processes that carry the run's id, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"COUNTERPOINT_RUN_ID={run_id}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def run_id_of(tmp_path: Path) -> str:
    return json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]


# ---------------------------------------------------------------- ends


def test_the_orchestrators_zero_is_the_normal_end_and_the_rest_is_ended(tmp_path):
    code, _ = with_scripts(tmp_path, orchestrator="time.sleep(1)", value=GRANDCHILD)
    assert code == 0
    assert living(run_id_of(tmp_path)) == []
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["processes_started", "finished"]
    pids = json.loads((tmp_path / "run" / "run.json").read_text())["pids"]
    assert set(pids) == {"launcher", "inference", "policy", "value", "orchestrator"}
    assert len(set(pids.values())) == 5


def test_a_process_that_fails_is_named_with_cause_code_and_log(tmp_path):
    code, lines = with_scripts(tmp_path, inference="fail('inference', 73, 'CannotWrite: the disk is full')")
    assert code == 73
    assert lines[-1] == (
        "inference failed first (exit code 73): CannotWrite: the disk is full; "
        f"log: {tmp_path / 'run' / 'logs' / 'inference.log'}"
    )
    assert living(run_id_of(tmp_path)) == []


def test_the_loss_of_a_neighbour_is_not_the_cause(tmp_path):
    """The orchestrator notices at once and ends first; the critic's own error comes a second later."""
    code, lines = with_scripts(
        tmp_path,
        orchestrator="fail('orchestrator', 69, 'DependencyLost: value does not answer', secondary=True)",
        value="fail('value-0', 70, 'NonFiniteError: loss', delay_s=1.5)",
    )
    assert code == 70
    assert lines[-1].startswith("value-0 failed first (exit code 70): NonFiniteError: loss")


def test_of_two_errors_the_earlier_is_named(tmp_path):
    code, lines = with_scripts(
        tmp_path,
        policy="fail('policy-1', 70, 'second', delay_s=0.3)",
        value="fail('value-0', 73, 'first')",
    )
    assert code == 73
    assert "value-0 failed first" in lines[-1]


def test_when_everybody_only_lost_somebody_the_first_to_notice_is_named(tmp_path):
    code, lines = with_scripts(
        tmp_path, orchestrator="fail('orchestrator', 69, 'DeadlineExceeded: waited 3 s for the engine', secondary=True)"
    )
    assert code == 69
    assert "orchestrator failed first (exit code 69): DeadlineExceeded" in lines[-1]


@pytest.mark.parametrize("name", ["orchestrator", "inference"])
def test_a_killed_process_is_named_with_its_signal(tmp_path, name):
    code, lines = with_scripts(tmp_path, **{name: "os.kill(os.getpid(), 9)"})
    assert code == 69
    assert f"{name} failed first (exit code 69): killed by SIGKILL" in lines[-1]


def test_a_killed_rank_is_found_in_the_log_of_its_group_before_the_group_ends(tmp_path):
    line = "E1129 16:32 77 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 99) of binary: python"
    code, lines = with_scripts(tmp_path, value=f"print({line!r}, flush=True); time.sleep(600)")
    assert code == 69
    assert "value-1 failed first (exit code 69): killed by SIGKILL" in lines[-1]


def test_a_process_that_ends_before_its_boundary_is_named_with_its_last_line(tmp_path):
    code, lines = with_scripts(tmp_path, policy="import absent_module")
    assert code == 70
    assert "policy failed first (exit code 70): ended with code 1: ModuleNotFoundError: No module named" in lines[-1]


def test_a_process_that_just_leaves_is_a_failure(tmp_path):
    code, lines = with_scripts(tmp_path, value="pass")
    assert code == 69
    assert "value failed first (exit code 69): ended while the run needed it" in lines[-1]


def test_who_does_not_end_in_time_is_killed(tmp_path):
    started = time.monotonic()
    code, _ = with_scripts(tmp_path, orchestrator="time.sleep(1)", value=STUBBORN)
    assert code == 0
    assert time.monotonic() - started < 30
    assert living(run_id_of(tmp_path)) == []
    assert '"killed": ["value"]' in (tmp_path / "run" / "events.jsonl").read_text()


# ---------------------------------------------------------------- signals and the launcher's own death


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, folder: Path, *, grace_s: float = 3.0, **scripts: str) -> None:
        everybody = {name: scripts.get(name, FOREVER) for name in ("inference", "policy", "value", "orchestrator")}
        argv = [sys.executable, "-m", "tests.processes.fleets", str(folder), json.dumps(everybody), str(grace_s)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stderr is not None
        assert self.process.stderr.readline().startswith("begun")
        self.run_id = run_id_of(folder)
        assert len(living(self.run_id)) >= 8

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def make(**kwargs) -> Launched:
        started.append(Launched(tmp_path, **kwargs))
        return started[-1]

    yield make
    for launched in started:
        launched.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_in_time(launch, number, code):
    launched = launch(value=GRANDCHILD)
    launched.process.send_signal(number)
    assert launched.process.wait(timeout=20) == code
    assert living(launched.run_id) == []


def test_a_second_signal_ends_it_at_once(launch):
    """Two ignore SIGTERM and the grace time is ten minutes: only the second signal can end this run."""
    launched = launch(grace_s=600.0, value=STUBBORN, policy=STUBBORN)
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(timeout=20) == 130
    assert living(launched.run_id) == []


def test_sigkill_of_the_launcher_leaves_nothing_after_ten_seconds(launch):
    launched = launch(value=GRANDCHILD, policy=STUBBORN)
    launched.process.kill()
    until = time.monotonic() + 10
    while living(launched.run_id):
        assert time.monotonic() < until, "processes of the run outlive the launcher"
        time.sleep(0.05)


def test_sigkill_of_a_guard_leaves_nothing_either(launch, tmp_path):
    launched = launch(value=GRANDCHILD)
    child = json.loads((tmp_path / "run" / "run.json").read_text())["pids"]["value"]
    guard = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGKILL)
    assert launched.process.wait(timeout=30) == 69
    assert living(launched.run_id) == []


# ---------------------------------------------------------------- ports


def let_go(plan) -> None:
    (Path(plan.context.dir) / f"go-{plan.ports['value_http_port']}").touch()


def test_ports_lost_between_choice_and_bind_are_chosen_anew_together(tmp_path):
    """A foreign listener takes the value service's port right after the start; the second start succeeds."""
    thieves: list[socket.socket] = []
    plans = []

    def steal(plan) -> None:
        plans.append(plan.ports)
        if not thieves:
            thieves.append(socket.create_server(("127.0.0.1", plan.ports["value_http_port"])))
        let_go(plan)

    view = Said(on_begin=steal)
    code, _ = with_scripts(tmp_path, view, value=BIND, orchestrator="time.sleep(4)")
    thieves[0].close()
    assert code == 0
    assert view.num_begins == 2
    assert not set(plans[0].values()) & set(plans[1].values()) & {plans[0]["value_http_port"]}


def test_ports_lost_again_and_again_end_with_69_naming_port_and_owner(tmp_path):
    thieves: list[socket.socket] = []

    def steal(plan) -> None:
        thieves.append(socket.create_server(("127.0.0.1", plan.ports["value_http_port"])))
        let_go(plan)

    view = Said(on_begin=steal)
    code, lines = with_scripts(tmp_path, view, value=BIND)
    port = thieves[-1].getsockname()[1]
    for thief in thieves:
        thief.close()
    assert code == 69
    assert len(thieves) == MAX_PORT_TRIES
    assert f"value_http_port {port} (pid {os.getpid()})" in lines[-1]


# ---------------------------------------------------------------- the run directory


def test_a_used_run_directory_is_refused_unless_it_may_be_overwritten(tmp_path):
    config = small_config(tmp_path)
    run_dir = Path(config.run.dir)
    run_dir.mkdir()
    (run_dir / "precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not a run directory"):
            supervise(config, Said(), overwrite=overwrite)
    (run_dir / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an earlier run; fix: pass --overwrite"):
        supervise(config, Said())
    assert (run_dir / "precious.txt").read_text() == "mine"


def test_a_run_directory_in_use_is_refused_even_with_overwrite(tmp_path):
    config = small_config(tmp_path)
    with hold_run_dir(Path(config.run.dir)), pytest.raises(ConfigError, match="another launcher is running"):
        supervise(config, Said(), overwrite=True)
