"""What `counterpoint plan` shows: memory, GPUs, disk, commits; and that it writes only what it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.config.resolve import resolve
from services.config.schema import from_toml
from services.launch.disk import commit_problem, refuse_where_no_commit_fits
from services.launch.plan_facts import host_bytes
from services.launch.plan_tables import ranges_of
from services.launch.show_plan import print_plan
from services.runtime.commits import Commits
from services.runtime.manifests import write_manifest
from services.wire.errors import CannotWrite, ConfigError

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
ROLES = ("policy", "critic", "orchestrator")
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


# ---------------------------------------------------------------- nodes, GPUs, disk, commits


JOB = (
    ("deployment.kind", "slurm"),
    ("deployment.device", "cuda"),
    ("deployment.num_value_gpus", "none"),
    ("deployment.num_train_nodes", "2"),
    ("deployment.num_policy_gpus", "4"),
    ("deployment.num_value_gpus_per_train_node", "3"),
    ("deployment.num_inference_nodes", "1"),
    ("deployment.num_inference_gpus", "2"),
    ("deployment.gpus_per_node", "6"),
)


def plain(capsys: pytest.CaptureFixture[str], *overrides: tuple[str, str]) -> dict[str, Any]:
    return json.loads(shown(capsys, *overrides, as_json=True))


def test_the_json_plan_of_a_job_has_hosts_nodes_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    told = plain(capsys, *JOB)
    assert [host["name"] for host in told["hosts"]] == ["node0", "node1", "node2"]
    by_name = {process["name"]: process for process in told["processes"]}
    assert (by_name["policy"]["nodes"], by_name["policy"]["gpus"]) == (["node0", "node1"], [0, 1])
    assert (by_name["value"]["nodes"], by_name["value"]["gpus"]) == (["node0", "node1"], [2, 3, 4])
    assert (by_name["inference-1"]["nodes"], by_name["inference-1"]["gpus"]) == (["node2"], [1])
    used = {(use["host"], use["gpu"]): use["processes"] for use in told["gpus"]}
    assert (
        used[("node1", 1)] == ["policy"] and used[("node1", 2)] == ["value"] and used[("node2", 0)] == ["inference-0"]
    )
    assert len(used) == 4 + 6 + 2
    policy = next(use for use in told["gpus"] if use["processes"] == ["policy"])
    assert policy["estimated_bytes"] == told["memory"]["policy"]["total_bytes"]


def test_idle_gpus_of_a_job_and_stand_in_hosts_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    notes = plain(capsys, *JOB)["notes"]
    assert "node0: 1 of 6 GPUs are idle" in notes and "node2: 4 of 6 GPUs are idle" in notes
    assert any("stand-ins" in note for note in notes)


def test_a_context_parallel_group_that_crosses_nodes_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    notes = plain(capsys, *JOB, ("value.model.cp", "2"))["notes"]
    assert "value.model.cp = 2 does not divide its 3 GPUs of a node: bins cross nodes" in notes


TIME = (
    ("deployment.device", "cuda"),
    ("deployment.sharing", "time"),
    ("deployment.num_policy_gpus", "2"),
    ("deployment.num_inference_gpus", "2"),
)


@pytest.fixture
def _three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")


@pytest.mark.usefixtures("_three_gpus")
def test_of_roles_that_take_turns_the_largest_counts_on_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    told = plain(capsys, *TIME)
    assert [use["processes"] for use in told["gpus"]] == [
        ["policy", "value", "inference-0"],
        ["policy", "value", "inference-1"],
    ]
    largest = max(told["memory"][role]["total_bytes"] for role in ("policy", "value"))
    assert told["gpus"][0]["estimated_bytes"] == max(largest, told["engine_bytes"])


@pytest.mark.usefixtures("_three_gpus")
def test_who_takes_turns_sleeps_in_host_memory_all_but_gradients_and_activations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By hand: two ranks of the policy hold parameters and two moments, 12 bytes a number, in all; the critic, whose
    moments are in host memory already, 4 bytes a number and a head of 129; two engines in f32 the whole model each."""
    told = plain(capsys, *TIME)
    policy, value, engines = 12 * TINY_PARAMETERS, F32 * (TINY_PARAMETERS + 129), 2 * F32 * TINY_PARAMETERS
    shards_are_padded = 4 * 12 * 128
    assert list(told["backup_bytes"]) == ["localhost"]
    backup = told["backup_bytes"]["localhost"]
    assert policy + value + engines <= backup < policy + value + engines + shards_are_padded
    train = plain(capsys, *TIME, ("deployment.sharing", "time_train"), ("deployment.num_inference_gpus", "1"))
    assert train["backup_bytes"] == {"localhost": backup - engines}
    apart = plain(capsys, ("deployment.device", "cpu"))
    assert apart["backup_bytes"] == {}
    assert "host memory  " not in shown(capsys, as_json=False)
    (line,) = (line for line in shown(capsys, *TIME, as_json=False).splitlines() if line.startswith("   host memory"))
    assert line.split() == ["host", "memory", "9.8", "MiB", "for", "who", "sleeps", "(estimated;", "localhost)"]


def test_a_kl_penalty_s_reference_sleeps_too_and_vllm_on_cpu_is_only_paused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = (("deployment.sharing", "time"), ("deployment.num_value_gpus", "none"))
    before = plain(capsys, *on_cpu)["backup_bytes"]["localhost"]
    after = plain(capsys, *on_cpu, ("policy.kl.coef", "0.1"))["backup_bytes"]["localhost"]
    assert after - before == F32 * TINY_PARAMETERS
    vllm = (("inference.engine", "vllm"), ("inference.vllm_python", "/bin/sh"))
    assert plain(capsys, *on_cpu, *vllm)["backup_bytes"]["localhost"] == before - F32 * TINY_PARAMETERS


def test_more_than_the_machine_has_is_noted_with_offloaded_moments_and_a_job_s_nodes_are_not_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank each: 12 + 4 + 4 bytes a parameter sleep, and the critic's moments, 8 more, are there anyway."""
    on_cpu = (("deployment.sharing", "time"), ("deployment.num_value_gpus", "none"))
    needed = plain(capsys, *on_cpu)["backup_bytes"]["localhost"] + 8 * (TINY_PARAMETERS + 129)
    assert needed == 20 * TINY_PARAMETERS + F32 * 129 + 8 * (TINY_PARAMETERS + 129)

    def notes(there: int, *more: tuple[str, str]) -> list[str]:
        monkeypatch.setattr("services.launch.plan_facts.host_bytes", lambda: there)
        return [note for note in plain(capsys, *on_cpu, *more)["notes"] if "host memory" in note]

    assert notes(needed) == []
    assert notes(needed - 1) == ["11.4 MiB of host memory hold who sleeps and offloaded moments, 11.4 MiB are here"]
    assert notes(0, ("deployment.kind", "slurm")) == []


def test_this_machine_has_memory() -> None:
    (total,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert host_bytes() == 1024 * int(total.split()[1])


def test_the_tables_of_a_job_name_nodes_and_ranges_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *JOB, as_json=False)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["node1", "2-4", "value"] in [row[:3] for row in rows]
    assert ["value", "node0", "6", "2-4 of each"] in [row[:4] for row in rows]
    assert "SLURM, 3 nodes" in text and "asked for by every listener" in text
    assert "as inference-0" in text


def test_numbers_are_listed_as_ranges() -> None:
    assert ranges_of([3, 0, 1, 2, 6]) == "0-3, 6"
    assert ranges_of([]) == "" and ranges_of([5]) == "5"


def test_disk_counts_a_commit_of_both_roles_twelve_bytes_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    """The critic has a head of 129 numbers more: 128 weights and a bias; the tied output head is no parameter."""
    few = (("orchestrator.max_steps", "50"), ("orchestrator.batch_size", "8"), ("checkpoint.interval_steps", "20"))
    disk = plain(capsys, *few)["disk"]
    assert disk["commit_bytes"] == 12 * TINY_PARAMETERS + 12 * (TINY_PARAMETERS + 129)
    assert disk["num_commits"] == 3, "two stay, and there is one more while it is made"
    assert (disk["snapshot_bytes"], disk["num_snapshots"]) == (F32 * TINY_PARAMETERS, 3)
    assert disk["record_bytes"] == 18 * 50 * 8 * 32
    assert disk["total_bytes"] == 3 * disk["commit_bytes"] + 3 * disk["snapshot_bytes"] + disk["record_bytes"]
    assert disk["free_bytes"] > 0


def test_disk_follows_what_is_kept_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    steps = ("orchestrator.max_steps", "100")
    every = (steps, ("checkpoint.interval_steps", "10"), ("checkpoint.keep_every_steps", "20"))
    assert plain(capsys, *every)["disk"]["num_commits"] == 2 + 1 + 5
    assert plain(capsys, steps, ("checkpoint.interval_steps", "0"))["disk"]["num_commits"] == 1
    assert plain(capsys, ("run.record", "false"))["disk"]["record_bytes"] == 0
    alone = plain(capsys, *GRPO, steps)["disk"]
    assert alone["commit_bytes"] == 12 * TINY_PARAMETERS and alone["record_bytes"] == 10 * 100 * 64 * 32


def test_a_disk_that_cannot_take_one_commit_is_refused_with_the_place_of_the_key() -> None:
    folder = Path("huge")
    folder.mkdir()
    sizes = {"model_type": "llama", "vocab_size": 10**6, "hidden_size": 10**6, "intermediate_size": 10**6}
    heads = {"num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(sizes | heads))
    (folder / "tokenizer.json").write_text("{}")
    resolved = resolve([Path("sao.toml")], [("model.path", "dummy:huge"), ("run.dir", "runs/here")])
    with pytest.raises(ConfigError) as caught:
        refuse_where_no_commit_fits(resolved)
    (problem,) = caught.value.problems
    assert problem.startswith("command line: run.dir: one commit takes ") and " TiB, and " in problem
    assert problem.endswith("fix: free some, or choose another disk with --run.dir DIR")
    refuse_where_no_commit_fits(resolve([Path("sao.toml")]))
    assert commit_problem(5, 5, Path("/r")) is None and commit_problem(6, 5, Path("/r")) is not None


def test_a_disk_that_may_fill_up_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """An upper bound of 18 bytes a token: a million steps of a million rollouts fill every disk."""
    many = (("orchestrator.max_steps", "1000000"), ("orchestrator.batch_size", "1000000"))
    assert any(note.startswith("the disk may fill up: ") for note in plain(capsys, *many)["notes"])


def test_what_resume_would_find_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = Path("runs/sao")
    assert plain(capsys)["commits"] == [] and not any("runs/sao" in note for note in plain(capsys)["notes"])
    run_dir.mkdir(parents=True)
    (run_dir / "notes.txt").write_text("mine")
    assert any("is there and no run of ours" in note for note in plain(capsys)["notes"])
    (run_dir / "run.json").write_text("{}")
    assert any("holds an earlier run without a commit: --overwrite" in note for note in plain(capsys)["notes"])
    commits = Commits(run_dir / "checkpoints")
    for step in (20, 40):
        part = commits.begin(step)
        for role in ROLES:
            (part / role).mkdir(exist_ok=True)
            (part / role / "state.json").write_text("{}")
            write_manifest(part / role, {})
        commits.commit(step, ROLES, run_id="r", epoch=1, identity={})
    told = plain(capsys)
    assert told["commits"] == [40, 20]
    assert any("has commits of step 20, 40: --resume goes on after 40" in note for note in told["notes"])


# ---------------------------------------------------------------- --write


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_write_leaves_the_plan_and_the_resolved_configuration_and_nothing_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolve([Path("sao.toml")]).config
    print_plan(config, as_json=True, write="out/here")
    printed = json.loads(capsys.readouterr().out)
    assert files_below(Path()) == {"sao.toml", "out/here/plan.json", "out/here/config.resolved.toml"}
    assert json.loads(Path("out/here/plan.json").read_text()) == printed
    assert from_toml(Path("out/here/config.resolved.toml").read_text()) == config


def test_write_of_a_job_has_its_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve([Path("sao.toml")], list(JOB)).config
    print_plan(config, as_json=False, write="out")
    assert files_below(Path("out")) == {"plan.json", "config.resolved.toml", "job.sbatch"}
    assert Path("out/job.sbatch").read_text().startswith("#!/bin/bash\n")
    assert from_toml(Path("out/config.resolved.toml").read_text()) == config
    assert files_below(Path()) == {"sao.toml", *(f"out/{name}" for name in files_below(Path("out")))}
    assert capsys.readouterr().err.count("wrote out/") == 3


def test_without_write_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, *JOB, as_json=False)
    shown(capsys, as_json=True)
    assert files_below(Path()) == {"sao.toml"}


def test_a_folder_that_cannot_be_made_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotWrite, match=r"cannot make sao\.toml/out: "):
        print_plan(resolve([Path("sao.toml")]).config, as_json=True, write="sao.toml/out")
