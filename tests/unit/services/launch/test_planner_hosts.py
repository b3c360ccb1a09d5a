"""The planner over several nodes, engines and layouts: addresses, meeting points, routers, tokens; pure, by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.config.context import Host, RunContext
from services.config.ports import port_names
from services.config.schema import Config
from services.launch.models import ModelSource
from services.launch.on_node import node_argv
from services.launch.placement import place, port_hosts
from services.launch.planner import LOCAL, Plan, ProcessPlan, Site, plan
from services.runtime.after import split_wait

SITE = Site(Path("/project"), "/usr/bin/python3", torch_version="2.13.0+cpu")
HOSTS = [Host(f"n{index}", f"10.0.0.{index + 1}") for index in range(5)]
SPLIT = {"num_train_nodes": 2, "num_policy_gpus": 8, "num_value_gpus_per_train_node": 3, "num_inference_nodes": 1}


def config_of(*, critic: bool = True, runtime: dict | None = None, tp: int = 1, **deployment: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/models/policy"},
            "algorithm": {"type": "sao" if critic else "grpo"},
            "env": [{"type": "add"}],
            "inference": {"engine": "vllm", "vllm_python": "/vllm/bin/python", "tp": tp},
            "runtime": runtime or {},
            "deployment": {"kind": "slurm", "device": "cuda"} | deployment,
        }
        | ({"value": {}} if critic else {})
    )


def lay_out(config: Config, *, hosts: list[Host] | None = None, site: Site = SITE, **more: Any) -> Plan:
    ports = {name: 20000 + index for index, name in enumerate(port_names(config))}
    if hosts is None:
        hosts = HOSTS[: place(config).num_nodes] if place(config).num_nodes > 1 else [LOCAL]
    model = ModelSource(Path("/models/policy"))
    return plan(
        config, ports, hosts=hosts, run_dir=Path("/runs/r"), run_id="r-1", epoch=2, model=model, site=site, **more
    )


def process_of(layout: Plan, name: str) -> ProcessPlan:
    return next(process for process in layout.processes if process.name == name)


def flags(argv: list[str]) -> dict[str, str]:
    return dict(itertools.pairwise(argv))


# ---------------------------------------------------------------- groups on several nodes


def test_two_groups_on_shared_nodes_have_disjoint_gpus_and_two_meeting_points() -> None:
    layout = lay_out(config_of(**SPLIT))
    policy, value = process_of(layout, "policy"), process_of(layout, "value")
    assert (policy.nodes, policy.gpus, policy.num_ranks) == ([0, 1], [0, 1, 2, 3], 8)
    assert (value.nodes, value.gpus, value.num_ranks) == ([0, 1], [4, 5, 6], 6)
    assert policy.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3" and value.env["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    for process, port in ((policy, "policy_rdzv_port"), (value, "value_rdzv_port")):
        told = flags(process.argv)
        assert (told["--nnodes"], told["--nproc-per-node"]) == ("2", str(len(process.gpus)))
        assert told["--rdzv-backend"] == "static"
        assert told["--rdzv-endpoint"] == f"10.0.0.1:{layout.ports[port]}"
        assert told["--rdzv-id"] == f"r-1-2-{process.name}"
        assert process.ports["rdzv_port"] == layout.ports[port]
    assert layout.ports["policy_rdzv_port"] != layout.ports["value_rdzv_port"]


def test_a_critic_on_its_own_nodes_meets_and_listens_on_the_first_of_them() -> None:
    layout = lay_out(config_of(num_policy_gpus=4, num_value_nodes=2, num_inference_gpus=4, tp=4))
    value = process_of(layout, "value")
    assert (value.nodes, value.gpus, value.num_ranks) == ([1, 2], list(range(8)), 16)
    assert flags(value.argv)["--rdzv-endpoint"] == f"10.0.0.2:{layout.ports['value_rdzv_port']}"
    assert layout.context.value_url == f"http://10.0.0.2:{layout.ports['value_http_port']}"
    assert value.ready_url == f"{layout.context.value_url}/readyz"


def test_a_group_on_one_of_several_nodes_lets_its_store_choose_on_loopback() -> None:
    layout = lay_out(config_of(num_policy_gpus=4, num_value_nodes=1, num_inference_gpus=4, tp=4))
    for name in ("policy", "value"):
        told = flags(process_of(layout, name).argv)
        assert (told["--nnodes"], told["--rdzv-endpoint"], told["--local-addr"]) == ("1", "127.0.0.1:0", "127.0.0.1")
        assert "rdzv_port" not in process_of(layout, name).ports


def test_every_url_is_of_the_host_that_binds_its_port_and_none_of_all_interfaces() -> None:
    config = config_of(**SPLIT, num_inference_gpus=2)
    layout, where = lay_out(config), port_hosts(config)
    text = json.dumps(layout.to_json()) + json.dumps(layout.context.model_dump(mode="json"))
    assert "0.0.0.0" not in text
    on_loopback = {"router_http_port", "router_metrics_port", "guard_http_port"}
    urls = [value for key, value in layout.context.model_dump().items() if key.endswith("_url") and value]
    urls += layout.context.inference_urls
    by_port = {int(url.rpartition(":")[2]): url.split("//")[1].rpartition(":")[0] for url in urls}
    for name, port in layout.ports.items():
        if port in by_port:
            expected = "127.0.0.1" if name in on_loopback else HOSTS[where[name]].address
            assert by_port[port] == expected, name
    assert len(by_port) == len(layout.ports) - 3, "meeting points and the router's metrics have no URL"


def test_on_cpu_gloo_takes_loopback_only_where_the_whole_run_is_there() -> None:
    cpu = {"device": "cpu", "num_value_nodes": 1, "gpus_per_node": 2}
    apart = lay_out(config_of(**cpu))
    assert "GLOO_SOCKET_IFNAME" not in process_of(apart, "value").env
    together = lay_out(config_of(**cpu), hosts=[Host("n0", "127.0.0.1"), Host("n1", "127.0.0.1")])
    assert process_of(together, "value").env["GLOO_SOCKET_IFNAME"] == "lo"
    assert process_of(together, "value").gpus == [] and process_of(together, "value").num_ranks == 2


def test_there_are_as_many_hosts_as_nodes() -> None:
    with pytest.raises(ValueError, match="3 hosts are needed, 1 were given"):
        lay_out(config_of(**SPLIT), hosts=[LOCAL])


def test_the_hosts_are_in_the_context_and_come_back_from_its_json() -> None:
    context = lay_out(config_of(**SPLIT)).context
    assert context.hosts == HOSTS[:3]
    assert RunContext.model_validate(json.loads(context.model_dump_json())) == context


# ---------------------------------------------------------------- steps of a job


def test_every_process_of_a_job_starts_through_what_knows_its_node() -> None:
    layout = lay_out(config_of(**SPLIT))
    policy, orchestrator = process_of(layout, "policy"), process_of(layout, "orchestrator")
    assert policy.argv[:3] == ["/usr/bin/python3", "-m", "services.launch.on_node"]
    assert policy.argv[3:10] == [
        *("--addresses", "10.0.0.1,10.0.0.2", "--names", "n0,n1", "--gpus", "0,1,2,3"),
        "--",
    ]
    assert policy.argv[10:13] == ["/usr/bin/python3", "-m", "torch.distributed.run"]
    assert flags(orchestrator.argv)["--gpus"] == "" and orchestrator.nodes == [0]
    local = lay_out(config_of(kind="local"))
    assert all("services.launch.on_node" not in process.argv for process in local.processes)


@pytest.mark.parametrize(
    ("version", "grace_s", "kind", "expected"),
    [
        ("2.13.0+cpu", 540.0, "slurm", ["--shutdown-timeout=540", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]),
        ("2.14.1", 540.0, "slurm", ["--shutdown-timeout=540", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]),
        ("3.0", 31.0, "local", ["--shutdown-timeout=31"]),
        ("2.13.0", 10.0, "local", []),
        ("2.11.0+cu128", 540.0, "slurm", []),
        ("", 540.0, "slurm", []),
    ],
)
def test_torchrun_waits_for_ranks_that_commit_where_it_can(
    version: str, grace_s: float, kind: str, expected: list[str]
) -> None:
    config = config_of(runtime={"shutdown_grace_s": grace_s}, kind=kind)
    argv = process_of(lay_out(config, site=replace(SITE, torch_version=version)), "policy").argv
    assert [word for word in argv if word.startswith(("--shutdown-timeout", "--signals-to-handle"))] == expected


def test_the_words_for_torchrun_are_words_that_it_knows() -> None:
    """Asked of the installed torch, without starting anything."""
    from torch.distributed.run import get_args_parser

    config = config_of(**SPLIT, runtime={"shutdown_grace_s": 540.0})
    argv = process_of(lay_out(config), "policy").argv
    words = argv[argv.index("torch.distributed.run") + 1 :]
    args = get_args_parser().parse_args(words)
    assert (args.nnodes, args.nproc_per_node, args.shutdown_timeout, args.max_restarts) == ("2", "4", 540, 0)
    assert (args.rdzv_backend, args.rdzv_conf) == ("static", "timeout=300")


# ---------------------------------------------------------------- engines and the router


def test_several_engines_have_numbers_ports_gpus_and_a_router_with_a_guard() -> None:
    layout = lay_out(config_of(kind="local", num_policy_gpus=2, num_value_gpus=2, num_inference_gpus=4, tp=2))
    names = [process.name for process in layout.processes]
    assert names == ["inference-0", "inference-1", "router", "router-guard", "policy", "value", "orchestrator"]
    first, second = (process_of(layout, f"inference-{index}") for index in range(2))
    assert (first.gpus, second.gpus) == ([4, 5], [6, 7])
    assert flags(second.argv)["--tensor-parallel-size"] == "2"
    assert flags(second.argv)["--port"] == str(layout.ports["inference_1_http_port"])
    assert layout.context.inference_urls == [
        f"http://127.0.0.1:{layout.ports[f'inference_{index}_http_port']}" for index in range(2)
    ]
    assert layout.context.router_url == f"http://127.0.0.1:{layout.ports['guard_http_port']}"
    assert layout.context.router_control_url == f"http://127.0.0.1:{layout.ports['router_http_port']}"
    router = process_of(layout, "router")
    assert router.ports == {
        "http_port": layout.ports["router_http_port"],
        "metrics_port": layout.ports["router_metrics_port"],
    }
    assert flags(router.argv)["--prometheus-port"] == str(router.ports["metrics_port"])


def test_an_engine_on_another_node_listens_on_that_node_s_address() -> None:
    layout = lay_out(config_of(num_policy_gpus=4, num_inference_nodes=2, num_inference_gpus=4, tp=2))
    second = process_of(layout, "inference-1")
    assert (second.nodes, second.gpus) == ([2], [0, 1])
    assert flags(second.argv)["--host"] == "10.0.0.3"
    assert layout.context.inference_urls[1].startswith("http://10.0.0.3:")
    assert process_of(layout, "router").nodes == [0]


def test_local_engines_know_which_of_the_run_s_they_are() -> None:
    config = config_of(kind="local", device="cpu", num_inference_gpus=2)
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"engine": "local"})})
    layout = lay_out(config)
    assert [process.argv[-2:] for process in layout.processes[:2]] == [["--engine-index", "0"], ["--engine-index", "1"]]


def test_a_replay_has_neither_engines_nor_a_router() -> None:
    layout = lay_out(config_of(num_inference_gpus=2), replay_of=Path("/runs/old"))
    assert [process.name for process in layout.processes] == ["policy", "value", "orchestrator"]
    assert (layout.context.inference_urls, layout.context.router_url, layout.context.router_control_url) == (
        [],
        None,
        None,
    )


# ---------------------------------------------------------------- the token


@pytest.mark.parametrize(
    ("hosts", "setting", "is_asked"),
    [
        (HOSTS[:2], "auto", True),
        ([Host("n0", "127.0.0.1"), Host("n1", "127.0.0.1")], "auto", False),
        ([Host("n0", "127.0.0.1"), Host("n1", "127.0.0.1")], "always", True),
        ([Host("n0", "login"), Host("n1", "login")], "auto", True),
    ],
)
def test_a_token_is_asked_for_beyond_loopback_or_always(hosts: list[Host], setting: str, is_asked: bool) -> None:
    config = config_of(num_value_nodes=1, runtime={"token": setting})
    layout = lay_out(config, hosts=hosts)
    assert layout.context.token_file == ("/runs/r/token" if is_asked else None)
    engine = process_of(layout, "inference")
    assert ("--middleware" in engine.argv) == is_asked
    assert (engine.env.get("COUNTERPOINT_TOKEN_FILE") == "/runs/r/token") == is_asked


def test_time_shared_roles_see_the_same_devices() -> None:
    layout = lay_out(config_of(kind="local", sharing="time", num_policy_gpus=4, num_inference_gpus=4, tp=4))
    seen = {name: process_of(layout, name).env["CUDA_VISIBLE_DEVICES"] for name in ("inference", "policy", "value")}
    assert set(seen.values()) == {"0,1,2,3"}


# ---------------------------------------------------------------- one after another


TIME = {"kind": "local", "sharing": "time", "num_policy_gpus": 4, "num_inference_gpus": 4}


def waits_for(process: ProcessPlan) -> str | None:
    """Whose `/readyz` a process waits for; the wait is checked word by word."""
    wait, command = split_wait(process.argv)
    assert process.argv == [*wait, *command] and "services.runtime.after" not in command
    if not wait:
        return None
    python, dash_m, module, url, *rest = wait
    assert (python, dash_m, module, rest) == (
        "/usr/bin/python3",
        "-m",
        "services.runtime.after",
        ["--deadline-s", "1800", "--"],
    )
    return url


def test_who_shares_devices_loads_once_the_one_before_it_sleeps() -> None:
    layout = lay_out(config_of(tp=2, runtime={"startup_deadline_s": 1800.0}, **TIME))
    policy, value = (process_of(layout, name).ready_url for name in ("policy", "value"))
    assert policy.endswith(f":{layout.ports['policy_http_port']}/readyz")
    assert value.endswith(f":{layout.ports['value_http_port']}/readyz")
    waiting = {process.name: waits_for(process) for process in layout.processes}
    nobody = dict.fromkeys(("router", "router-guard", "policy", "orchestrator"))
    assert waiting == nobody | {"value": policy, "inference-0": value, "inference-1": value}


def test_engines_with_gpus_of_their_own_wait_for_nobody() -> None:
    runtime = {"startup_deadline_s": 1800.0}
    layout = lay_out(config_of(tp=2, runtime=runtime, **TIME | {"sharing": "time_train"}))
    waiting = {process.name: waits_for(process) for process in layout.processes}
    assert {name for name, url in waiting.items() if url is not None} == {"value"}


def test_without_a_critic_engines_wait_for_the_policy_and_without_engines_the_critic_does() -> None:
    config = config_of(critic=False, tp=4, runtime={"startup_deadline_s": 1800.0}, **TIME)
    layout = lay_out(config)
    policy = process_of(layout, "policy").ready_url
    waiting = {process.name: waits_for(process) for process in layout.processes}
    assert waiting == {"inference": policy, "policy": None, "orchestrator": None}
    again = lay_out(config_of(tp=4, runtime={"startup_deadline_s": 1800.0}, **TIME), replay_of=Path("/runs/old"))
    assert [waits_for(process) is not None for process in again.processes] == [False, True, False]


def test_nobody_waits_where_nobody_shares() -> None:
    assert not any(waits_for(process) for process in lay_out(config_of(kind="local", num_inference_gpus=2)).processes)


def test_on_several_nodes_every_agent_waits_for_the_first_node_s_rank_behind_the_words_of_its_node() -> None:
    sizes = {"sharing": "time", "num_train_nodes": 2, "num_policy_gpus": 8, "num_inference_gpus": 8}
    layout = lay_out(config_of(tp=4, **sizes))
    value, policy_port = process_of(layout, "value"), layout.ports["policy_http_port"]
    assert value.nodes == [0, 1]
    words = value.argv[value.argv.index("--") + 1 :]
    assert words[1:4] == ["-m", "services.runtime.after", f"http://10.0.0.1:{policy_port}/readyz"]
    told = node_argv(words, ["10.0.0.1", "10.0.0.2"], 1)
    at = told.index("torch.distributed.run")
    assert told[at - 3 : at + 5] == [
        "--",
        "/usr/bin/python3",
        "-m",
        "torch.distributed.run",
        "--node-rank",
        "1",
        "--local-addr",
        "10.0.0.2",
    ]
