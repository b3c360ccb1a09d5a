"""The pure planner: what starts, with which ranks, ports and environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config.ports import port_names
from services.config.resolve import resolve
from services.launch.models import ModelSource, model_source
from services.launch.planner import Plan, Site, plan

SAO = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[deployment]
num_policy_gpus = 2
num_value_gpus = 3
"""
GRPO = [
    ("algorithm.type", "grpo"),
    ("orchestrator.group_size", "4"),
    ("value", "none"),
    ("deployment.num_value_gpus", "none"),
]
SITE = Site(Path("/project"), "/usr/bin/python3", "/other:/project")


def lay_out(tmp_path: Path, overrides=(), *, model: ModelSource | None = None) -> Plan:
    path = tmp_path / "sao.toml"
    path.write_text(SAO)
    config = resolve([path], overrides).config
    ports = {name: 20000 + index for index, name in enumerate(port_names(config))}
    source = model or ModelSource(Path("/models/tiny"))
    return plan(config, ports, run_dir=Path("/runs/sao"), run_id="sao-1", epoch=1, model=source, site=SITE)


def ports_in(node, found=None) -> dict[str, list[int]]:
    """Every number in the plan whose key ends in `port`."""
    found = {} if found is None else found
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            ports_in(value, found)
        elif isinstance(key, str) and key.endswith("port"):
            found.setdefault(key, []).append(value)
    return found


def test_the_same_arguments_give_the_same_plan(tmp_path):
    assert lay_out(tmp_path) == lay_out(tmp_path)
    assert json.dumps(lay_out(tmp_path).to_json()) == json.dumps(lay_out(tmp_path).to_json())


def test_every_process_has_its_ranks_and_ports(tmp_path):
    processes = {process.name: process for process in lay_out(tmp_path).processes}
    assert list(processes) == ["inference", "policy", "value", "orchestrator"]
    assert {name: process.num_ranks for name, process in processes.items()} == {
        "inference": 1,
        "policy": 2,
        "value": 3,
        "orchestrator": 1,
    }
    assert processes["value"].rank_names == ["value-0", "value-1", "value-2"]
    assert processes["orchestrator"].rank_names == ["orchestrator"]


def test_every_port_of_the_json_plan_has_a_key_that_ends_in_port_and_is_unique(tmp_path):
    layout = lay_out(tmp_path)
    numbers = [number for found in ports_in(layout.to_json()).values() for number in found]
    assert sorted(numbers) == sorted(layout.ports.values())
    assert len(set(numbers)) == 6


def test_grpo_has_no_value_process_and_no_value_port(tmp_path):
    layout = lay_out(tmp_path, GRPO)
    assert [process.name for process in layout.processes] == ["inference", "policy", "orchestrator"]
    assert layout.context.value_url is None
    assert layout.context.critic_grid_url is None
    text = json.dumps(layout.to_json())
    assert "critic" not in text
    assert "value" not in text.replace("explained_value", "")
    assert len([number for found in ports_in(layout.to_json()).values() for number in found]) == 4


def test_groups_start_under_torchrun_of_fixed_size_without_restarts(tmp_path):
    argv = next(process.argv for process in lay_out(tmp_path).processes if process.name == "value")
    words = " ".join(argv)
    assert words.startswith("/usr/bin/python3 -m torch.distributed.run --nnodes 1 --nproc-per-node 3 ")
    assert "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0" in words
    assert "--max-restarts 0" in words
    assert words.endswith("-m value_service.main --run-dir /runs/sao")


def test_the_project_root_comes_first_and_once_on_the_path(tmp_path):
    for process in lay_out(tmp_path).processes:
        assert process.env["PYTHONPATH"] == "/project:/other"
        assert process.env["OMP_NUM_THREADS"] == "1"
        assert process.env["HF_HUB_OFFLINE"] == "1"


def test_gpus_are_disjoint_policy_then_critic_then_inference(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    layout = lay_out(tmp_path, [("deployment.device", "cuda")])
    visible = {process.name: process.env["CUDA_VISIBLE_DEVICES"] for process in layout.processes}
    assert visible == {"policy": "0,1", "value": "2,3,4", "inference": "5", "orchestrator": ""}
    assert all("OMP_NUM_THREADS" not in process.env for process in layout.processes)


def test_a_vllm_engine_is_started_by_its_own_interpreter(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
    (folder / "config.json").write_text(json.dumps(shape))
    vllm = [("inference.engine", "vllm"), ("inference.vllm_python", "/bin/sh")]
    inference = lay_out(tmp_path, vllm, model=ModelSource(folder)).processes[0]
    assert inference.argv[:3] == ["/bin/sh", "-m", "vllm.entrypoints.openai.api_server"]
    assert str(inference.ports["http_port"]) in inference.argv


# ---------------------------------------------------------------- model.path

ROOT = Path(__file__).parents[4]


def test_a_tiny_model_is_made_by_a_command_under_a_name_of_its_recipe(tmp_path):
    source = model_source("tiny:add", root=ROOT, models_dir=tmp_path, python="python")
    assert source.dir.parent == tmp_path
    assert not source.is_complete
    assert source.make_argv(Path("/part"))[:4] == ["python", "-m", "services.model.tiny", "/part"]
    assert model_source("tiny:guess", root=ROOT, models_dir=tmp_path).dir != source.dir
    source.dir.mkdir()
    assert source.is_complete


@pytest.mark.parametrize(("path", "init"), [("dummy:{}", "random"), ("{}", "pretrained")])
def test_a_folder_is_used_where_it_lies(tmp_path, path, init):
    source = model_source(path.format(tmp_path), root=ROOT, models_dir=tmp_path)
    assert (source.dir, source.init, source.argv) == (tmp_path, init, None)


def test_a_vllm_run_can_be_planned_before_its_tiny_model_is_made(tmp_path):
    vllm = [("inference.engine", "vllm"), ("inference.vllm_python", "/bin/sh")]
    layout = lay_out(tmp_path, vllm, model=ModelSource(tmp_path / "to-be-made", argv=["make"]))
    assert str(tmp_path / "to-be-made") in layout.processes[0].argv
