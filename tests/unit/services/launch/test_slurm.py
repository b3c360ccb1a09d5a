"""The job script: one golden file a layout, good shell, and values that cannot become commands.

After a change that is meant: run this file with UPDATE_GOLDEN=1 in the environment, and read the difference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import Config, from_toml
from services.launch.planner import Site
from services.launch.slurm import CONFIG_FILE, SCRIPT, Job, render, run_on_slurm
from services.wire.errors import ConfigError, DependencyLost, UsageError
from tests.commands import put
from tests.commits import make_commit
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "golden"
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "cluster").glob("*.toml"))
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 32}
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "num_key_value_heads": 8}
LENGTHS = {"head_dim": 2, "max_position_embeddings": 40_960, "tie_word_embeddings": True}
PLAIN = """\
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
gpus_per_node = 1
num_value_nodes = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model, with the least in them."""
    folder = tmp_path_factory.mktemp("model") / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN | SIZES | LENGTHS))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


def plain(tmp_path: Path, *settings: tuple[str, str], more: str = "") -> Config:
    path = tmp_path / "plain.toml"
    path.write_text(PLAIN + more)
    return resolve([path], [("run.dir", str(tmp_path / "run")), *settings]).config


def job_of(config: Config, **more) -> Job:
    """On a cluster with the same folders everywhere."""
    site = Site(ROOT, "/shared/venv/bin/python", torch_version="2.13.0")
    run_dir = Path("/shared/runs") / config.run.name
    return Job(run_dir, Path("/shared/project"), site, run_dir, **more)


def test_every_recipe_has_its_golden_script_and_no_other_is_kept() -> None:
    assert sorted(path.name.removesuffix(".sbatch") for path in GOLDEN.glob("*.sbatch")) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_layouts_script_is_the_golden_one_and_good_shell(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    settings = [("model.path", str(model)), ("inference.vllm_python", "/bin/sh"), ("deployment.kind", "slurm")]
    config = resolve([ROOT / "configs" / "cluster" / f"{name}.toml"], settings).config
    script = render(config, job_of(config))
    shown = script.replace(str(model), "/shared/models/Qwen3-4B").replace(str(ROOT), "/shared/project")
    shown = shown.replace("/bin/sh -m vllm.", "/shared/vllm/bin/python -m vllm.")
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / f"{name}.sbatch").write_text(shown)
    assert shown == (GOLDEN / f"{name}.sbatch").read_text()
    check_shell(script, tmp_path)


def check_shell(script: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(script)
    assert shutil.which("shellcheck"), "shellcheck is not installed: apt-get install -y shellcheck"
    for command in (["bash", "-n", str(path)], ["shellcheck", "--norc", str(path)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_of_the_section_is_in_the_script(tmp_path: Path) -> None:
    keys = """
[slurm]
account = "nlp"
partition = "a100"
qos = "high"
time = "8:00:00"
nodelist = "n[1-4]"
exclude = "n9"
exclusive = false
memory = "200G"
extra = ["#SBATCH --reservation=maint"]
setup = ["export A='b c'"]
modules = ["cuda/12.8"]
venv = "/shared/other"
signal_lead_s = 900
requeue = false
"""
    config = plain(tmp_path, more=keys)
    script = render(config, job_of(config))
    lines = script.splitlines()
    wanted = ["--account=nlp", "--partition=a100", "--qos=high", "--time=8:00:00", "--nodelist=n[1-4]", "--exclude=n9"]
    wanted += ["--nodes=2", "--mem=200G", "--signal=B:USR1@900", "--no-requeue", "--reservation=maint"]
    for option in wanted:
        assert f"#SBATCH {option}" in lines
    assert "#SBATCH --exclusive" not in lines and "scontrol requeue" not in script
    assert "module load cuda/12.8 || exit 69" in lines and "export A='b c'" in lines
    check_shell(script, tmp_path)


def test_gpus_are_asked_for_where_the_run_has_any_and_the_site_does_not_hand_them_out(tmp_path: Path) -> None:
    config = plain(tmp_path)
    on_gpus = config.on_cuda()
    silent = on_gpus.model_copy(update={"slurm": on_gpus.slurm.model_copy(update={"request_gpus": False})})
    scripts = [render(each, job_of(each)) for each in (config, on_gpus, silent)]
    assert [re.findall(r"#SBATCH --gpus.*", script) for script in scripts] == [[], ["#SBATCH --gpus-per-node=1"], []]


def test_paths_are_quoted_and_ones_that_no_script_takes_are_refused_together(tmp_path: Path) -> None:
    config = plain(tmp_path)
    hostile = ["/shared/a b", "/shared/$(id)", "/shared/x;id", "/shared/a\nid", "/shared/%j", "/shared/a'b"]
    for text in hostile:
        path = Path(text)
        with pytest.raises(ConfigError) as caught:
            render(config, Job(path, path, Site(ROOT), path))
        assert [problem.partition(":")[0] for problem in caught.value.problems] == [
            "run.dir",
            "working directory",
            "folder of the script",
        ]


def test_a_value_that_came_around_the_resolver_is_still_refused(tmp_path: Path) -> None:
    config = plain(tmp_path)
    hostile = config.slurm.model_copy(update={"account": "x\n#SBATCH --wrap=id", "modules": ["a;id"]})
    with pytest.raises(ConfigError) as caught:
        render(config.model_copy(update={"slurm": hostile}), job_of(config))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["slurm.account", "slurm.modules"]


def test_what_a_comment_shows_stays_in_its_line(tmp_path: Path) -> None:
    """Scenario: an argument of vLLM with a line break, which is the engine's own affair.
    Result: in the script it is one comment."""
    config = plain(tmp_path)
    inference = config.inference.model_copy(update={"engine": "vllm", "vllm_args": ["--x\nid; touch /tmp/no"]})
    script = render(config.model_copy(update={"inference": inference}), job_of(config))
    (line,) = [line for line in script.splitlines() if "touch /tmp/no" in line]
    assert line.startswith("#     ")


def test_ports_are_shown_by_their_names(tmp_path: Path) -> None:
    config = plain(tmp_path, ("deployment.num_train_nodes", "2"), ("deployment.num_policy_gpus", "2"))
    assert "--rdzv-endpoint node0:policy_rdzv_port" in render(config, job_of(config))


def test_a_template_of_ones_own_takes_the_place_of_ours_and_its_mistakes_are_told(tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("#!/bin/bash\n{% for line in head %}\n{{ line }}\n{% endfor %}\nexec {{ launcher | join(' ') }}\n")
    config = plain(tmp_path, ("slurm.template", str(own)))
    lines = render(config, job_of(config)).splitlines()
    assert lines[0] == "#!/bin/bash" and lines[1] == "#SBATCH --job-name=plain"
    assert lines[-1] == "exec /shared/venv/bin/python -m services.launch.slurm_job --run-dir /shared/runs/plain"
    own.write_text("{{ nothing_of_this_name }}")
    with pytest.raises(ConfigError, match=r"slurm\.template: .*'nothing_of_this_name' is undefined"):
        render(config, job_of(config))


def test_render_only_writes_script_and_configuration_and_submits_nothing(tmp_path: Path, commands: Path) -> None:
    put(commands, "sbatch", f"touch {tmp_path}/submitted")
    config, said = plain(tmp_path), []
    assert run_on_slurm(config, say=said.append, render_only=str(tmp_path / "job")) == 0
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [CONFIG_FILE, SCRIPT]
    assert from_toml((tmp_path / "job" / CONFIG_FILE).read_text()) == config
    assert f"--config {tmp_path}/job/{CONFIG_FILE}" in (tmp_path / "job" / SCRIPT).read_text()
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "run").exists()


def test_render_only_is_for_jobs(tmp_path: Path) -> None:
    config = plain(tmp_path, ("deployment.kind", "local"), ("deployment.num_value_nodes", "none"))
    with pytest.raises(UsageError, match="render-only"):
        run_on_slurm(config, render_only=str(tmp_path / "job"))


def test_a_submitted_run_has_its_directory_and_says_what_to_look_at(tmp_path: Path, commands: Path) -> None:
    put(commands, "squeue", "exit 1")
    put(commands, "sbatch", f'echo "$@" > {tmp_path}/words; echo "42;cluster"')
    said: list[str] = []
    assert run_on_slurm(plain(tmp_path), say=said.append) == 0
    run = tmp_path / "run"
    assert (tmp_path / "words").read_text().strip() == f"--parsable {run}/job.sbatch"
    assert {path.name for path in run.iterdir()} == {CONFIG_FILE, SCRIPT, "job.json", "logs"}
    for words in ("42", f"{run}/job.sbatch", f"{run}/slurm-42.log", f"tail -F {run}/slurm-42.log", "scancel"):
        assert any(words in line for line in said), words


def test_a_directory_whose_job_is_queued_or_running_takes_no_other(tmp_path: Path, commands: Path) -> None:
    put(commands, "sbatch", "echo 42")
    put(commands, "squeue", 'test "$3" = 42 && echo PENDING')
    config = plain(tmp_path)
    run_on_slurm(config, say=lambda line: None)
    for how in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match=r"job 42 of .* is PENDING; fix: wait for it, or scancel 42"):
            run_on_slurm(config, say=lambda line: None, **how)
    put(commands, "squeue", "exit 1")  # as it is for a job that ended long ago
    assert run_on_slurm(config, say=lambda line: None, overwrite=True) == 0


def test_going_on_needs_a_commit_and_takes_the_configuration_as_it_is_now(tmp_path: Path, commands: Path) -> None:
    from services.runtime.commits import Commits

    put(commands, "sbatch", "echo 42")
    put(commands, "squeue", "exit 1")
    run_on_slurm(plain(tmp_path), say=lambda line: None)
    longer = plain(tmp_path, ("orchestrator.max_steps", "77"))
    with pytest.raises(ConfigError, match="no commit to go on from"):
        run_on_slurm(longer, say=lambda line: None, resume=True)
    make_commit(Commits(tmp_path / "run" / "checkpoints"), 3)
    assert run_on_slurm(longer, say=lambda line: None, resume=True, allow_fallback=True) == 0
    assert from_toml((tmp_path / "run" / CONFIG_FILE).read_text()) == longer
    assert f"--run-dir {tmp_path}/run --resume --allow-fallback &" in (tmp_path / "run" / SCRIPT).read_text()


def test_without_sbatch_or_where_it_refuses_its_words_are_told(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain(tmp_path)
    monkeypatch.setenv("PATH", str(commands))
    with pytest.raises(ConfigError, match=r"deployment\.kind: sbatch and squeue not on this machine"):
        run_on_slurm(config, say=lambda line: None)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    put(commands, "squeue", "exit 1")
    put(commands, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    for _ in range(2):  # nothing of the first try is in the way of the second
        with pytest.raises(DependencyLost, match="invalid partition specified: x"):
            run_on_slurm(config, say=lambda line: None)
    assert not (tmp_path / "run").exists()
