"""The nodes of a job: steps, addresses, ports that are held where they will be bound, and what is ended by its id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.config.context import Host
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.fleet import RUN_ID_VARIABLE
from services.launch.planner import ProcessPlan, Site
from services.launch.port_keeper import Keeper, NodeWishes
from services.launch.slurm_machines import JobMachines, address_of, machines_of_job, num_cpus_of
from services.wire.errors import ConfigError, DependencyLost
from tests.commands import put
from tests.conftest import ROOT

CONFIG = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[deployment]
kind = "slurm"
gpus_per_node = 1
num_value_nodes = 1
"""
HOSTS = [Host("n1", "10.0.0.10"), Host("n2", "10.0.0.9")]
SITE = Site(Path("/shared/project"), "/shared/venv/bin/python")
LISTENS = """
import socket, sys
taken = socket.create_server(("127.0.0.9", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""


def config_of(tmp_path: Path, more: str = "") -> Config:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG + more)
    return resolve([path], [("run.dir", str(tmp_path / "run"))]).config


def machines(config: Config) -> JobMachines:
    return JobMachines(config, HOSTS, SITE, job_id="42", num_cpus=64)


# ---------------------------------------------------------------- steps


def test_a_process_becomes_one_step_on_its_nodes(tmp_path: Path) -> None:
    argv = ["/shared/venv/bin/python", "-m", "services.launch.on_node", "--addresses", "a,b", "--", "x"]
    process = ProcessPlan("policy", argv, {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b"}, 4, nodes=[0, 1], gpus=[0, 1])
    placed = machines(config_of(tmp_path)).placed(process)
    start = placed.argv.index("srun")
    assert placed.argv[:start] == [sys.executable, "-m", "services.launch.srun_step"]
    assert placed.argv[-len(argv) :] == argv
    options = placed.argv[start + 1 : -len(argv)]
    for option in ("--job-name=policy", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2"):
        assert option in options
    for option in ("--overlap", "--cpus-per-task=64", "--kill-on-bad-exit=1", "--export=ALL", "--label", "--mem=0"):
        assert option in options
    assert placed.env == {"A": "b"}  # which devices a node shows is known there
    alone = machines(config_of(tmp_path)).placed(replace(process, nodes=[1]))
    assert "--nodelist=n2" in alone.argv and "--label" not in alone.argv


def test_a_process_that_is_on_no_plan_goes_through_its_node_too(tmp_path: Path) -> None:
    placed = machines(config_of(tmp_path)).placed(ProcessPlan("model", ["make", "it"], {}, 1))
    words = placed.argv[placed.argv.index("services.launch.on_node") - 2 :]
    assert words == [
        SITE.python,
        "-m",
        "services.launch.on_node",
        "--addresses",
        "10.0.0.10",
        "--names",
        "n1",
        "--",
        "make",
        "it",
    ]


def test_a_container_is_before_every_command_and_has_an_interpreter_of_its_own(tmp_path: Path) -> None:
    container = 'container = ["apptainer", "exec", "/i.sif"]\ncontainer_python = "/opt/python"\n'
    job = machines(config_of(tmp_path, f'[slurm]\n{container}srun = ["--mpi=none"]\n'))
    assert job.site.python == "/opt/python"
    argv = job.placed(ProcessPlan("model", ["make", "it"], {}, 1)).argv
    start = argv.index("--mpi=none")
    assert argv[start + 1 : start + 7] == [
        "apptainer",
        "exec",
        "/i.sif",
        "/opt/python",
        "-m",
        "services.launch.on_node",
    ]
    assert argv[0] == sys.executable  # the launcher's side of a step is outside, where srun is


def test_a_step_asks_its_tasks_through_their_input_where_srun_would_kill_them(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "print('ready', flush=True)\n"
        "said = b''\n"
        "while len(said) < 2: said += os.read(0, 9)\n"
        "print(sorted(said))\n"
        "sys.exit(75)\n"
    )
    argv = [sys.executable, "-m", "services.launch.srun_step", sys.executable, "-c", script]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env, text=True) as step:
        assert step.stdout is not None
        assert step.stdout.readline() == "ready\n"
        step.send_signal(signal.SIGTERM)
        step.send_signal(signal.SIGINT)
        output = step.stdout.read()
        assert step.wait(timeout=20) == 75
    assert output.strip() == "[2, 15]"


def test_leftover_steps_are_ended_by_their_ids_and_a_persons_own_is_not(tmp_path: Path, commands: Path) -> None:
    put(commands, "squeue", 'echo "42.0 policy\n42.3 bash\n42.batch batch"')
    put(commands, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    job = machines(config_of(tmp_path))
    job.placed(ProcessPlan("policy", ["x"], {}, 1))
    job.end_leftovers()
    assert (tmp_path / "cancelled").read_text() == "--signal=KILL 42.0\n"
    put(commands, "squeue", "exit 1")
    job.end_leftovers()  # the end of the job ends them


# ---------------------------------------------------------------- nodes


def test_nodes_addresses_and_cpus_are_what_slurm_says(tmp_path: Path, commands: Path) -> None:
    shown = 'echo "NodeName=$4 Arch=x NodeAddr=127.0.0.$(echo $4 | tr -d n) State=UP"'
    put(commands, "scontrol", f'if [ "$2" = hostnames ]; then echo n1; echo n2; else {shown}; fi')
    env = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}
    job = machines_of_job(config_of(tmp_path), SITE, env)
    assert list(job.hosts) == [Host("n1", "127.0.0.1"), Host("n2", "127.0.0.2")]
    assert "--cpus-per-task=64" in job.srun("x", ["n1"])
    assert [num_cpus_of(text) for text in ("64(x2)", "64(x2),32", "128", "")] == [64, 32, 128, 1]


def test_a_node_without_an_address_and_a_slurm_that_does_not_answer_are_told(commands: Path) -> None:
    put(commands, "scontrol", "echo NodeName=n1 NodeAddr=no.such.host.invalid")
    with pytest.raises(DependencyLost, match=r"node n1: no\.such\.host\.invalid has no IPv4 address"):
        address_of("n1")
    put(commands, "scontrol", "echo 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(DependencyLost, match="Unable to contact slurm controller"):
        address_of("n1")


def test_outside_of_a_job_there_are_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is no SLURM job"):
        machines_of_job(config_of(tmp_path), SITE, {})


# ---------------------------------------------------------------- ports


def test_ports_are_chosen_apart_from_what_is_fixed_avoided_and_held_by_another_node_of_this_machine() -> None:
    names = [f"p{index}" for index in range(20)]
    first = Keeper(NodeWishes("127.0.0.9", names, {"fixed": 23456}), [], "run")
    second = Keeper(NodeWishes("127.0.0.10", names), list(range(10000, 32000)), "run")
    try:
        ports = [*first.ports.values(), *second.ports.values()]
        assert len(set(ports)) == 41 and first.ports["fixed"] == 23456
        assert all(port >= 32000 for port in second.ports.values())
    finally:
        first.close()
        second.close()


def test_a_port_that_only_the_nodes_own_address_lacks_is_taken() -> None:
    keeper = Keeper(NodeWishes("127.0.0.9", ["grid"]), [], "run")
    try:
        assert keeper.taken() == {}
        with socket.create_server(("127.0.0.9", keeper.ports["grid"])):
            assert keeper.taken() == {"grid": (keeper.ports["grid"], 0)}
    finally:
        keeper.close()


@pytest.mark.parametrize("is_ours", [True, False])
def test_who_listens_on_a_port_is_ours_by_the_runs_id_in_its_environment(is_ours: bool) -> None:
    """In a job nothing of the run is a child of the launcher."""
    keeper = Keeper(NodeWishes("127.0.0.9", ["grid"]), [], "run-17")
    port = keeper.ports["grid"]
    env = os.environ | {RUN_ID_VARIABLE: "run-17" if is_ours else "run-1"}
    argv = [sys.executable, "-c", LISTENS, str(port)]
    try:
        with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "listening\n"
            assert keeper.lost() == ({} if is_ours else {"grid": (port, other.pid)})
            other.communicate("")
    finally:
        keeper.close()
