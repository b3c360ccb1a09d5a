"""A real SLURM of two nodes on this one machine: slurmctld, two slurmd and munged of its own, ended by their pids.

Notable:
- Node n1 is 127.0.0.10 and node n2 127.0.0.9: two addresses whose order as text is not that of the nodes.
- Configuration, state, munge key and socket lie in one private folder; the ports are free ones of this moment.
- Root is needed: slurmd starts steps as their users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
HOW_TO_INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
ADDRESSES = {"n1": "127.0.0.10", "n2": "127.0.0.9"}
_START_DEADLINE_S = 30.0
_IDLE_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 10.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
ReturnToService=2
KillWait=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.10 Port={n1_port} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.9 Port={n2_port} CPUs=2 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Cluster:
    """The daemons; `stop` ends every one of them, and every job first."""

    def __init__(self, folder: Path) -> None:
        """Write the configuration; nothing is started."""
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._munged: subprocess.Popen[bytes] | None = None
        folder.chmod(0o755)  # munged looks at every folder above its socket
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        ports = dict(zip(("ctld_port", "n1_port", "n2_port"), _free_ports(3), strict=True))
        self.conf.write_text(_CONF.format(host=socket.gethostname(), folder=folder, **ports))

    @property
    def env(self) -> dict[str, str]:
        """Environment of commands that speak to this SLURM."""
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        missing = [name for name in NEEDED if shutil.which(name, path=self.env["PATH"]) is None]
        if missing:
            raise RuntimeError(f"{', '.join(missing)}: not installed; as root: {HOW_TO_INSTALL}")
        if os.geteuid() != 0:
            raise RuntimeError("these tests start SLURM's daemons and need root")
        self._start_munge()
        self._run("slurmctld", "-f", str(self.conf))
        for node in ADDRESSES:
            self._run("slurmd", "-N", node, "-f", str(self.conf))
        self.wait_until_idle()

    def stop(self) -> None:
        """Cancel every job, then end the daemons."""
        if self.conf.exists() and (self.folder / "slurmctld.pid").exists():
            subprocess.run(["scancel", "--user=root", "--full", "--signal=KILL"], env=self.env, check=False)
            subprocess.run(["scancel", "--user=root"], env=self.env, check=False)
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid") if path.read_text().strip()]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        until = time.monotonic() + _STOP_DEADLINE_S
        while any(map(_is_alive, pids)) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait(_STOP_DEADLINE_S)

    def ask(self, *command: str) -> str:
        """Output of a command of SLURM; "" where it failed."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        words = self.ask("scontrol", "-o", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, holds, deadline_s: float) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: with the daemons' last words.
        """
        until = time.monotonic() + deadline_s
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {deadline_s:.0f} s\n{self._last_words()}")
            time.sleep(0.25)

    def wait_until_idle(self) -> None:
        """Wait until nothing is on either node."""
        self.wait_until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", _IDLE_DEADLINE_S)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munge.pid-unused"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        words = [f"--{option}={self.folder / name}" for option, name in files.items()]
        munged = ["munged", "--foreground", "--force", *words]
        self._munged = subprocess.Popen(munged, env=self.env, stderr=subprocess.DEVNULL)
        self.wait_until(lambda: (self.folder / "munge.socket").exists(), _START_DEADLINE_S)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}\n{self._last_words()}")

    def _last_words(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
