"""`counterpoint export`: which commit, what is refused before anything heavy starts, and one real export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.launch.export import export_words
from services.wire.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[4]
CONFIG = """
[model]
path = "somewhere"
[algorithm]
type = "{algorithm}"
[[env]]
type = "add"
max_trace_tokens = 32
{value}
"""


def make_run(folder: Path, *, has_critic: bool = True) -> Path:
    folder.mkdir()
    text = CONFIG.format(algorithm="sao" if has_critic else "grpo", value="[value]" if has_critic else "")
    (folder / "config.resolved.toml").write_text(text)
    (folder / "run.json").write_text("{}")
    return folder


def make_commit(run_dir: Path, step: int, *, is_complete: bool = True) -> None:
    """As far as a list of commits looks."""
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    if is_complete:
        (folder / "COMMIT.json").write_text("{}")


def make_snapshot(run_dir: Path, version: int) -> None:
    (run_dir / "weights" / f"v{version:06d}").mkdir(parents=True)


def chosen(run_dir: Path, role: str, step: int | None = None) -> list[str]:
    return export_words(run_dir, role, step, run_dir / "out")[3:5]


def test_the_newest_commit_is_taken_or_the_one_that_is_named(tmp_path: Path) -> None:
    """What a crash left without COMMIT.json, and any snapshot, counts for nothing beside a commit."""
    run_dir = make_run(tmp_path / "run")
    make_commit(run_dir, 9)
    make_commit(run_dir, 12)
    make_commit(run_dir, 15, is_complete=False)
    make_snapshot(run_dir, 16)
    assert chosen(run_dir, "policy") == chosen(run_dir, "critic") == ["--commit", "12"]
    assert chosen(run_dir, "critic", 9) == ["--commit", "9"]
    with pytest.raises(UsageError, match=r"--step 15: .* has no commit of step 15; there are 9, 12"):
        chosen(run_dir, "policy", 15)


def test_without_a_commit_the_newest_snapshot_is_the_policy(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    make_snapshot(run_dir, 3)
    make_snapshot(run_dir, 4)
    (run_dir / "weights" / ".v000005.part").mkdir()
    assert chosen(run_dir, "policy") == ["--snapshot", "4"]
    assert chosen(run_dir, "policy", 3) == ["--snapshot", "3"]
    with pytest.raises(UsageError, match=r"--step 9: .* no commit, and no snapshot of version 9; there are 3, 4"):
        chosen(run_dir, "policy", 9)
    with pytest.raises(ConfigError, match=r"checkpoint\.interval_steps: .* holds no commit, and a critic is saved"):
        chosen(run_dir, "critic")


def test_a_run_that_has_nothing_yet_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a commit nor a snapshot") as caught:
        chosen(make_run(tmp_path / "run"), "policy")
    assert caught.value.exit_code == 78


def test_a_critic_of_a_run_without_one_is_wrong_usage(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", has_critic=False)
    make_commit(run_dir, 1)
    with pytest.raises(UsageError, match=r"--role critic: .* trained without a critic"):
        chosen(run_dir, "critic")
    assert chosen(run_dir, "policy") == ["--commit", "1"]


def test_a_target_in_use_is_refused_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    run_dir, out = make_run(tmp_path / "run"), tmp_path / "out"
    make_commit(run_dir, 1)
    out.mkdir()
    assert export_words(run_dir, "policy", None, out)[-1] == str(out)
    (out / "file").write_text("x")
    for used in (out, out / "file"):
        with pytest.raises(UsageError, match="exists and is not empty"):
            export_words(run_dir, "policy", None, used)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def export(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "services.launch", "export", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["/nowhere", "--role", "policy", "out"],
        ["/nowhere", "out"],
        ["/nowhere", "--role", "orchestrator", "out"],
        ["/nowhere", "--role", "policy"],
        ["/nowhere", "--role", "policy", "--step", "last", "out"],
    ],
)
def test_wrong_usage_is_64_and_one_line(words: list[str]) -> None:
    done = export(*words)
    assert done.returncode == 64
    assert done.stderr.startswith("counterpoint: ") and len(done.stderr.splitlines()) == 1


def test_a_commit_becomes_two_folders_and_says_which(tmp_path: Path) -> None:
    """Scenario: export both roles, then the critic from a commit that was damaged since. Result: 0, 0, 70."""
    from services.config.model_path import model_problem
    from services.model.load import load_causal_lm
    from tests.exports import base_of, commit, critic_of
    from tests.exports import make_run as make_real_run

    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    make_real_run(run_dir, base)
    commit(run_dir, 12, policy=load_causal_lm(base), critic=critic_of(base))
    done = export(run_dir, "--role", "policy", tmp_path / "policy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {tmp_path / 'policy'} (policy after 12 steps)\n")
    assert "model.safetensors" in done.stdout and "counterpoint.json" in done.stdout
    assert model_problem(str(tmp_path / "policy")) is None
    done = export(run_dir, "--role", "critic", "--step", "12", tmp_path / "critic")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "critic" / "counterpoint.json").read_text())["gamma"] == 0.9
    file = next((run_dir / "checkpoints" / "step_000012" / "critic").glob("*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)
    done = export(run_dir, "--role", "critic", tmp_path / "again")
    assert done.returncode == 70 and done.stderr.splitlines()[-1] == f"counterpoint: {file} differs from its manifest"
    assert not (tmp_path / "again").exists()
