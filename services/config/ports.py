"""The ports of a run: their names, and the keys that can fix them.

Notable:
- One name for everything that a process of ours listens on, so that all of them are chosen together: control routes,
  grids, engines, the router with its metrics, and the meeting points of groups that span nodes. A group on one node
  lets its own store choose.
- The router, its guard and several engines have no key: their ports are always chosen.
"""

from __future__ import annotations

from services.config.schema import Config
from services.config.toml_lines import KeyPath

PORT_KEYS: dict[str, KeyPath] = {
    "inference_http_port": ("inference", "port"),
    "policy_http_port": ("policy", "port"),
    "policy_grid_port": ("orchestrator", "policy_grid_port"),
    "value_http_port": ("value", "port"),
    "critic_grid_port": ("orchestrator", "critic_grid_port"),
    "orchestrator_http_port": ("orchestrator", "port"),
}
"""The ports of a run that a key can fix, and that key."""
ROUTER_PORT, ROUTER_METRICS_PORT, GUARD_PORT = "router_http_port", "router_metrics_port", "guard_http_port"
POLICY_RDZV_PORT, VALUE_RDZV_PORT = "policy_rdzv_port", "value_rdzv_port"


def engine_names(config: Config) -> list[str]:
    """Names of the inference processes: a number each where there are several."""
    num = config.num_engines
    return ["inference"] if num == 1 else [f"inference-{index}" for index in range(num)]


def engine_port(engine: str) -> str:
    """Name of the port of an inference process."""
    return f"{engine.replace('-', '_')}_http_port"


def port_names(config: Config) -> list[str]:
    """Names of the ports that a run needs; without a critic none of the critic's."""
    names = [engine_port(engine) for engine in engine_names(config)]
    if len(names) > 1:
        names += [ROUTER_PORT, ROUTER_METRICS_PORT, GUARD_PORT]
    names += ["policy_http_port", "policy_grid_port"]
    if config.deployment.num_train_nodes > 1:
        names.append(POLICY_RDZV_PORT)
    if config.value is not None:
        names += ["value_http_port", "critic_grid_port"]
        if config.deployment.num_critic_nodes > 1:
            names.append(VALUE_RDZV_PORT)
    return [*names, "orchestrator_http_port"]


def fixed_ports(config: Config) -> dict[str, int]:
    """The ports that the configuration fixes, by name."""
    ports = {}
    for name in port_names(config):
        if name in PORT_KEYS:
            section, key = PORT_KEYS[name]
            port = getattr(getattr(config, str(section)), str(key))
            if port:
                ports[name] = port
    return ports
