"""`configs/cluster/`: each layout's recipe lacks nothing but the model, and is planned as its comments say."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from services.config.context import Host
from services.config.ports import port_names
from services.config.resolve import resolve
from services.config.schema import Config, from_toml, to_toml
from services.launch.models import ModelSource
from services.launch.placement import place
from services.launch.planner import LOCAL, Plan, Site, plan
from services.packing.shapes import model_shapes
from services.wire.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "cluster").glob("*.toml"))
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sizes of a Qwen3-4B, and weights of which there is the file alone."""
    folder = tmp_path_factory.mktemp("cluster") / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    (folder / "tokenizer.json").write_text("{}")
    shapes = model_shapes(folder)  # as config.json says them
    assert shapes is not None
    tensors = {p.name: {"dtype": "BF16", "shape": p.shape, "data_offsets": [0, 0]} for p in shapes.parameters}
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine for the one-node recipes has; those of several nodes do not look."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.chdir(ROOT)


def recipe(name: str, model: Path, *more: tuple[str, str]) -> Config:
    settings = [("model.path", str(model)), ("inference.vllm_python", "/bin/sh"), *more]
    return resolve([ROOT / "configs" / "cluster" / f"{name}.toml"], settings).config


def planned(config: Config, model: Path) -> Plan:
    num = place(config).num_nodes
    hosts = [LOCAL] if num == 1 else [Host(f"n{index}", f"10.0.0.{index + 1}") for index in range(num)]
    ports = {name: 20000 + index for index, name in enumerate(port_names(config))}
    site = Site(ROOT, "/usr/bin/python3")
    return plan(
        config, ports, hosts=hosts, run_dir=Path("/runs/r"), run_id="r", epoch=1, model=ModelSource(model), site=site
    )


def layout_of(layout: Plan) -> dict[str, tuple[list[int], list[int]]]:
    """Nodes and GPUs of every process that has GPUs."""
    return {process.name: (process.nodes, process.gpus) for process in layout.processes if process.gpus}


FOUR_BY_TWO = [[0, 1], [2, 3], [4, 5], [6, 7]]
LAYOUTS: dict[str, dict[str, tuple[list[int], list[int]]]] = {
    "dedicated": {"policy": ([0], [0, 1]), "value": ([0], [2, 3])}
    | {f"inference-{i}": ([0], [4 + i]) for i in range(4)},
    "value_nodes": {"policy": ([0], list(range(8))), "value": ([1], list(range(8)))}
    | {f"inference-{i}": ([2], gpus) for i, gpus in enumerate(FOUR_BY_TWO)},
    "split_node": {"policy": ([0, 1], [0, 1, 2, 3]), "value": ([0, 1], [4, 5, 6, 7])}
    | {f"inference-{i}": ([2], gpus) for i, gpus in enumerate(FOUR_BY_TWO)},
    "time_shared": {"policy": ([0], list(range(8))), "value": ([0], list(range(8)))}
    | {f"inference-{i}": ([0], gpus) for i, gpus in enumerate(FOUR_BY_TWO)},
    "no_critic": {"policy": ([0], [0, 1])} | {f"inference-{i}": ([0], [2 + i]) for i in range(6)},
}


def test_every_layout_has_its_recipe() -> None:
    assert [path.stem for path in RECIPES] == sorted(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_recipe_is_planned_on_the_gpus_that_its_layout_means(name: str, model: Path) -> None:
    config = recipe(name, model)
    assert from_toml(to_toml(config)) == config
    assert layout_of(planned(config, model)) == LAYOUTS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_recipe_lacks_nothing_but_the_model_and_vllm(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([ROOT / "configs" / "cluster" / f"{name}.toml"], [("inference.vllm_python", "/bin/sh")])
    (problem,) = caught.value.problems
    assert "model.path: there is no folder models/Qwen3-4B" in problem
    text = (ROOT / "configs" / "cluster" / f"{name}.toml").read_text()
    assert f"counterpoint run configs/cluster/{name}.toml --model.path FOLDER" in text


@pytest.mark.parametrize("name", LAYOUTS)
def test_recipe_that_spans_nodes_is_a_job_and_no_other_is(name: str, model: Path) -> None:
    config = recipe(name, model)
    num = place(config).num_nodes
    assert (config.deployment.kind == "slurm") == (num > 1)
    assert config.runtime.shutdown_grace_s == (540.0 if num > 1 else 300.0)
    assert ("[slurm]" in (ROOT / "configs" / "cluster" / f"{name}.toml").read_text()) == (num > 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_context_parallel_group_crosses_nodes(name: str, model: Path) -> None:
    config = recipe(name, model)
    where = place(config)
    assert len(where.policy.gpus) % config.policy.model.cp == 0
    if config.value is not None and where.value is not None:
        assert len(where.value.gpus) % config.value.model.cp == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpus_are_one_role_s_unless_they_are_shared_in_time(name: str, model: Path) -> None:
    config = recipe(name, model)
    taken = [
        (node, gpu) for nodes, gpus in layout_of(planned(config, model)).values() for node in nodes for gpu in gpus
    ]
    assert len(taken) == len(set(taken)) * (3 if name == "time_shared" else 1)
    assert len(set(taken)) == 8 * place(config).num_nodes, "no GPU of a node is left idle"


def test_a_one_node_recipe_is_a_job_of_one_node_by_one_word(model: Path) -> None:
    config = recipe("dedicated", model, ("deployment.kind", "slurm"))
    assert layout_of(planned(config, model)) == LAYOUTS["dedicated"]


def test_the_sizes_in_the_comments_are_the_plan_s(model: Path) -> None:
    """ "4 engines" is said beside inference.tp; how many there are is the plan's."""
    for name in LAYOUTS:
        said = re.search(r"GPUs of one engine: (\d+) engines", (ROOT / "configs/cluster" / f"{name}.toml").read_text())
        assert said is not None and int(said[1]) == recipe(name, model).num_engines, name
