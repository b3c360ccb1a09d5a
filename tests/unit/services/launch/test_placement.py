"""Which GPUs of which nodes every role gets, and which host binds which port; by hand, and over a grid of sizes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from services.config.deployment_checks import deployment_findings
from services.config.ports import port_names
from services.config.schema import Config
from services.launch.placement import Placement, RolePlace, place, port_hosts


def config_of(*, critic: bool = True, tp: int = 1, device: str = "cuda", **deployment: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/no/such/model"},
            "algorithm": {"type": "sao" if critic else "grpo"},
            "env": [{"type": "add"}],
            "inference": {"engine": "vllm", "tp": tp},
            "deployment": {"kind": "slurm", "device": device} | deployment,
        }
        | ({"value": {}} if critic else {})
    )


def test_dedicated_gpus_of_one_node() -> None:
    """2 policy, 2 critic, 4 inference of 8."""
    where = place(config_of(num_policy_gpus=2, num_value_gpus=2, num_inference_gpus=4))
    assert where == Placement(
        num_nodes=1,
        policy=RolePlace([0], [0, 1]),
        value=RolePlace([0], [2, 3]),
        engines=[RolePlace([0], [gpu]) for gpu in (4, 5, 6, 7)],
    )


def test_without_a_critic_inference_follows_the_policy() -> None:
    """2 policy, 6 inference; an engine of two GPUs has neighbours."""
    where = place(config_of(critic=False, num_policy_gpus=2, num_inference_gpus=6, tp=2))
    assert where.value is None
    assert where.policy == RolePlace([0], [0, 1])
    assert where.engines == [RolePlace([0], gpus) for gpus in ([2, 3], [4, 5], [6, 7])]


def test_a_critic_on_nodes_of_its_own_has_all_their_gpus() -> None:
    where = place(config_of(num_policy_gpus=4, num_value_nodes=2, num_inference_gpus=4, tp=4, gpus_per_node=8))
    assert where.num_nodes == 3
    assert where.policy == RolePlace([0], [0, 1, 2, 3])
    assert where.value == RolePlace([1, 2], list(range(8)))
    assert where.value.num_ranks == 16
    assert where.engines == [RolePlace([0], [4, 5, 6, 7])]


def test_both_groups_share_every_train_node_on_disjoint_gpus() -> None:
    """2 nodes of 8: 5 of the policy and 3 of the critic on each; inference on a third node."""
    sizes = {"num_train_nodes": 2, "num_policy_gpus": 10, "num_value_gpus_per_train_node": 3}
    where = place(config_of(**sizes, num_inference_nodes=1, num_inference_gpus=8, tp=4))
    assert where.num_nodes == 3
    assert where.policy == RolePlace([0, 1], [0, 1, 2, 3, 4])
    assert where.value == RolePlace([0, 1], [5, 6, 7])
    assert (where.policy.num_ranks, where.value.num_ranks) == (10, 6)
    assert where.engines == [RolePlace([2], [0, 1, 2, 3]), RolePlace([2], [4, 5, 6, 7])]


def test_inference_nodes_come_last_and_are_filled_one_after_another() -> None:
    sizes = {"num_policy_gpus": 8, "num_value_nodes": 1, "num_inference_nodes": 2, "num_inference_gpus": 8}
    where = place(config_of(**sizes, tp=2))
    assert where.num_nodes == 4
    assert where.value == RolePlace([1], list(range(8)))
    assert [(at.nodes, at.gpus) for at in where.engines] == [
        ([2], [0, 1]),
        ([2], [2, 3]),
        ([3], [0, 1]),
        ([3], [2, 3]),
    ]


def test_a_small_critic_and_inference_are_on_the_first_of_several_train_nodes() -> None:
    where = place(config_of(num_train_nodes=2, num_policy_gpus=8, num_value_gpus=2, num_inference_gpus=2))
    assert where.policy == RolePlace([0, 1], [0, 1, 2, 3])
    assert where.value == RolePlace([0], [4, 5])
    assert where.engines == [RolePlace([0], [6]), RolePlace([0], [7])]


def test_roles_that_take_turns_begin_at_the_same_gpu() -> None:
    where = place(config_of(sharing="time", num_policy_gpus=8, num_inference_gpus=8, tp=4))
    assert where.num_nodes == 1
    assert where.policy == where.value == RolePlace([0], list(range(8)))
    assert where.engines == [RolePlace([0], [0, 1, 2, 3]), RolePlace([0], [4, 5, 6, 7])]
    spread = place(config_of(sharing="time", num_train_nodes=2, num_policy_gpus=8, num_inference_gpus=8, tp=2))
    assert spread.value == RolePlace([0, 1], [0, 1, 2, 3])
    assert [at.nodes[0] for at in spread.engines] == [0, 0, 1, 1]
    assert [at.gpus for at in spread.engines] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_training_takes_turns_beside_inference_of_its_own() -> None:
    where = place(config_of(sharing="time_train", num_policy_gpus=4, num_inference_gpus=4, tp=4))
    assert where.policy == where.value == RolePlace([0], [0, 1, 2, 3])
    assert where.engines == [RolePlace([0], [4, 5, 6, 7])]


def test_on_cpu_ranks_and_engines_are_numbers_alone() -> None:
    sizes = {"num_policy_gpus": 2, "num_value_nodes": 1, "gpus_per_node": 2, "num_inference_gpus": 2}
    where = place(config_of(device="cpu", **sizes))
    assert where.num_nodes == 2
    assert (where.policy.num_ranks, where.value and where.value.num_ranks, len(where.engines)) == (2, 2, 2)


# ---------------------------------------------------------------- ports


def test_ports_are_bound_where_their_process_is() -> None:
    sizes = {"num_train_nodes": 2, "num_policy_gpus": 8, "num_value_nodes": 2}
    hosts = port_hosts(config_of(**sizes, num_inference_nodes=1, num_inference_gpus=2))
    assert hosts == {
        "inference_0_http_port": 4,
        "inference_1_http_port": 4,
        "router_http_port": 0,
        "router_metrics_port": 0,
        "guard_http_port": 0,
        "policy_http_port": 0,
        "policy_grid_port": 0,
        "policy_rdzv_port": 0,
        "value_http_port": 2,
        "critic_grid_port": 0,
        "value_rdzv_port": 2,
        "orchestrator_http_port": 0,
    }


def test_two_groups_on_shared_nodes_meet_at_two_ports_of_the_first() -> None:
    sizes = {"num_train_nodes": 2, "num_policy_gpus": 8, "num_value_gpus_per_train_node": 4}
    hosts = port_hosts(config_of(**sizes, num_inference_nodes=1))
    assert (hosts["policy_rdzv_port"], hosts["value_rdzv_port"]) == (0, 0)


def test_a_group_on_one_node_has_no_meeting_point_and_one_engine_no_router() -> None:
    names = port_names(config_of(num_policy_gpus=4, num_value_gpus=3))
    assert names == [
        "inference_http_port",
        "policy_http_port",
        "policy_grid_port",
        "value_http_port",
        "critic_grid_port",
        "orchestrator_http_port",
    ]


# ---------------------------------------------------------------- every size


def sizes() -> list[dict]:
    """A grid of sizes, most of them wrong."""
    keys = {
        "num_train_nodes": (1, 2),
        "num_policy_gpus": (2, 3, 4),
        "critic": ({}, {"num_value_gpus": 2}, {"num_value_nodes": 2}, {"num_value_gpus_per_train_node": 1}),
        "num_inference_gpus": (2, 4),
        "num_inference_nodes": (0, 2),
        "sharing": ("none", "time", "time_train"),
        "tp": (1, 2),
        "gpus_per_node": (4, 6),
    }
    found = [dict(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]
    return [size.pop("critic") | size for size in found]


def taken(where: Placement) -> Counter[tuple[int, int]]:
    """How many processes have each (node, GPU)."""
    roles = [where.policy, *([where.value] if where.value is not None else []), *where.engines]
    return Counter((node, gpu) for role in roles for node in role.nodes for gpu in role.gpus)


@pytest.mark.parametrize("sharing", ["none", "time", "time_train"])
def test_whatever_the_resolver_accepts_has_its_gpus_to_itself_or_takes_turns(sharing: str) -> None:
    """An independent count: accepted sizes place all GPUs within their nodes, each with as many roles as take turns."""
    num_accepted = 0
    for size in sizes():
        config = config_of(**size)
        if size["sharing"] != sharing or list(deployment_findings(config)):
            continue
        num_accepted += 1
        where = place(config)
        counts = taken(where)
        assert all(node < where.num_nodes and gpu < size["gpus_per_node"] for node, gpu in counts), size
        wanted = size["num_policy_gpus"] + config.num_value_gpus + size["num_inference_gpus"]
        assert counts.total() == wanted, size
        assert max(counts.values()) == {"none": 1, "time": 3, "time_train": 2}[sharing], size
        assert {node for node, _ in counts} == set(range(where.num_nodes)), size
    assert num_accepted > 5


def test_what_the_resolver_refuses_for_its_size_would_not_fit() -> None:
    """The other way about: where only the capacity is at fault, the placement does exceed a node."""
    num_refused = 0
    for size in sizes():
        config = config_of(**size)
        findings = list(deployment_findings(config))
        if [finding.path for finding in findings] == [("deployment", "gpus_per_node")]:
            num_refused += 1
            assert max(gpu for _, gpu in taken(place(config))) >= size["gpus_per_node"], size
    assert num_refused > 5
