"""The pure planner: from a configuration, hosts, chosen ports and a site to every command line of a run.

Notable:
- Pure: no file, socket, clock or environment is read here. `counterpoint run`, `counterpoint plan` and everything
  else that starts a run use the same plan.
- Processes are named by module strings; nothing of theirs is imported.
- All processes start at once; the orchestrator waits for the others (each wait named, with a deadline). Those that
  share devices load one after another: policy, critic, engines; each command but the first waits by itself.
- Without a `[value]` table there is no value process, and no port of one. A replay has no inference process.
- One host is loopback. With several, every process listens on its own host's address, and never on all interfaces.
- A group that spans nodes meets at a port of ours by torchrun's static rendezvous: node ranks are the plan's, while
  c10d numbers nodes in the order of their addresses as text, and rank 0 has ports to bind on the first one.
- In a job each process starts on its nodes through `services.launch.on_node`, which knows what only the node knows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.config.context import Host, RunContext
from services.config.listener import host_port, url_of
from services.config.ports import (
    GUARD_PORT,
    POLICY_RDZV_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    VALUE_RDZV_PORT,
    engine_names,
    engine_port,
)
from services.config.schema import Config
from services.inference.router_command import router_command
from services.inference.vllm_command import vllm_command
from services.launch.models import ModelSource
from services.launch.placement import Placement, RolePlace, place
from services.runtime.after import after
from services.runtime.auth import is_loopback

LOOPBACK = "127.0.0.1"
LOCAL = Host("localhost", LOOPBACK)
TOKEN_FILE = "token"  # noqa: S105 - a file's name, in the run directory
SHUTDOWN_TIMEOUT_SINCE = (2, 13)
"""torchrun gives ranks 30 s to end before this version, whatever it is told."""
TORCHRUN_GRACE_S = 30.0


@dataclass(frozen=True)
class Site:
    """Where a plan will be carried out."""

    root: Path
    """Project root, first on PYTHONPATH."""
    python: str = sys.executable
    pythonpath: str = ""
    """What PYTHONPATH said before."""
    torch_version: str = ""
    """Of the interpreter's torch, as "2.13.0+cpu"; empty where it is not known."""
    visible_gpus: str = ""
    """What CUDA_VISIBLE_DEVICES said before: GPU i of a plan is its i-th entry. Empty: GPU i is the machine's i-th."""

    @property
    def search_path(self) -> str:
        """PYTHONPATH for every process: the project root first."""
        others = [part for part in self.pythonpath.split(":") if part and part != str(self.root)]
        return ":".join([str(self.root), *others])

    @property
    def can_wait_for_ranks(self) -> bool:
        """Whether torchrun can be told how long ranks may take to end."""
        numbers = [int(part) for part in self.torch_version.split(".")[:2] if part.isdigit()]
        return tuple(numbers) >= SHUTDOWN_TIMEOUT_SINCE

    def gpu_names(self, gpus: Sequence[int]) -> str:
        """CUDA_VISIBLE_DEVICES for these GPUs of a plan."""
        names = [name.strip() for name in self.visible_gpus.split(",") if name.strip()]
        return ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus)


@dataclass(frozen=True)
class ProcessPlan:
    """One process (or torchrun group) to start."""

    name: str
    argv: list[str]
    env: dict[str, str]
    """Added to the launcher's environment."""
    num_ranks: int
    ports: dict[str, int] = field(default_factory=dict)
    """Ports the process listens on."""
    ready_url: str = ""
    """Answers 200 once the process would accept work."""
    nodes: list[int] = field(default_factory=lambda: [0])
    """Indexes of the hosts that it starts on, once on each; rank 0 is on the first."""
    gpus: list[int] = field(default_factory=list)
    """Its CUDA devices on each of them; none on CPU."""

    @property
    def rank_names(self) -> list[str]:
        """Names of the processes that leave failure records."""
        return [f"{self.name}-{rank}" for rank in range(self.num_ranks)] if self.is_group else [self.name]

    @property
    def is_group(self) -> bool:
        """Whether the process is a torchrun agent."""
        return self.name in ("policy", "value")


@dataclass(frozen=True)
class Plan:
    """Everything that a run starts."""

    context: RunContext
    model: ModelSource
    processes: list[ProcessPlan]
    ports: dict[str, int]
    final: str = "orchestrator"
    """the process whose exit 0 is the normal end"""
    hosts: list[Host] = field(default_factory=lambda: [LOCAL])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; every port's key ends in `port`."""
        return {
            "run_dir": self.context.dir,
            "run_id": self.context.run_id,
            "hosts": [{"name": host.name, "address": host.address} for host in self.hosts],
            "model": {"dir": self.context.model_dir, "init": self.context.model_init, "prepare": self.model.argv},
            "processes": [
                {
                    "name": process.name,
                    "num_ranks": process.num_ranks,
                    "ranks": process.rank_names,
                    "nodes": [self.hosts[node].name for node in process.nodes],
                    "gpus": process.gpus,
                    "argv": process.argv,
                    "env": process.env,
                    "ready_url": process.ready_url,
                    **process.ports,
                }
                for process in self.processes
            ],
        }


def plan(
    config: Config,
    ports: dict[str, int],
    *,
    hosts: Sequence[Host] = (LOCAL,),
    run_dir: Path,
    run_id: str,
    epoch: int,
    model: ModelSource,
    site: Site,
    replay_of: Path | None = None,
) -> Plan:
    """Lay out a run.

    Args:
        config: The resolved configuration.
        ports: One port for every name of `port_names(config)`.
        hosts: The nodes, in the order of `place`: train nodes, critic nodes, inference nodes.
        run_dir: The run directory, absolute.
        run_id: Identity of the run on the wire.
        epoch: Number of this start.
        model: Where the model comes from.
        site: Where the commands will run.
        replay_of: A run whose recorded rollouts take the place of inference, absolute.

    Returns:
        The plan; the same arguments give the same plan.

    Raises:
        ValueError: There are not as many hosts as the roles need.
    """
    where = place(config)
    if len(hosts) != where.num_nodes:
        raise ValueError(f"{where.num_nodes} hosts are needed, {len(hosts)} were given")
    rendering = _Rendering(config, ports, list(hosts), where, run_dir, f"{run_id}-{epoch}", site)
    context = rendering.context(run_id=run_id, epoch=epoch, model=model)
    if replay_of is not None:
        nobody = {"inference_urls": [], "router_url": None, "router_control_url": None}
        context = context.model_copy(update={**nobody, "replay_of": str(replay_of)})
        processes = []
    else:
        processes = [*rendering.engines(context), *rendering.router(context)]
    processes.append(rendering.policy())
    if config.value is not None:
        processes.append(rendering.value(context))
    processes.append(rendering.orchestrator())
    if config.deployment.sharing != "none":
        processes = rendering.in_turn(processes)
    if config.deployment.kind == "slurm":
        processes = [_on_its_nodes(process, hosts, site) for process in processes]
    return Plan(context=context, model=model, processes=processes, ports=dict(ports), hosts=list(hosts))


@dataclass(frozen=True)
class _Rendering:
    """What every process of one plan is made from."""

    config: Config
    ports: dict[str, int]
    hosts: list[Host]
    where: Placement
    run_dir: Path
    rdzv_id: str
    site: Site

    def context(self, *, run_id: str, epoch: int, model: ModelSource) -> RunContext:
        config, ports, where = self.config, self.ports, self.where
        engines = zip(engine_names(config), where.engines, strict=True)
        has_router = len(where.engines) > 1
        asks_token = config.runtime.token == "always" or not self.is_on_loopback  # noqa: S105 - a setting's value
        return RunContext(
            run_id=run_id,
            epoch=epoch,
            dir=str(self.run_dir),
            model_dir=str(model.dir),
            model_init=model.init,
            inference_urls=[url_of(self.address(at.nodes[0]), ports[engine_port(name)]) for name, at in engines],
            router_url=url_of(LOOPBACK, ports[GUARD_PORT]) if has_router else None,
            router_control_url=url_of(LOOPBACK, ports[ROUTER_PORT]) if has_router else None,
            policy_url=url_of(self.address(where.policy.nodes[0]), ports["policy_http_port"]),
            value_url=url_of(self.value_address, ports["value_http_port"]) if config.value is not None else None,
            orchestrator_url=url_of(self.address(0), ports["orchestrator_http_port"]),
            policy_grid_url=self.tcp("policy_grid_port"),
            critic_grid_url=self.tcp("critic_grid_port") if config.value is not None else None,
            token_file=str(self.run_dir / TOKEN_FILE) if asks_token else None,
            hosts=self.hosts,
        )

    @property
    def is_on_loopback(self) -> bool:
        return all(is_loopback(host.address) for host in self.hosts)

    @property
    def value_address(self) -> str:
        """`value.host` belongs to runs on one machine."""
        assert self.config.value is not None and self.where.value is not None
        return self.config.value.host if len(self.hosts) == 1 else self.address(self.where.value.nodes[0])

    def address(self, node: int) -> str:
        return self.hosts[node].address

    def tcp(self, port_name: str) -> str:
        return f"tcp://{host_port(self.address(0), self.ports[port_name])}"

    def env(self, gpus: list[int]) -> dict[str, str]:
        return process_env(self.config, self.site, gpus, on_loopback=self.is_on_loopback)

    def visible(self, gpus: list[int]) -> list[int]:
        return gpus if self.config.deployment.device == "cuda" else []

    def engines(self, context: RunContext) -> list[ProcessPlan]:
        """One process an engine."""
        processes = []
        for index, (name, at) in enumerate(zip(engine_names(self.config), self.where.engines, strict=True)):
            port, address = self.ports[engine_port(name)], self.address(at.nodes[0])
            gpus = self.visible(at.gpus)
            env = self.env(gpus)
            if self.config.inference.engine == "vllm":
                argv, more_env = vllm_command(self.config, context, port, host=address)
                env = {**env, **more_env}
            else:
                argv = [self.site.python, "-m", "services.inference.local_server", "--run-dir", context.dir]
                argv += ["--engine-index", str(index)] if len(self.where.engines) > 1 else []
            ready = f"{url_of(address, port)}/health"
            processes.append(ProcessPlan(name, argv, env, 1, {"http_port": port}, ready, at.nodes, gpus))
        return processes

    def router(self, context: RunContext) -> list[ProcessPlan]:
        """The router and its guard, both on loopback beside the orchestrator, where there are several engines."""
        if context.router_url is None:
            return []
        port, metrics_port = self.ports[ROUTER_PORT], self.ports[ROUTER_METRICS_PORT]
        argv = router_command(
            self.config,
            host=LOOPBACK,
            port=port,
            metrics_port=metrics_port,
            python=self.site.python,
            guard_url=context.router_url if context.token_file is not None else None,
        )
        guard = [self.site.python, "-m", "services.inference.router_guard", "--run-dir", context.dir]
        own, guard_ports = {"http_port": port, "metrics_port": metrics_port}, {"http_port": self.ports[GUARD_PORT]}
        return [
            ProcessPlan("router", argv, self.env([]), 1, own, f"{url_of(LOOPBACK, port)}/liveness"),
            ProcessPlan("router-guard", guard, self.env([]), 1, guard_ports, f"{context.router_url}/health"),
        ]

    def policy(self) -> ProcessPlan:
        """The policy's torchrun group."""
        at, port = self.where.policy, self.ports["policy_http_port"]
        ready = f"{url_of(self.address(at.nodes[0]), port)}/readyz"
        return self._group("policy", "policy_trainer.main", at, port, ready, POLICY_RDZV_PORT)

    def value(self, context: RunContext) -> ProcessPlan:
        """The critic's torchrun group."""
        at, port = self.where.value, self.ports["value_http_port"]
        assert at is not None
        return self._group("value", "value_service.main", at, port, f"{context.value_url}/readyz", VALUE_RDZV_PORT)

    def _group(self, name: str, module: str, at: RolePlace, port: int, ready_url: str, rdzv: str) -> ProcessPlan:
        gpus, own = self.visible(at.gpus), {"http_port": port}
        if len(at.nodes) > 1:
            own["rdzv_port"] = self.ports[rdzv]
        argv = [
            *(self.site.python, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(at.nodes)), "--nproc-per-node", str(len(at.gpus))),
            *self._rendezvous(at, name, rdzv),
            *self._farewell(),
            *("--max-restarts", "0"),
            *("-m", module, "--run-dir", str(self.run_dir)),
        ]
        return ProcessPlan(name, argv, self.env(gpus), at.num_ranks, own, ready_url, at.nodes, gpus)

    def _rendezvous(self, at: RolePlace, name: str, rdzv: str) -> list[str]:
        """Fixed size; restarts are the launcher's. On one node torchrun's store takes a port of the kernel's choice."""
        if len(at.nodes) == 1:
            return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0", "--local-addr", LOOPBACK]
        endpoint = host_port(self.address(at.nodes[0]), self.ports[rdzv])
        return [
            *("--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--rdzv-id", f"{self.rdzv_id}-{name}"),
            *("--rdzv-conf", f"timeout={self.config.runtime.startup_deadline_s:.0f}"),
        ]

    def _farewell(self) -> list[str]:
        """What torchrun must be told so that ranks can commit when the run is to end."""
        words: list[str] = []
        grace_s = self.config.runtime.shutdown_grace_s
        if grace_s > TORCHRUN_GRACE_S and self.site.can_wait_for_ranks:
            words.append(f"--shutdown-timeout={grace_s:.0f}")
        if self.config.deployment.kind == "slurm" and self.site.can_wait_for_ranks:
            words.append("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
        return words

    def orchestrator(self) -> ProcessPlan:
        """The orchestrator, on the first node."""
        argv = [self.site.python, "-m", "orchestrator.main", "--run-dir", str(self.run_dir)]
        port = self.ports["orchestrator_http_port"]
        own = {"http_port": port, "policy_grid_port": self.ports["policy_grid_port"]}
        if self.config.value is not None:
            own["critic_grid_port"] = self.ports["critic_grid_port"]
        return ProcessPlan("orchestrator", argv, self.env([]), 1, own, f"{url_of(self.address(0), port)}/livez")

    def in_turn(self, processes: list[ProcessPlan]) -> list[ProcessPlan]:
        """The same processes; of those that share devices each loads once the one before it sleeps."""
        groups = [process for process in processes if process.is_group]
        urls = {later.name: earlier.ready_url for earlier, later in itertools.pairwise(groups)}
        if self.config.deployment.sharing == "time":
            urls |= dict.fromkeys(engine_names(self.config), groups[-1].ready_url)
        python, deadline_s = self.site.python, self.config.runtime.startup_deadline_s
        argvs = {p.name: after(python, [urls[p.name]], deadline_s, p.argv) for p in processes if p.name in urls}
        return [replace(process, argv=argvs.get(process.name, process.argv)) for process in processes]


def _on_its_nodes(process: ProcessPlan, hosts: Sequence[Host], site: Site) -> ProcessPlan:
    """The same process, started once on each of its nodes by a job's step."""
    words = [site.python, "-m", "services.launch.on_node"]
    own = [hosts[node] for node in process.nodes]
    words += ["--addresses", ",".join(host.address for host in own), "--names", ",".join(host.name for host in own)]
    words += ["--gpus", ",".join(str(gpu) for gpu in process.gpus), "--"]
    return replace(process, argv=[*words, *process.argv])


def process_env(config: Config, site: Site, gpus: list[int], *, on_loopback: bool = True) -> dict[str, str]:
    """Environment of one process.

    Args:
        config: The resolved configuration.
        site: Where it runs.
        gpus: Its CUDA devices; empty hides all of them.
        on_loopback: Whether the whole run is; else each node finds the interface of its own address.
    """
    env = {
        "PYTHONPATH": site.search_path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": site.gpu_names(gpus),
    }
    if config.deployment.device == "cpu":
        # two spinning thread pools on one core are many times slower than one thread each
        env["OMP_NUM_THREADS"] = "1"
        # large temporaries stay with the process: giving them back and taking them costs a tenth of a forward
        env |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**30))
        if on_loopback:
            env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
