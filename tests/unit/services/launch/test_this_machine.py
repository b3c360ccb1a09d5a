"""Commands that work on one machine, given the configuration of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.deployment_checks import beyond_this_machine
from services.config.ports import port_names
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.models import ModelSource
from services.launch.planner import Site
from services.launch.pretrain import resolve_beside
from services.launch.record import recording_plan
from services.launch.serve_value import _alone, serving_config
from services.wire.errors import ConfigError

CLUSTER = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[deployment]
kind = "slurm"
device = "cuda"
gpus_per_node = 4
num_policy_gpus = 4
num_train_nodes = 2
num_value_nodes = 1
num_inference_gpus = 2
"""
LOCAL = [("deployment.kind", "local"), ("deployment.num_train_nodes", "1"), ("deployment.num_value_nodes", "0")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "cluster.toml"
    written.write_text(CLUSTER)
    return written


def planned(config: Config, lay_out, **more):
    ports = {name: 20000 + index for index, name in enumerate(port_names(config))}
    site = Site(Path("/project"), "/usr/bin/python3", visible_gpus="4,5,6,7")
    model = ModelSource(Path("/models/tiny"))
    return lay_out(config, ports, run_dir=Path("/runs/r"), run_id="r", epoch=1, model=model, site=site, **more)


def test_a_critic_alone_has_as_many_gpus_of_this_machine_as_a_run_would_give_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = serving_config([str(path)], [])
    assert (config.deployment.kind, config.num_value_gpus, config.deployment.num_train_nodes) == ("local", 4, 1)
    (value,) = (process for process in planned(config, _alone).processes if process.name == "value")
    assert (value.gpus, value.env["CUDA_VISIBLE_DEVICES"]) == ([0, 1, 2, 3], "4,5,6,7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="4 GPUs are needed, but 2 are here"):
        serving_config([str(path)], [])


def test_recording_and_pretraining_refuse_a_job(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deployment\.kind: this command works on one machine.*; fix: give --deploy"):
        resolve_beside([str(path)], [], "-record")


def test_only_a_job_is_beyond_this_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert beyond_this_machine(resolve([path], LOCAL).config) == []
    (problem,) = beyond_this_machine(resolve([path]).config)
    assert problem.startswith("deployment.kind: ") and "; fix: give --deployment.kind local" in problem


def test_a_recording_has_every_engine_and_neither_router_nor_trainers(path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    config = resolve([path], LOCAL).config
    layout = planned(config, recording_plan, words=["--rows", "1"])
    assert [process.name for process in layout.processes] == ["inference-0", "inference-1", "recorder"]
    assert layout.final == "recorder"
