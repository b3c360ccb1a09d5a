"""The pure planner: from a configuration, chosen ports and a site to every command line of a run.

Notable:
- Pure: no file, socket, clock or environment is read here. `counterpoint run`, `counterpoint plan` and everything
  else that starts a run use the same plan.
- Processes are named by module strings; nothing of theirs is imported.
- All processes start at once; the orchestrator waits for the others (each wait named, with a deadline).
- Without a `[value]` table there is no value process, and no port of one. A replay has no inference process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.config.context import RunContext
from services.config.listener import url_of
from services.config.schema import Config
from services.inference.vllm_command import vllm_command
from services.launch.models import ModelSource

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Site:
    """Where a plan will be carried out."""

    root: Path
    """Project root, first on PYTHONPATH."""
    python: str = sys.executable
    pythonpath: str = ""
    """What PYTHONPATH said before."""

    @property
    def search_path(self) -> str:
        """PYTHONPATH for every process: the project root first."""
        others = [part for part in self.pythonpath.split(":") if part and part != str(self.root)]
        return ":".join([str(self.root), *others])


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

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; every port's key ends in `port`."""
        return {
            "run_dir": self.context.dir,
            "run_id": self.context.run_id,
            "model": {"dir": self.context.model_dir, "init": self.context.model_init, "prepare": self.model.argv},
            "processes": [
                {
                    "name": process.name,
                    "num_ranks": process.num_ranks,
                    "ranks": process.rank_names,
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
        run_dir: The run directory, absolute.
        run_id: Identity of the run on the wire.
        epoch: Number of this start.
        model: Where the model comes from.
        site: Where the commands will run.
        replay_of: A run whose recorded rollouts take the place of inference, absolute.

    Returns:
        The plan; the same arguments give the same plan.
    """
    context = _context(config, ports, run_dir=run_dir, run_id=run_id, epoch=epoch, model=model)
    processes = [_inference(config, context, ports, site), _policy(config, ports, run_dir, site)]
    if replay_of is not None:
        context = context.model_copy(update={"inference_urls": [], "replay_of": str(replay_of)})
        del processes[0]
    if config.value is not None:
        processes.append(_value(config, ports, run_dir, site))
    processes.append(_orchestrator(config, ports, run_dir, site))
    return Plan(context=context, model=model, processes=processes, ports=dict(ports))


def _context(
    config: Config, ports: dict[str, int], *, run_dir: Path, run_id: str, epoch: int, model: ModelSource
) -> RunContext:
    value = config.value
    return RunContext(
        run_id=run_id,
        epoch=epoch,
        dir=str(run_dir),
        model_dir=str(model.dir),
        model_init=model.init,
        inference_urls=[_http(ports["inference_http_port"])],
        policy_url=_http(ports["policy_http_port"]),
        value_url=url_of(value.host, ports["value_http_port"]) if value is not None else None,
        orchestrator_url=_http(ports["orchestrator_http_port"]),
        policy_grid_url=f"tcp://{LOOPBACK}:{ports['policy_grid_port']}",
        critic_grid_url=f"tcp://{LOOPBACK}:{ports['critic_grid_port']}" if value is not None else None,
    )


def _inference(config: Config, context: RunContext, ports: dict[str, int], site: Site) -> ProcessPlan:
    port = ports["inference_http_port"]
    env = process_env(config, site, _gpus_of(config, "inference"))
    if config.inference.engine == "vllm":
        argv, more_env = vllm_command(config, context, port)
        env = {**env, **more_env}
    else:
        argv = [site.python, "-m", "services.inference.local_server", "--run-dir", context.dir]
    return ProcessPlan("inference", argv, env, 1, {"http_port": port}, f"{_http(port)}/health")


def _policy(config: Config, ports: dict[str, int], run_dir: Path, site: Site) -> ProcessPlan:
    num_ranks = config.deployment.num_policy_gpus
    argv = _torchrun(config, num_ranks, "policy_trainer.main", run_dir, site)
    port = ports["policy_http_port"]
    env = process_env(config, site, _gpus_of(config, "policy"))
    return ProcessPlan("policy", argv, env, num_ranks, {"http_port": port}, f"{_http(port)}/readyz")


def _value(config: Config, ports: dict[str, int], run_dir: Path, site: Site) -> ProcessPlan:
    assert config.value is not None
    num_ranks = config.deployment.num_value_gpus
    argv = _torchrun(config, num_ranks, "value_service.main", run_dir, site)
    port = ports["value_http_port"]
    env = process_env(config, site, _gpus_of(config, "value"))
    ready_url = f"{url_of(config.value.host, port)}/readyz"
    return ProcessPlan("value", argv, env, num_ranks, {"http_port": port}, ready_url)


def _orchestrator(config: Config, ports: dict[str, int], run_dir: Path, site: Site) -> ProcessPlan:
    argv = [site.python, "-m", "orchestrator.main", "--run-dir", str(run_dir)]
    port = ports["orchestrator_http_port"]
    own = {"http_port": port, "policy_grid_port": ports["policy_grid_port"]}
    if config.value is not None:
        own["critic_grid_port"] = ports["critic_grid_port"]
    env = process_env(config, site, [])
    return ProcessPlan("orchestrator", argv, env, 1, own, f"{_http(port)}/livez")


def _torchrun(config: Config, num_ranks: int, module: str, run_dir: Path, site: Site) -> list[str]:
    # torchrun binds its own stores (on ports of the kernel's choice); fixed size, and restarts are the launcher's
    return [
        *(site.python, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(num_ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:0", "--local-addr", LOOPBACK),
        *("--max-restarts", "0"),
        *("-m", module, "--run-dir", str(run_dir)),
    ]


def process_env(config: Config, site: Site, gpus: list[int]) -> dict[str, str]:
    """Environment of one process.

    Args:
        config: The resolved configuration.
        site: Where it runs.
        gpus: Its CUDA devices; empty hides all of them.
    """
    env = {
        "PYTHONPATH": site.search_path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus),
    }
    if config.deployment.device == "cpu":
        # two spinning thread pools on one core are many times slower than one thread each
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return env


def _gpus_of(config: Config, role: str) -> list[int]:
    """CUDA devices of a role: policy first, then critic, then inference."""
    deployment = config.deployment
    if deployment.device == "cpu":
        return []
    num_value = deployment.num_value_gpus if config.value is not None else 0
    starts = {"policy": 0, "value": deployment.num_policy_gpus, "inference": deployment.num_policy_gpus + num_value}
    counts = {"policy": deployment.num_policy_gpus, "value": num_value, "inference": deployment.num_inference_gpus}
    return list(range(starts[role], starts[role] + counts[role]))


def _http(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"
