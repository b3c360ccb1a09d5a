"""The nodes of a SLURM job as places for a run's processes: one `srun` step a process.

Notable:
- Nodes are numbered as `scontrol show hostnames` lists them: the batch script, and so the launcher, is on the first.
- A step has all CPUs, memory and devices of its nodes (`--overlap`): who computes where is the plan's affair.
- srun takes SIGTERM for an order to kill. `services.launch.srun_step` stands before it and asks the tasks instead.
- Steps are ended by their ids, never by a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from services.config.context import Host
from services.config.ports import fixed_ports
from services.config.schema import Config
from services.launch.machines import LostPorts
from services.launch.placement import place, port_hosts
from services.launch.planner import LOOPBACK, ProcessPlan, Site
from services.launch.port_keeper import Keeper, NodeWishes, Wishes
from services.runtime.logs import log_path
from services.wire.errors import ConfigError, DependencyLost

ON_NODE = "services.launch.on_node"
_START_DEADLINE_S = 120.0
"""For a step that starts on every node: SLURM may wait for slow ones."""
_ANSWER_DEADLINE_S = 10.0
"""Then. A node that is lost does not answer."""
_END_DEADLINE_S = 10.0


class JobMachines:
    """The nodes of the job that this process is in."""

    def __init__(self, config: Config, hosts: Sequence[Host], site: Site, *, job_id: str, num_cpus: int) -> None:
        """Take part in a job.

        Args:
            config: The resolved configuration.
            hosts: The job's nodes.
            site: Checkout and interpreter of the launcher.
            job_id: The job's.
            num_cpus: CPUs of a node that a step gets.
        """
        self.hosts = hosts
        self.site = replace(site, python=config.slurm.container_python or site.python)
        self._config = config
        self._placed: set[str] = set()
        self._job_id = job_id
        self._num_cpus = num_cpus

    @contextmanager
    def reserve(self, config: Config, avoid: Iterable[int], run_id: str) -> Iterator[JobPorts]:
        """Choose and hold the ports of a start: here, and by one step on the other nodes that bind any."""
        avoided = {*avoid, *fixed_ports(config).values()}
        wishes = self._wishes(config)
        here = Keeper(wishes.pop(0), sorted(avoided), run_id)
        others: _OtherKeepers | None = None
        try:
            if wishes:
                # two nodes may share an address, on a machine that plays both: no port is chosen twice
                asked = Wishes(
                    run_id,
                    sorted(avoided | set(here.ports.values())),
                    {self.hosts[i].name: w for i, w in wishes.items()},
                )
                nodes = [self.hosts[index].name for index in wishes]
                argv = [sys.executable, "-m", "services.launch.port_keeper", msgspec.json.encode(asked).decode()]
                log = log_path(Path(config.run.dir).resolve(), "ports")
                others = _OtherKeepers([*self.srun("ports", nodes), *argv], nodes, log, self.site)
            yield JobPorts(here, others)
        finally:
            here.close()
            if others is not None:
                others.close()

    def _wishes(self, config: Config) -> dict[int, NodeWishes]:
        fixed, wishes = fixed_ports(config), {0: NodeWishes(self.hosts[0].address)}
        for name, index in port_hosts(config).items():
            own = wishes.setdefault(index, NodeWishes(self.hosts[index].address))
            if name in fixed:
                own.fixed[name] = fixed[name]
            else:
                own.chosen.append(name)
        return wishes

    def placed(self, process: ProcessPlan) -> ProcessPlan:
        """The process as one step on its nodes."""
        self._placed.add(process.name)
        names = [self.hosts[node].name for node in process.nodes]
        argv = list(process.argv)
        if argv[1:3] != ["-m", ON_NODE]:  # a process before the run, which is on no plan
            addresses = ",".join(self.hosts[node].address for node in process.nodes)
            argv = [self.site.python, "-m", ON_NODE, "--addresses", addresses, "--names", ",".join(names), "--", *argv]
        words = [sys.executable, "-m", "services.launch.srun_step", *self.srun(process.name, names)]
        # what a node makes visible is known there; --gpus counts among it
        env = {name: value for name, value in process.env.items() if name != "CUDA_VISIBLE_DEVICES"}
        return replace(process, argv=[*words, *self._config.slurm.container, *argv], env=env)

    def srun(self, name: str, nodes: Sequence[str]) -> list[str]:
        """The words of one step, up to its command."""
        num = str(len(nodes))
        return [
            "srun",
            *(f"--job-name={name}", f"--nodes={num}", f"--ntasks={num}", "--ntasks-per-node=1"),
            f"--nodelist={','.join(nodes)}",
            *("--overlap", f"--cpus-per-task={self._num_cpus}", "--cpu-bind=none", "--mem=0"),
            *("--kill-on-bad-exit=1", "--export=ALL", "--unbuffered"),
            *(["--label"] if len(nodes) > 1 else []),
            *self._config.slurm.srun,
        ]

    def end_leftovers(self) -> None:
        """Cancel the steps of this job that should have ended, by their ids; a person's own step stays."""
        try:
            listed = ask(["squeue", "--noheader", "--steps", f"--jobs={self._job_id}", "--format=%i %j"])
        except DependencyLost:
            return  # the job's end ends them too
        for line in listed.splitlines():
            step, _, name = line.strip().partition(" ")
            if name in self._placed:
                subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, check=False)  # noqa: S607


class JobPorts:
    """The ports of one start, on all nodes."""

    def __init__(self, here: Keeper, others: _OtherKeepers | None) -> None:
        self._here = here
        self._others = others
        self.ports = here.ports | (others.ports if others is not None else {})

    def taken(self) -> LostPorts:
        """Ports that cannot be bound now."""
        return self._here.taken() | (self._others.ask("taken") if self._others is not None else {})

    def lost(self, own_pids: Iterable[int]) -> LostPorts:
        """Ports that a process outside the run listens on."""
        return self._here.lost() | (self._others.ask("lost") if self._others is not None else {})


class _OtherKeepers:
    """The step that holds the ports of the other nodes."""

    def __init__(self, argv: list[str], nodes: Sequence[str], log: Path, site: Site) -> None:
        self._nodes = set(nodes)
        with open(log, "ab") as errors:
            self._srun = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": site.search_path},
                start_new_session=True,
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, name="ports", daemon=True).start()
        self._log = log
        answers = self._answers(_START_DEADLINE_S)
        self.ports: dict[str, int] = {name: port for each in answers for name, port in each["ports"].items()}

    def ask(self, question: str) -> LostPorts:
        """Ask all nodes; nothing where they are gone: a node that was lost has lost more than its ports."""
        assert self._srun.stdin is not None
        try:
            self._srun.stdin.write(question.encode() + b"\n")
            self._srun.stdin.flush()
            answers = self._answers(_ANSWER_DEADLINE_S)
        except (OSError, DependencyLost):
            return {}
        return {name: (port, pid) for each in answers for name, (port, pid) in each["ports"].items()}

    def close(self) -> None:
        """End the step; its tasks end with their input."""
        assert self._srun.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._srun.stdin.close()
        try:
            self._srun.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()

    def _read(self) -> None:
        assert self._srun.stdout is not None
        for line in self._srun.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _answers(self, deadline_s: float) -> list[dict]:
        """One answer of every node."""
        answers: dict[str, dict] = {}
        until = time.monotonic() + deadline_s
        while set(answers) != self._nodes:
            missing = ", ".join(sorted(self._nodes - set(answers)))
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise DependencyLost(f"no ports from {missing} within {deadline_s:.0f} s; log: {self._log}") from None
            if not line:
                self._lines.put(b"")
                raise DependencyLost(f"the step that chooses ports on {missing} has ended; log: {self._log}")
            answer = json.loads(_unlabelled(line))
            answers[answer["node"]] = answer
        return list(answers.values())


def machines_of_job(config: Config, site: Site, env: Mapping[str, str] = os.environ) -> JobMachines:
    """The nodes of the job that this process is in.

    Raises:
        ConfigError: It is in none, or in one of another size than the configuration's.
        DependencyLost: SLURM does not answer.
    """
    job_id, nodelist = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
    if not job_id or not nodelist:
        raise ConfigError(["deployment.kind: this is no SLURM job; fix: submit it by `counterpoint run`"])
    names = ask(["scontrol", "show", "hostnames", nodelist]).split()
    num_nodes = place(config).num_nodes
    if len(names) != num_nodes:
        what = f"the roles need {num_nodes} nodes, job {job_id} has {len(names)} ({nodelist})"
        raise ConfigError([f"deployment: {what}; fix: submit it by `counterpoint run`"])
    hosts = [Host(name, LOOPBACK if num_nodes == 1 else address_of(name)) for name in names]
    return JobMachines(config, hosts, site, job_id=job_id, num_cpus=num_cpus_of(env.get("SLURM_JOB_CPUS_PER_NODE", "")))


def address_of(node: str) -> str:
    """The IP address by which SLURM reaches a node.

    Raises:
        DependencyLost: SLURM does not know it, or its name has no address.
    """
    found = re.search(r"\bNodeAddr=(\S+)", ask(["scontrol", "--oneliner", "show", "node", node]))
    name = found[1] if found else node
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise DependencyLost(f"node {node}: {name} has no IPv4 address ({error})") from None


def num_cpus_of(text: str) -> int:
    """CPUs that every node of a job has, from SLURM's "64(x2),32"."""
    return min((int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", text)), default=1)


def ask(command: list[str]) -> str:
    """The output of one of SLURM's commands.

    Raises:
        DependencyLost: It failed; its words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DependencyLost(f"{command[0]} is not on this machine") from None
    if done.returncode:
        raise DependencyLost(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _unlabelled(line: bytes) -> bytes:
    return re.sub(rb"^\d+: ", b"", line)
