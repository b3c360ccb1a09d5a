"""`[deployment]`: every wrong size is one problem with its key, its line and a fix; right ones are let through."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import Config, from_toml, to_toml
from services.wire.errors import ConfigError

BASE = """\
[model]
path = "dummy:{model}"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[deployment]
kind = "slurm"
device = "cuda"
gpus_per_node = 8
num_policy_gpus = 4
num_inference_gpus = 2
"""
GRPO = (("algorithm.type", "grpo"), ("orchestrator.group_size", "4"), ("value", "none"))
LOCAL = ("deployment.kind", "local")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 8, "num_experts": 48}))
    (model / "tokenizer.json").write_text("{}")
    written = tmp_path / "run.toml"
    written.write_text(BASE.format(model=model))
    return written


def sized(**sizes: object) -> list[tuple[str, str]]:
    return [(f"deployment.{key}", str(value)) for key, value in sizes.items()]


def config_of(path: Path, *settings: tuple[str, str]) -> Config:
    return resolve([path], settings).config


def problems_of(path: Path, *settings: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve([path], settings)
    assert all("; fix: " in problem for problem in caught.value.problems)
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def only(path: Path, *settings: tuple[str, str]) -> str:
    problems = problems_of(path, *settings)
    assert len(problems) == 1, problems
    return problems[0]


# ---------------------------------------------------------------- how many GPUs the critic has


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "num_nodes"),
    [
        ({}, 1, 1),
        ({"num_value_gpus": 2}, 2, 1),
        ({"num_value_nodes": 2}, 16, 2),
        ({"num_value_nodes": 1, "gpus_per_node": 4, "num_inference_nodes": 1}, 4, 1),
        ({"num_train_nodes": 4, "num_value_gpus_per_train_node": 3}, 12, 4),
        ({"sharing": "time_train"}, 4, 1),
        ({"sharing": "time_train", "num_train_nodes": 2}, 4, 2),
    ],
)
def test_the_critic_s_gpus_are_counted_in_every_layout(path: Path, sizes: dict, num_gpus: int, num_nodes: int) -> None:
    config = config_of(path, *sized(**sizes))
    assert (config.num_value_gpus, config.deployment.num_critic_nodes) == (num_gpus, num_nodes)
    assert from_toml(to_toml(config)) == config


def test_without_a_critic_it_has_none(path: Path) -> None:
    assert config_of(path, *GRPO).num_value_gpus == 0


def test_a_resolved_configuration_of_every_layout_resolves_again(path: Path, tmp_path: Path) -> None:
    """What was left out stays out: no default stands beside the key that was given instead."""
    for index, sizes in enumerate(({"num_value_nodes": 1}, {"num_value_gpus_per_train_node": 2}, {})):
        config = config_of(path, *sized(**sizes))
        written = tmp_path / f"resolved-{index}.toml"
        written.write_text(to_toml(config))
        assert resolve([written]).config == config


def test_a_resolved_configuration_without_a_critic_resolves_again(path: Path, tmp_path: Path) -> None:
    written = tmp_path / "resolved.toml"
    written.write_text(to_toml(config_of(path, *GRPO)))
    assert resolve([written]).config.value is None


@pytest.mark.parametrize("key", ["num_value_gpus", "num_value_nodes", "num_value_gpus_per_train_node"])
def test_gpus_of_a_critic_that_is_not_there_are_refused(path: Path, key: str) -> None:
    assert f"deployment.{key}: there is no [value] to give GPUs to; fix: delete it" in only(
        path, *GRPO, *sized(**{key: 1})
    )


def test_one_key_alone_says_where_the_critic_is(path: Path) -> None:
    two = sized(num_value_nodes=1, num_value_gpus_per_train_node=2)
    assert "num_value_gpus_per_train_node: deployment.num_value_nodes = 1 has the critic on nodes of its own" in only(
        path, *two
    )
    both = only(path, *sized(num_value_gpus=2, num_value_nodes=1))
    assert "deployment.num_value_gpus: deployment.num_value_nodes = 1 says already how many" in both
    both = only(path, *sized(num_value_gpus=2, num_value_gpus_per_train_node=2))
    assert "deployment.num_value_gpus: deployment.num_value_gpus_per_train_node = 2 says already" in both


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize("key", ["num_train_nodes", "num_value_nodes", "num_inference_nodes"])
def test_nodes_beyond_this_machine_need_a_job(path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(16))))
    said = only(path, LOCAL, *sized(**{key: 2}))
    assert f'deployment.{key}: 2 beyond this machine: deployment.kind = "local" has one node; fix: ' in said


def test_the_gpus_of_a_job_are_not_those_of_this_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config_of(path)
    said = only(path, LOCAL)
    assert said.startswith("11: deployment.device: 7 GPUs are needed (policy 4, critic 1, inference 2), but 0 are here")


def test_roles_that_do_not_fit_a_node_are_told_with_their_sizes(path: Path) -> None:
    said = only(path, *sized(num_value_gpus=3))
    assert said.startswith("12: deployment.gpus_per_node: 8 are too few: 9 are needed on the first train node ")
    assert "(policy 4, critic 3, inference 2)" in said
    config_of(path, *sized(num_value_gpus=2))
    config_of(path, *sized(num_value_gpus=4, num_inference_nodes=1))
    config_of(path, *sized(num_value_nodes=1, num_inference_gpus=4))
    said = only(path, *sized(num_inference_nodes=1, num_inference_gpus=9))
    assert "9 are needed on each inference node (inference 9)" in said


def test_every_train_node_must_hold_both_groups(path: Path) -> None:
    split = {"num_train_nodes": 2, "num_policy_gpus": 12, "num_inference_nodes": 1}
    config_of(path, *sized(**split, num_value_gpus_per_train_node=2))
    said = only(path, *sized(**split, num_value_gpus_per_train_node=3))
    assert "9 are needed on the first train node (policy 6, critic 3)" in said


def test_gpus_divide_over_their_nodes(path: Path) -> None:
    said = only(path, *sized(num_train_nodes=3))
    assert said.startswith("13: deployment.num_policy_gpus: 4 do not divide over deployment.num_train_nodes = 3; ")
    assert said.endswith("fix: give 6, or other nodes")
    said = only(path, *sized(num_inference_nodes=3))
    assert said.startswith("14: deployment.num_inference_gpus: 2 do not divide over deployment.num_inference_nodes = 3")
    assert "fix: give 3" in said


def test_a_job_gives_addresses_itself(path: Path) -> None:
    assert "value.host: a job gives every process the address of its own node; fix: delete it" in only(
        path, ("value.host", "10.0.0.5")
    )


def test_a_job_has_longer_to_end_unless_it_is_told(path: Path) -> None:
    resolved = resolve([path])
    assert resolved.config.runtime.shutdown_grace_s == 540.0
    assert resolved.origins["runtime", "shutdown_grace_s"] == 'deployment.kind = "slurm"'
    assert config_of(path, ("runtime.shutdown_grace_s", "20")).runtime.shutdown_grace_s == 20.0
    assert "slurm.signal_lead_s: " in only(path, ("slurm.signal_lead_s", "300"))


def test_a_port_of_a_job_is_not_looked_for_here(path: Path, unused_port: int) -> None:
    import socket

    with socket.create_server(("127.0.0.1", unused_port)):
        config_of(path, ("policy.port", str(unused_port)))


@pytest.fixture
def unused_port() -> int:
    from services.runtime.ports import PortReservation

    with PortReservation(["a"]) as reservation:
        return reservation.ports["a"]


# ---------------------------------------------------------------- engines


VLLM = (("inference.engine", "vllm"), ("inference.vllm_python", "/bin/sh"))


def test_engines_are_the_gpus_of_inference_over_those_of_one(path: Path) -> None:
    folder = path.parent / "model"
    (folder / "model.safetensors").write_bytes(b"")
    real = ("model.path", str(folder))
    assert config_of(path).num_engines == 2
    assert config_of(path, real, *VLLM, ("inference.tp", "2")).num_engines == 1
    said = only(path, real, *VLLM, ("inference.tp", "2"), *sized(num_inference_gpus=3))
    assert "deployment.num_inference_gpus: 3 GPUs are not whole engines of inference.tp = 2; fix: give 4" in said
    said = only(path, real, *VLLM, ("inference.tp", "3"), *sized(num_inference_gpus=3))
    assert "inference.tp: 3 GPUs cannot share the model's 8 attention heads; fix: give a divisor of 8" in said
    nodes = sized(num_inference_nodes=2, num_inference_gpus=6)
    said = only(path, real, *VLLM, ("inference.tp", "2"), *nodes)
    assert "6 do not divide over deployment.num_inference_nodes = 2 as whole engines of inference.tp = 2" in said
    assert "fix: give 8" in said


def test_several_engines_need_the_router_installed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_of(path, *sized(num_inference_gpus=2))
    monkeypatch.setitem(sys.modules, "vllm_router", None)  # as if it were not
    config_of(path, *sized(num_inference_gpus=1))
    said = only(path, *sized(num_inference_gpus=2))
    assert "deployment.num_inference_gpus: 2 engines need vllm-router in front of them" in said
    assert "fix: pip install 'counterpoint[router]', or give the GPUs of one engine" in said


def test_a_local_engine_has_one_device(path: Path) -> None:
    assert "inference.tp: the local engine is one process on one device" in only(path, ("inference.tp", "2"))


def test_a_fixed_port_is_one_engine_s(path: Path) -> None:
    said = only(path, ("inference.port", "20001"))
    assert said.startswith("command line: inference.port: 2 engines cannot share one port; fix: delete it")


# ---------------------------------------------------------------- context and expert parallelism


def test_context_and_expert_degrees_divide_the_gpus_that_the_layout_gives(path: Path) -> None:
    """4 policy GPUs; a critic of 2 nodes with 8 each has 16."""
    nodes = sized(num_value_nodes=2)
    config_of(path, *nodes, ("value.model.cp", "8"), ("value.model.ep", "16"), ("policy.model.cp", "4"))
    said = only(path, *nodes, ("value.model.ep", "3"))
    assert "value.model.ep: 3 does not divide the role's 16 GPUs (deployment.num_value_nodes)" in said
    said = problems_of(path, ("policy.model.cp", "3"))
    assert said[0].startswith("command line: policy.model.cp: 3 does not divide deployment.num_policy_gpus = 4")


# ---------------------------------------------------------------- taking turns


TIME = (*sized(sharing="time", num_inference_gpus=4),)


def test_roles_that_take_turns_have_the_same_gpus(path: Path) -> None:
    assert config_of(path, *TIME).num_value_gpus == 4
    config_of(path, *TIME, *sized(num_value_gpus=4))
    said = only(path, *TIME, *sized(num_value_gpus=2))
    assert "deployment.num_value_gpus: 2 are not the policy's 4 GPUs, on which the critic takes turns; fix: " in said
    said = only(path, *sized(sharing="time"))
    assert said.startswith("14: deployment.num_inference_gpus: 2 are not the policy's 4 GPUs")
    config_of(path, *sized(sharing="time_train"))


@pytest.mark.parametrize("key", ["num_value_nodes", "num_value_gpus_per_train_node"])
def test_a_critic_that_takes_turns_has_no_place_of_its_own(path: Path, key: str) -> None:
    assert f'deployment.{key}: deployment.sharing = "time" gives the critic the policy\'s 4 GPUs' in only(
        path, *TIME, *sized(**{key: 1})
    )


@pytest.mark.parametrize("sharing", ["time", "time_train"])
def test_turns_can_be_tried_on_cpu(path: Path, sharing: str) -> None:
    sizes = sized(sharing=sharing, device="cpu", num_policy_gpus=2, num_inference_gpus=2)
    config = config_of(path, LOCAL, *sizes, ("inference.engine", "local"))
    assert (config.num_value_gpus, config.num_engines) == (2, 2)


def test_turns_need_an_order_and_somebody_to_take_them(path: Path) -> None:
    assert "orchestrator.schedule: critic and policy cannot both be at work" in only(
        path, *TIME, ("orchestrator.schedule", "overlap")
    )
    assert "deployment.sharing: there is no [value] that could take turns" in only(
        path, *GRPO, *sized(sharing="time_train")
    )
    assert "num_inference_nodes: deployment.sharing = " in only(path, *TIME, *sized(num_inference_nodes=1))


# ---------------------------------------------------------------- what is no number at all


@pytest.mark.parametrize("key", ["num_policy_gpus", "num_train_nodes", "num_value_nodes"])
def test_an_elastic_size_is_refused_with_the_reason(path: Path, key: str) -> None:
    said = only(path, *sized(**{key: "1:4"}))
    assert (
        f"deployment.{key}: 1:4 is an elastic size, and groups of ranks have a fixed one; fix: give one number" in said
    )
