"""The resolver: layers and their origins, every kind of problem with its file and line, all at once."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from orchestrator.algorithms import ALGORITHMS as CREDITS
from orchestrator.environments import ENVIRONMENTS
from services.config.model_path import TINY_TASKS
from services.config.ports import PORT_KEYS
from services.config.resolve import resolve
from services.config.schema import Config, from_toml, to_toml
from services.config.validate import ALGORITHMS, known_keys
from services.launch.cli import _TOP_LEVEL
from services.wire.errors import ConfigError

GOOD = """\
seed = 3
[model]
path = "tiny:add"

[algorithm]
type = "sao"

[[env]]
type = "add"
max_trace_tokens = 32

[policy.optim]
lr = 2e-4

[value]
updates_per_batch = 2
"""


def write(folder: Path, text: str, name: str = "good.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve([path], overrides)
    assert caught.value.exit_code == 78
    return caught.value.problems


def only_problem(path: Path, *overrides: tuple[str, str]) -> str:
    problems = problems_of(path, *overrides)
    assert len(problems) == 1, problems
    return problems[0]


# ---------------------------------------------------------------- layers


def test_files_merge_key_by_key_and_arrays_of_tables_replace(tmp_path):
    first = write(tmp_path, GOOD)
    second = write(
        tmp_path, '[policy.optim]\nbeta1 = 0.8\n[[env]]\ntype = "guess"\n[[env]]\ntype = "reverse"\n', "b.toml"
    )
    config = resolve([first, second]).config
    assert (config.policy.optim.lr, config.policy.optim.beta1) == (2e-4, 0.8)
    assert [env.type for env in config.env] == ["guess", "reverse"]
    assert config.run.name == "good"
    assert config.run.dir == "runs/good"


def test_the_command_line_wins_and_reads_toml_or_plain_text(tmp_path):
    path = write(tmp_path, GOOD)
    settings = [("run.name", "second-try"), ("orchestrator.max_steps", "7"), ("env.0.args.max_operand", "12")]
    config = resolve([path], settings).config
    assert config.run.name == "second-try"
    assert config.orchestrator.max_steps == 7
    assert config.env[0].args == {"max_operand": 12}
    assert resolve([path], [("run.name", "7")]).config.run.name == "7"


def test_none_drops_a_table_and_a_key(tmp_path):
    path = write(tmp_path, GOOD)
    switch = [("algorithm.type", "grpo"), ("orchestrator.group_size", "4"), ("value", "none")]
    assert resolve([path], switch).config.value is None
    assert resolve([path], [("policy.optim.lr", "none")]).config.policy.optim.lr == 1e-6


def test_the_critics_learning_rate_falls_back_to_the_policys(tmp_path):
    resolved = resolve([write(tmp_path, GOOD)])
    assert resolved.config.value is not None
    assert resolved.config.value.optim.lr == 2e-4
    own = resolve([write(tmp_path, GOOD)], [("value.optim.lr", "1e-3")]).config
    assert own.value is not None
    assert own.value.optim.lr == 1e-3


def test_every_value_knows_where_it_came_from(tmp_path):
    path = write(tmp_path, GOOD)
    inline = write(tmp_path, "orchestrator = {batch_size = 32,\n  group_size = 1}\n".replace("\n  ", " "), "b.toml")
    origins = {key: origin for key, _, origin in resolve([path, inline], [("seed", "9")]).explain()}
    assert origins["seed"] == "command line"
    assert origins["model.path"] == f"{path}:3"
    assert origins["env[0].type"] == f"{path}:9"
    assert origins["policy.optim.lr"] == f"{path}:13"
    assert origins["value.optim.lr"] == f"policy.optim.lr ({path}:13)"
    assert origins["orchestrator.batch_size"] == f"{inline}:1"
    assert origins["orchestrator.max_steps"] == "default"


def test_a_dumped_config_loads_equal(tmp_path):
    config = resolve([write(tmp_path, GOOD + "[[eval]]\ntype = 'add'\nargs = {max_operand = 3}\n")]).config
    assert from_toml(to_toml(config)) == config
    grpo = [("algorithm.type", "grpo"), ("orchestrator.group_size", "4"), ("value", "none")]
    other = resolve([write(tmp_path, GOOD)], grpo).config
    assert from_toml(to_toml(other)) == other


@pytest.mark.parametrize("role", ["policy", "value"])
def test_a_batch_has_no_more_mini_batches_than_groups(tmp_path, role):
    settings = [("orchestrator.batch_size", "8"), ("orchestrator.group_size", "2")]
    resolve([write(tmp_path, GOOD)], [*settings, (f"{role}.mini_batches", "4")])
    with pytest.raises(ConfigError, match=rf"{role}\.mini_batches: 5 mini-batches .* 4 groups; fix: give at most 4"):
        resolve([write(tmp_path, GOOD)], [*settings, (f"{role}.mini_batches", "5")])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_resolves_with_its_defaults_and_loads_equal(tmp_path, name):
    settings = [("algorithm.type", name), ("orchestrator.group_size", "4")]
    settings += [] if ALGORITHMS[name].needs_value else [("value", "none")]
    config = resolve([write(tmp_path, GOOD)], settings).config
    assert config.algorithm.type == name
    assert from_toml(to_toml(config)) == config


# ---------------------------------------------------------------- single problems


@pytest.mark.parametrize(
    ("extra", "line", "said"),
    [
        (
            "[orchestrator]\nbatch_sise = 64",
            18,
            "orchestrator.batch_sise: unknown key; fix: did you mean orchestrator.batch_size",
        ),
        ("[orchestrator]\nlr = 1e-3", 18, "orchestrator.lr: unknown key; fix: did you mean policy.optim.lr"),
        ("[orchestrater]\nbatch_size = 64", 17, "orchestrater: unknown key; fix: did you mean orchestrator"),
        (
            "[orchestrator]\nbatch_size = '64'",
            18,
            "orchestrator.batch_size: '64' does not fit; fix: give a valid integer",
        ),
        (
            "[orchestrator]\nbatch_size = 0",
            18,
            "orchestrator.batch_size: 0 does not fit; fix: give greater than or equal to 1",
        ),
        (
            "[orchestrator]\ntemperature = nan",
            18,
            "orchestrator.temperature: nan does not fit; fix: give a finite number",
        ),
        (
            "[orchestrator]\ntemperature = inf",
            18,
            "orchestrator.temperature: inf does not fit; fix: give a finite number",
        ),
        ("[orchestrator]\nschedule = 'x'", 18, "orchestrator.schedule: 'x' does not fit; fix: give 'critic_first'"),
        ("[policy]\nmodel = 3", 18, "policy.model: 3 is not a table; fix: write it as [policy.model]"),
        ("[orchestrator]\nbatch_size = 10\ngroup_size = 4", 18, "orchestrator.batch_size: 10 is not a multiple"),
        ("[policy]\nmini_batches = 65", 18, "policy.mini_batches: 65 mini-batches of whole groups"),
        (
            "[inference]\nmax_model_len = 16",
            10,
            "env[0].max_trace_tokens: 32 tokens do not fit inference.max_model_len = 16",
        ),
        ("[policy.model]\nseq_len = 16", 10, "env[0].max_trace_tokens: 32 tokens do not fit policy.model.seq_len = 16"),
        ("[value.model]\nseq_len = 16", 10, "env[0].max_trace_tokens: 32 tokens do not fit value.model.seq_len = 16"),
        (
            "[inference]\nmax_model_len = 1024",
            18,
            "inference.max_model_len: 1024 is more than the model's 512 positions",
        ),
        (
            "[[eval]]\ntype = 'add'\nmax_trace_tokens = 513",
            19,
            "eval[0].max_trace_tokens: 513 tokens do not fit inference",
        ),
        ("[[eval]]\ntype = 'ad'", 18, "eval[0].type: unknown environment 'ad'; fix: choose from"),
        ("[[env]]\ntype = 'add'\nargs = {max_operand = -1}", 19, "env[1].args.max_operand: "),
        ("[[env]]\ntype = 'add'\n[env.args]\nx = 1", 20, "env[1].args.x: "),
        ("[[env]]\nweight = 2.0", 17, "env[1].type: required but missing"),
        (
            "[inference]\nengine = 'vllm'\nvllm_python = '/nowhere/python'",
            18,
            "inference.engine: vLLM's interpreter /nowhere",
        ),
        (
            "[deployment]\nnum_policy_gpus = '1:4'",
            18,
            "deployment.num_policy_gpus: 1:4 is an elastic size, and groups of ranks have a fixed one",
        ),
        (
            "[policy]\nport = 20001\n[orchestrator]\nport = 20001",
            20,
            "orchestrator.port: port 20001 is also policy.port",
        ),
    ],
)
def test_a_problem_names_file_line_key_and_fix(tmp_path, extra, line, said):
    path = write(tmp_path, GOOD + extra + "\n")
    problem = only_problem(path)
    assert problem.startswith(f"{path}:{line}: {said}"), problem
    assert "; fix: " in problem


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [("value", "none")],
            "6: algorithm.type: sao needs a critic, but there is no [value]; fix: add a [value] table or choose",
        ),
        (
            [("algorithm.type", "grpo"), ("orchestrator.group_size", "4")],
            "15: value: grpo has no use for a critic; fix: delete [value] or choose algorithm.type = sao, ppo, vapo",
        ),
    ],
)
def test_critic_and_algorithm_must_agree(tmp_path, overrides, said):
    path = write(tmp_path, GOOD)
    assert only_problem(path, *overrides).startswith(f"{path}:{said}")


def test_a_group_too_small_for_the_algorithm_is_refused(tmp_path):
    path = write(tmp_path, GOOD)
    problem = only_problem(path, ("algorithm.type", "grpo"), ("value", "none"), ("orchestrator.group_size", "1"))
    assert problem.startswith("command line: orchestrator.group_size: 1 is too small for grpo; fix: give at least 2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            [("algorithm.type", "evpo")],
            'orchestrator.group_size: 1 is too small for evpo with scope "group"; fix: give at least 2, or '
            'algorithm.scope = "batch"',
        ),
        ([("algorithm.filter_equal_rewards", "true")], "algorithm.filter_equal_rewards: a group of one trace"),
        (
            [("algorithm.type", "spo"), ("value", "none"), ("algorithm.loss", "dis"), ("algorithm.dual_clip", "3.0")],
            "algorithm.dual_clip: the double-sided mask",
        ),
        (
            [("algorithm.type", "running_mean"), ("value", "none"), ("algorithm.eps_low", "1.5")],
            "algorithm.eps_low: 1.5 leaves",
        ),
        (
            [("algorithm.type", "spo"), ("value", "none"), ("algorithm.rho_low", "0.97")],
            "algorithm.rho_low: 0.97 is more than algorithm.rho_high = 0.96; fix: give less",
        ),
        (
            [("algorithm.type", "spo"), ("value", "none"), ("algorithm.prior_file", "nowhere.jsonl")],
            "algorithm.prior_file: there is no file nowhere.jsonl; fix: ",
        ),
    ],
)
def test_settings_that_an_algorithm_cannot_use_are_refused(tmp_path, settings, said):
    assert said in only_problem(write(tmp_path, GOOD), *settings)


def test_groups_of_one_suit_evpo_with_the_scope_of_a_batch(tmp_path):
    config = resolve([write(tmp_path, GOOD)], [("algorithm.type", "evpo"), ("algorithm.scope", "batch")]).config
    assert config.algorithm.min_group == 1 and config.algorithm.policy_loss == "ppo_clip"


def test_bootstrapping_a_cut_trace_needs_a_critic(tmp_path):
    settings = [("algorithm.type", "grpo"), ("value", "none"), ("orchestrator.group_size", "4")]
    problem = only_problem(write(tmp_path, GOOD), *settings, ("algorithm.truncation", "bootstrap"))
    assert "algorithm.truncation: grpo has no critic to bootstrap" in problem and "fix: " in problem


def test_value_gpus_without_a_critic_are_refused(tmp_path):
    path = write(tmp_path, GOOD + "[deployment]\nnum_value_gpus = 2\n")
    settings = [("algorithm.type", "grpo"), ("value", "none"), ("orchestrator.group_size", "4")]
    assert only_problem(path, *settings).startswith(f"{path}:18: deployment.num_value_gpus: ")


def test_a_taken_port_is_found_by_binding(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = write(tmp_path, GOOD + f"port = {port}\n")
        assert only_problem(path).startswith(f"{path}:17: value.port: port {port} is taken on 127.0.0.1; fix: ")
    resolve([path])


def test_more_gpus_than_there_are_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    path = write(tmp_path, GOOD + '[deployment]\ndevice = "cuda"\n')
    assert only_problem(path).startswith(f"{path}:18: deployment.device: 3 GPUs are needed")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: "tiny:chess", "there is no task 'chess' for the tiny model; fix: choose tiny:add"),
        (lambda d: str(d / "absent"), "there is no folder"),
        (lambda d: f"dummy:{d / 'absent'}", "there is no folder"),
        (lambda d: str(d), "has no config.json and no tokenizer.json"),
    ],
)
def test_a_model_that_is_not_there_is_refused(tmp_path, make, said):
    path = write(tmp_path, GOOD.replace("tiny:add", make(tmp_path)))
    problem = only_problem(path)
    assert problem.startswith(f"{path}:3: model.path: ")
    assert said in problem


def test_the_models_own_positions_bound_the_engine(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 128}}))
    (folder / "tokenizer.json").write_text("{}")
    path = write(tmp_path, GOOD.replace("tiny:add", f"dummy:{folder}"))
    assert "inference.max_model_len: 512 is more than the model's 128 positions" in only_problem(path)
    resolve([path], [("inference.max_model_len", "64")])


def test_weights_are_required_unless_random_ones_are_asked_for(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    assert "has no *.safetensors" in only_problem(write(tmp_path, GOOD.replace("tiny:add", str(folder))))
    resolve([write(tmp_path, GOOD.replace("tiny:add", f"dummy:{folder}"))])
    vllm = [("inference.engine", "vllm"), ("inference.vllm_python", "/bin/sh")]
    problem = only_problem(write(tmp_path, GOOD.replace("tiny:add", f"dummy:{folder}")), *vllm)
    assert "inference.engine: vLLM cannot start from the same random weights" in problem


def test_a_missing_file_and_bad_syntax_are_said_together(tmp_path):
    broken = write(tmp_path, "[model]\npath = \n", "broken.toml")
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError) as caught:
        resolve([broken, missing])
    first, second = caught.value.problems
    assert first.startswith(f"{broken}:2: not TOML: ")
    assert second.startswith(f"{missing}:1: cannot be read: No such file")


def test_a_setting_below_something_that_is_no_table_is_refused(tmp_path):
    path = write(tmp_path, GOOD)
    assert only_problem(path, ("env.3.weight", "2")).startswith("command line: env[3].weight: there is no table env[3]")


# ---------------------------------------------------------------- all at once

MANY = """\
sed = 3
[model]
path = "/nowhere/model"   # no such folder
[algorithm]
type = "sao"
gama = 1.0
[[env]]
type = "add"
max_trace_tokens = 5000
[[env]]
type = "ad"
weight = nan
[orchestrator]
batch_size = "7"
group_size = 3
port = 20002
policy_grid_port = 20002
"""


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path):
    path = write(tmp_path, MANY, "many.toml")
    problems = problems_of(path)
    lines = [int(problem.removeprefix(f"{path}:").split(":")[0]) for problem in problems]
    # line 9 is too long for the engine and for the policy; group_size speaks only with a batch_size that fits
    assert lines == [1, 3, 5, 6, 9, 9, 11, 12, 14, 16]


def test_a_broken_value_silences_the_checks_that_read_it(tmp_path):
    path = write(tmp_path, GOOD + "[orchestrator]\nbatch_size = 'x'\ngroup_size = 7\n")
    assert [problem.split(": ")[1] for problem in problems_of(path)] == ["orchestrator.batch_size"]


def test_an_empty_file_names_everything_that_is_needed(tmp_path):
    problems = problems_of(write(tmp_path, "", "empty.toml"))
    keys = [problem.split(": ")[1] for problem in problems]
    assert sorted(keys) == ["algorithm", "env", "model"]


def test_an_unknown_algorithm_is_named_with_the_choices(tmp_path):
    path = write(tmp_path, GOOD.replace('"sao"', '"pro"'))
    assert (
        only_problem(path)
        == f"{path}:6: algorithm.type: unknown algorithm 'pro'; fix: choose algorithm.type = {', '.join(ALGORITHMS)}"
    )


# ---------------------------------------------------------------- names kept in step


def test_names_written_twice_agree():
    assert set(TINY_TASKS) == set(ENVIRONMENTS)
    assert set(_TOP_LEVEL) == set(Config.model_fields)
    assert set(ALGORITHMS) == set(CREDITS)
    assert {".".join(map(str, key)) for key in PORT_KEYS.values()} == {
        key for key in known_keys() if key.rpartition(".")[2].endswith("port")
    }
