"""What `counterpoint plan` shows of memory, a rank of each role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.config.resolve import resolve
from services.launch.show_plan import print_plan

SAO = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
optim.offload = true
[policy.model]
seq_len = 64
[deployment]
num_value_gpus = 2
"""
GRPO = [
    ("algorithm.type", "grpo"),
    ("orchestrator.group_size", "4"),
    ("value", "none"),
    ("deployment.num_value_gpus", "none"),
]
TINY_PARAMETERS = 427_264
F32 = 4


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tiny model has been made there."""
    monkeypatch.chdir(tmp_path)
    Path("sao.toml").write_text(SAO)


def shown(capsys: pytest.CaptureFixture[str], *overrides: tuple[str, str], as_json: bool) -> str:
    print_plan(resolve([Path("sao.toml")], list(overrides)).config, as_json=as_json)
    return capsys.readouterr().out


def memory_of(capsys: pytest.CaptureFixture[str], *overrides: tuple[str, str]) -> dict[str, Any]:
    return json.loads(shown(capsys, *overrides, as_json=True))["memory"]


def test_the_json_plan_has_bytes_of_every_role_before_the_model_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    memory = memory_of(capsys)
    assert list(memory) == ["policy", "value"]
    policy, value = memory["policy"], memory["value"]
    assert policy["parameters_bytes"] == policy["gradients_bytes"] == F32 * TINY_PARAMETERS
    assert (policy["moments_bytes"], policy["host_moments_bytes"]) == (2 * F32 * TINY_PARAMETERS, 0)
    assert (value["moments_bytes"], value["host_moments_bytes"]) == (0, 2 * value["gradients_bytes"])
    head = 128 + 1
    assert F32 * (TINY_PARAMETERS + head) / 2 <= value["parameters_bytes"] < F32 * (TINY_PARAMETERS + head) / 2 + 1000
    assert policy["total_bytes"] == sum(policy.values()) - policy["total_bytes"]
    assert list(Path().iterdir()) == [Path("sao.toml")]


def test_without_a_critic_there_is_only_the_policy_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(memory_of(capsys, *GRPO)) == ["policy"]


def test_a_longer_bin_and_checkpointing_move_the_activations(capsys: pytest.CaptureFixture[str]) -> None:
    short = memory_of(capsys)["policy"]
    long = memory_of(capsys, ("policy.model.seq_len", "128"))["policy"]
    again = memory_of(capsys, ("policy.model.activation_checkpointing", "true"))["policy"]
    assert long["activations_bytes"] == 2 * short["activations_bytes"]
    assert again["activations_bytes"] < short["activations_bytes"] / 4
    assert long["parameters_bytes"] == short["parameters_bytes"]


def test_the_table_has_a_row_a_role_in_readable_units(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, as_json=False).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("memory of one rank"))
    rows = {line.split("│")[1].strip(): line for line in lines[start : start + 8] if line.count("│") == 9}
    assert list(rows) == ["policy", "value"]
    cells = [cell.strip() for cell in rows["policy"].split("│")[1:-1]]
    assert cells[1:4] == ["1.6 MiB", "1.6 MiB", "3.3 MiB"] and cells[-1] == "0.0 MiB"
    cells = [cell.strip() for cell in rows["value"].split("│")[1:-1]]
    assert cells[3] == "0.0 MiB" and cells[-1] == "1.6 MiB"


def test_a_model_without_sizes_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (folder / "tokenizer.json").write_text("{}")
    dummy = ("model.path", f"dummy:{folder}")
    assert memory_of(capsys, dummy) == {}
    assert "does not say its sizes" in shown(capsys, dummy, as_json=False)
