"""From rollouts to a pretrained critic to a run that starts from it, by the command line, the critic on two ranks."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from services.runtime.commits import Commits
from services.wire.value_rows import read_manifest
from tests.runs import ROOT, processes_of, read_lines, run_cli, start_cli

SAO = str(ROOT / "tests" / "processes" / "configs" / "sao.toml")
NUM_ROWS, NUM_SUFFIXES = 60, 2


def cli(*words: str, log: Path, timeout_s: float = 280) -> tuple[int, str]:
    process = start_cli(*words, log=log)
    try:
        code = process.wait(timeout=timeout_s)
    finally:
        process.kill()
    return code, log.read_text()


@dataclass
class Pretrained:
    """Two runs on the same files: one from beginning to end, one that was told to end and went on."""

    rows: Path
    whole: Path
    cut: Path
    shared: Path
    """as `whole`, but for its layout: two context ranks instead of two data ranks"""
    preempted: tuple[int, list[int]]
    """exit code, and the commits there were"""
    output: str


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Pretrained:
    folder = tmp_path_factory.mktemp("pretraining")
    recorded = folder / "recorded"
    words = ("--rows", str(NUM_ROWS), "--suffixes", str(NUM_SUFFIXES), "--policy-id", "tiny")
    code, output = cli("record", SAO, *words, "--run.dir", str(recorded), log=folder / "record.out")
    assert code == 0, output
    assert not processes_of(recorded)
    rows = recorded / "rows" / "rows.jsonl"
    settings = [
        *("--value.pretrain.files", f'["{rows}"]', "--value.pretrain.batch_size", "8", "--value.pretrain.epochs", "2"),
        *("--value.pretrain.held_out_fraction", "0.3", "--value.pretrain.eval_interval_updates", "0"),
        *("--deployment.num_value_gpus", "2", "--checkpoint.interval_steps", "0", "--value.optim.lr", "1e-3"),
    ]
    whole, cut = folder / "whole", folder / "cut"
    code, output = cli("pretrain-value", SAO, *settings, "--run.dir", str(whole), log=folder / "whole.out")
    assert code == 0, output
    process = start_cli("pretrain-value", SAO, *settings, "--run.dir", str(cut), log=folder / "cut.out")
    until = time.monotonic() + 200
    while not (cut / "metrics.jsonl").exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    preempted = process.wait(timeout=60), Commits(cut / "checkpoints").steps()
    code, again = cli("pretrain-value", SAO, *settings, "--run.dir", str(cut), "--resume", log=folder / "again.out")
    assert code == 0, again
    shared, cp = folder / "shared", ("--value.model.cp", "2")
    code, other = cli("pretrain-value", SAO, *settings, *cp, "--run.dir", str(shared), log=folder / "shared.out")
    assert code == 0, other
    return Pretrained(rows, whole, cut, shared, preempted, output)


def rows_of(run_dir: Path, stream: str) -> list[dict[str, Any]]:
    rows = [row for row in read_lines(run_dir / "metrics.jsonl") if row["stream"] == stream]
    return [{name: value for name, value in row.items() if not name.startswith("time")} for row in rows]


def test_a_recording_is_complete_and_names_its_policy(pretrained: Pretrained) -> None:
    manifest, facts = read_manifest(pretrained.rows)
    rows = read_lines(pretrained.rows)
    assert facts.rows == len(rows) > NUM_ROWS
    assert sum("suffix_of" not in row for row in rows) == NUM_ROWS
    assert {row["policy_id"] for row in rows} == {"tiny"}
    assert manifest.reward_range == [0.0, 1.0]


def test_sigterm_commits_ends_with_75_and_the_rest_has_the_same_bits(pretrained: Pretrained) -> None:
    code, commits = pretrained.preempted
    num_updates = len(rows_of(pretrained.whole, "pretrain"))
    assert code == 75 and len(commits) == 1 and 0 < commits[0] < num_updates
    for stream in ("pretrain", "held_out"):
        assert rows_of(pretrained.cut, stream) == rows_of(pretrained.whole, stream)
    weights = [load_file(folder / "critic" / "model.safetensors") for folder in (pretrained.whole, pretrained.cut)]
    assert weights[0].keys() == weights[1].keys()
    assert all((tensor == weights[1][name]).all() for name, tensor in weights[0].items())
    for run_dir in (pretrained.whole, pretrained.cut):
        assert not processes_of(run_dir)


def test_another_layout_takes_the_same_updates(pretrained: Pretrained) -> None:
    for stream, names in (("pretrain", ("value/loss", "value/grad_norm")), ("held_out", ("value/loss", "value/bias"))):
        one, other = rows_of(pretrained.whole, stream), rows_of(pretrained.shared, stream)
        assert len(one) == len(other) > 0
        for name in names:
            assert [row[name] for row in one] == pytest.approx([row[name] for row in other], rel=1e-4), name


def test_it_ends_with_a_summary_a_picture_and_what_the_critic_has_seen(pretrained: Pretrained) -> None:
    assert "held out" in pretrained.output and "calibration" in pretrained.output
    assert (pretrained.whole / "pretraining.png").stat().st_size > 1000
    facts = json.loads((pretrained.whole / "critic" / "counterpoint.json").read_text())
    assert facts["corpus"]["policies"] == ["tiny"] and facts["corpus"]["prompts"] == 8


def test_a_run_starts_from_it_and_says_how_it_does_on_fresh_rollouts(pretrained: Pretrained, tmp_path: Path) -> None:
    critic = str(pretrained.whole / "critic")
    settings = ("--value.init_from", critic, "--orchestrator.max_steps", "1", "--value.warmup.critic_only_steps", "0")
    run = run_cli(tmp_path / "run", SAO, *settings)
    assert run.code == 0, run.output
    log = (run.dir / "logs" / "orchestrator.log").read_text()
    assert "100.0% of 8 prompts of this run are among these" in log
    (row,) = run.rows("critic")
    assert f"explained variance {row['value/explained_variance_at_scoring']:.3f} at scoring of the first batch" in log
