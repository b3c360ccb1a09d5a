"""What a replay starts and what it refuses: everything after the rollouts can change, nothing before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import to_toml
from services.launch.cli import main
from services.launch.models import ModelSource
from services.launch.planner import Site, plan
from services.launch.replay import replay_config
from services.launch.resume import resume_run
from services.runtime.records import MARK, path_of
from services.wire.errors import ConfigError, UsageError
from services.wire.rollout_files import encode_file
from tests.groups import make_group
from tests.processes.fleets import Said

CONFIG = """\
[model]
path = "tiny:add"
[algorithm]
type = "sao"
eps_high = 7.0
[orchestrator]
max_steps = 5
batch_size = 4
group_size = 2
port = 12345
[[env]]
type = "add"
max_trace_tokens = 32
[[eval]]
type = "add"
max_trace_tokens = 32
[value]
[deployment]
num_value_gpus = 2
"""


def recorded_run(folder: Path, *, num_steps: int = 5, num_traces: int = 2, text: str = CONFIG) -> Path:
    """A run directory as a run leaves it: configuration and record."""
    source = folder / "run"
    (source / "rollouts").mkdir(parents=True)
    (folder / "small.toml").write_text(text)
    config = resolve([folder / "small.toml"], [("run.dir", str(source))]).config
    (source / "config.resolved.toml").write_text(to_toml(config))
    for step in range(num_steps):
        lengths = ((4,),) * num_traces
        groups = [make_group(order=2 * step, lengths=lengths), make_group(order=2 * step + 1, lengths=lengths)]
        data = encode_file(groups, run_id="demo-1", epoch=1, step=step, policy_version=step)
        path_of(source / "rollouts", step).write_bytes(data)
    return source


def problems(source: Path, *settings: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        replay_config(source, settings)
    return caught.value.problems


def test_a_replay_is_the_runs_configuration_in_a_folder_beside_it_without_engine_record_and_ports(
    tmp_path: Path,
) -> None:
    source = recorded_run(tmp_path)
    config = replay_config(source, [])
    assert config.run.dir == str(tmp_path / "run-replay") and not config.run.record
    assert config.eval == [] and config.orchestrator.port == 0 and config.orchestrator.max_steps == 5
    assert config.algorithm.loss_constants()["eps_high"] == 7.0
    layout = plan(
        config,
        dict.fromkeys(["policy_http_port", "policy_grid_port", "value_http_port", "critic_grid_port"], 1)
        | {"inference_http_port": 2, "orchestrator_http_port": 3},
        run_dir=tmp_path / "run-replay",
        run_id="r",
        epoch=1,
        model=ModelSource(tmp_path),
        site=Site(tmp_path),
        replay_of=source,
    )
    assert [process.name for process in layout.processes] == ["policy", "value", "orchestrator"]
    assert layout.context.inference_urls == [] and layout.context.replay_of == str(source)


def test_a_record_that_ends_early_says_how_far_and_why(tmp_path: Path) -> None:
    source = recorded_run(tmp_path, num_steps=3)
    (source / "rollouts" / MARK).write_text('{"step": 3, "cause": "No space left on device"}')
    assert replay_config(source, []).orchestrator.max_steps == 3
    (problem,) = problems(source, ("orchestrator.max_steps", "4"))
    assert problem == (
        "orchestrator.max_steps: 4 is too many: the record ends after 3 steps (No space left on device); fix: give 3"
    )
    path_of(source / "rollouts", 0).unlink()
    (problem,) = problems(source)
    assert "holds no recorded rollouts (No space left on device)" in problem and "run.record = true" in problem


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (("model.path", "tiny:guess"), "model.path: 'tiny:guess' is not the record's 'tiny:add': the record holds"),
        (("orchestrator.batch_size", "8"), "orchestrator.batch_size: 8 is not the record's 4: batches were made up"),
        (("orchestrator.group_size", "4"), "orchestrator.group_size: 4 is not the record's 2: groups were rolled out"),
        (("orchestrator.temperature", "0.5"), "orchestrator.temperature: 0.5 is not the record's 1.0: recorded"),
        (("env.0.max_turns", "3"), "env: it differs: the record holds what these environments said"),
    ],
)
def test_what_made_the_rollouts_cannot_change(tmp_path: Path, setting: tuple[str, str], said: str) -> None:
    (problem,) = problems(recorded_run(tmp_path), setting)
    assert problem.startswith(said) and problem.endswith("fix: delete the setting")


def test_what_comes_after_the_rollouts_can_change(tmp_path: Path) -> None:
    source = recorded_run(tmp_path)
    ppo = replay_config(source, [("algorithm.type", "ppo")])
    assert ppo.algorithm.type == "ppo" and ppo.algorithm.loss_constants()["eps_high"] != 7.0
    grpo = replay_config(source, [("algorithm.type", "grpo"), ("value", "none")])
    assert grpo.value is None and grpo.algorithm.type == "grpo"
    hl_gauss = replay_config(source, [("value.loss.type", "hl_gauss"), ("value.loss.bins", "21")])
    assert hl_gauss.value is not None and hl_gauss.value.loss.type == "hl_gauss"
    other = replay_config(source, [("policy.optim.lr", "1e-3"), ("deployment.num_policy_gpus", "2"), ("seed", "9")])
    assert other.policy.optim.lr == 1e-3 and other.deployment.num_policy_gpus == 2


def test_groups_that_are_too_small_for_the_algorithm_are_found_before_anything_starts(tmp_path: Path) -> None:
    source = recorded_run(tmp_path, num_traces=1)
    (problem,) = problems(source, ("algorithm.type", "grpo"), ("value", "none"))
    assert problem.startswith("algorithm.type: grpo needs groups of 2, step 0 of the record has one of 1")


def test_the_recorded_folder_itself_and_a_folder_of_anything_else_are_refused(tmp_path: Path) -> None:
    source = recorded_run(tmp_path)
    (problem,) = problems(source, ("run.dir", str(source)))
    assert "is the recorded run" in problem
    with pytest.raises(UsageError, match="not a run directory"):
        replay_config(tmp_path, [])
    assert main(["replay", str(tmp_path)]) == 64
    assert main(["replay", str(source), "--orchestrator.batch_size", "8"]) == 78


def test_there_is_nothing_to_resume_without_a_commit(tmp_path: Path) -> None:
    config = replay_config(recorded_run(tmp_path), [])
    with pytest.raises(ConfigError, match="holds no run"):
        resume_run(config, Said())
