"""The command line of `vllm-router`, with its own judgement of engines switched off. Pure, and free of torch.

Notable:
- It starts without engines: the orchestrator adds each one once all have answered and hold the run's weights
  (`orchestrator/routing.py`). So one that comes up anew routes nothing until it is told to.
- It ejects nobody: no retries, no circuit breaker, no health checks (5 s by default, which a busy engine misses). All
  it sees of an engine are HTTP answers: not which weights it serves, nor whether it is getting on.
- Rotation, not the least loaded: an engine that has just died fails at once, is the least loaded and would draw all.
- Its metrics port cannot be left out; without one it takes 29000. Nobody of ours reads it.
- It forwards any path, so it listens on loopback, and `router_guard.py` stands in front of it. In a run with a token it
  asks for that too, on every path (`router_process.py`).
"""

from __future__ import annotations

import math

from services.config.schema import Config
from services.inference.router_limits import TOKEN_PATH, max_body_bytes

NEVER_S = 10 * 365 * 24 * 3600
NEVER = 2**32 - 1
SPARE_S = 60
"""The caller's deadline comes first; this one only ends what its caller has forgotten."""


def router_command(
    config: Config, *, host: str, port: int, metrics_port: int, python: str, guard_url: str | None = None
) -> list[str]:
    """Build the argument vector.

    Args:
        config: the run's configuration.
        host: address it listens on: loopback.
        port: where the guard and the orchestrator speak to it.
        metrics_port: where it offers Prometheus metrics, on loopback.
        python: the interpreter that has `vllm-router` (the extra `router`).
        guard_url: the guard, where the run has a token: it says whether a caller's is right. None = nobody is asked.
    """
    module = ["vllm_router.launch_router"]
    if guard_url is not None:
        module = ["services.inference.router_process", "--token-check-url", guard_url + TOKEN_PATH]
    return [
        *(python, "-m", *module),
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", "round_robin"),
        "--disable-retries",
        "--disable-circuit-breaker",
        *("--health-failure-threshold", str(NEVER), "--health-check-interval-secs", str(NEVER_S)),
        # how long an engine that is being added may take to answer, and when it is asked again
        *("--health-check-timeout-secs", str(math.ceil(config.inference.probe_deadline_s))),
        *("--worker-startup-check-interval", "1"),
        *("--request-timeout-secs", str(math.ceil(config.orchestrator.rollout_deadline_s) + SPARE_S)),
        *("--max-payload-size", str(max_body_bytes(config.inference.max_model_len))),
        *("--queue-size", str(config.orchestrator.max_concurrent_rollouts)),
        *("--log-level", "warning"),
    ]
