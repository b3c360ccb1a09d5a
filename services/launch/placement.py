"""Which GPUs of which nodes every role gets: pure arithmetic on `[deployment]`.

    train nodes      policy | critic beside it | inference (first node, where it has no nodes of its own)
    critic nodes     critic, all GPUs          (`num_value_nodes`)
    inference nodes  engines, one after another (`num_inference_nodes`)

Notable:
- Nodes are numbered in that order; orchestrator, router and launcher are on node 0.
- A role has the same GPUs on each of its nodes, so that one torchrun command line serves all of them.
- With `sharing` the roles that take turns begin at GPU 0 together.
- Sizes that do not fit were refused by the resolver; nothing is checked again here.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.config.ports import (
    GUARD_PORT,
    POLICY_RDZV_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    VALUE_RDZV_PORT,
    engine_names,
    engine_port,
    port_names,
)
from services.config.schema import Config


@dataclass(frozen=True)
class RolePlace:
    """Where one process or torchrun group is."""

    nodes: list[int]
    """Host indexes; rank 0 is on the first."""
    gpus: list[int]
    """On each of the nodes; on CPU numbers of ranks, which nobody makes visible."""

    @property
    def num_ranks(self) -> int:
        """On all nodes together."""
        return len(self.nodes) * len(self.gpus)


@dataclass(frozen=True)
class Placement:
    """Where every role is."""

    num_nodes: int
    policy: RolePlace
    value: RolePlace | None
    """None without a critic."""
    engines: list[RolePlace]
    """One for every inference process."""


def place(config: Config) -> Placement:
    """Give every role its nodes and GPUs.

    Args:
        config: A configuration that the resolver accepted.
    """
    deployment = config.deployment
    num_train = deployment.num_train_nodes
    policy = RolePlace(list(range(num_train)), list(range(deployment.num_policy_gpus // num_train)))
    value = _place_critic(config, policy) if config.value is not None else None
    num_nodes = num_train + (deployment.num_critic_nodes if _has_own_nodes(config) else 0)
    engines = _place_engines(config, policy, value, first_free_node=num_nodes)
    return Placement(num_nodes + deployment.num_inference_nodes, policy, value, engines)


def port_hosts(config: Config) -> dict[str, int]:
    """For every port of `port_names`, the index of the host whose process binds it."""
    where = place(config)
    hosts = {
        "policy_http_port": where.policy.nodes[0],
        POLICY_RDZV_PORT: where.policy.nodes[0],
        **dict.fromkeys(("policy_grid_port", "critic_grid_port", "orchestrator_http_port"), 0),
        **dict.fromkeys((ROUTER_PORT, ROUTER_METRICS_PORT, GUARD_PORT), 0),
    }
    if where.value is not None:
        hosts |= dict.fromkeys(("value_http_port", VALUE_RDZV_PORT), where.value.nodes[0])
    for engine, at in zip(engine_names(config), where.engines, strict=True):
        hosts[engine_port(engine)] = at.nodes[0]
    return {name: hosts[name] for name in port_names(config)}


def _has_own_nodes(config: Config) -> bool:
    """Whether the critic has nodes without any other role."""
    deployment = config.deployment
    return config.value is not None and deployment.num_value_nodes > 0 and deployment.sharing == "none"


def _place_critic(config: Config, policy: RolePlace) -> RolePlace:
    deployment = config.deployment
    if deployment.sharing != "none":
        return policy
    num_nodes = deployment.num_critic_nodes
    num_gpus = deployment.num_critic_gpus // num_nodes
    if _has_own_nodes(config):
        first = deployment.num_train_nodes
        return RolePlace(list(range(first, first + num_nodes)), list(range(num_gpus)))
    start = len(policy.gpus)
    return RolePlace(list(range(num_nodes)), list(range(start, start + num_gpus)))


def _place_engines(
    config: Config, policy: RolePlace, value: RolePlace | None, *, first_free_node: int
) -> list[RolePlace]:
    deployment, num_engines, tp = config.deployment, config.num_engines, config.inference.tp
    start = 0
    if deployment.num_inference_nodes:
        nodes = list(range(first_free_node, first_free_node + deployment.num_inference_nodes))
    elif deployment.sharing == "time":
        nodes = policy.nodes
    else:
        nodes = policy.nodes[:1]
        taken = [*policy.gpus, *(value.gpus if value is not None and nodes[0] in value.nodes else [])]
        start = max(taken) + 1
    per_node = num_engines // len(nodes)
    return [
        RolePlace([nodes[index // per_node]], _run_of(start + index % per_node * tp, tp))
        for index in range(num_engines)
    ]


def _run_of(start: int, num: int) -> list[int]:
    return list(range(start, start + num))
