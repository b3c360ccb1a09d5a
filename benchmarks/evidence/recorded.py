"""What the evidence about critics is measured on: a live run's rollouts, recorded, on which any critic can then train.

Notable:
- `run_of` is a whole system, started by the command line: engine, orchestrator, policy trainer and a critic. Its
  rollouts are on disk; each arm of an experiment trains a critic of its own on the same batches in the same order, so
  all arms see equal policy steps of the same policy.
- `critic_rows` is the value service's own: `build_critic`, the grids of the loop, `Updater.train`, in this process.
- Explained variance is of each batch before any update has seen it.
- Runs that are complete in runs/evidence/ are not repeated: scripts share them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orchestrator.algorithms import build
from services.config.context import RunContext, load_run
from services.config.corpus import pretraining_config
from services.config.pretrain import PretrainConfig
from services.config.schema import Config, to_toml
from services.config.train import ValueConfig
from services.model.mesh import Mesh
from services.packing.cost import cost_of_role
from services.packing.grid import build_grid
from services.runtime.records import open_record
from services.training.parts import Part
from services.training.ranks import Ranks
from services.wire.samples import TrainingSample
from services.wire.value_rows import MANIFEST, FileFacts, ValueRow, encode_row, read_manifest, sha256_of, write_manifest
from value_service.build import build_critic
from value_service.pretrain import Pretraining, shared_index
from value_service.pretrain_export import export_pretrained
from value_service.updater import Updater

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "evidence"
NUM_WORDS = 2000
"""that the run draws from; a corpus may have others"""
BATCH_SIZE, NUM_STEPS, CRITIC_LR = 64, 200, 1e-3
LETTERS = (3, 8)
CONFIG = f"""
[model]
path = "tiny:reverse"
[algorithm]
type = "sao"
[orchestrator]
max_steps = {NUM_STEPS}
batch_size = {BATCH_SIZE}
max_concurrent_rollouts = {BATCH_SIZE}
max_off_policy_steps = 1
[[env]]
type = "reverse"
max_turns = 1
max_turn_tokens = 12
max_trace_tokens = 32
args = {{ min_letters = {LETTERS[0]}, max_letters = {LETTERS[1]}, num_tasks = NUM_TASKS }}
[policy.model]
seq_len = 1024
[policy.optim]
lr = 2e-4
[value.model]
seq_len = 1024
[value.optim]
lr = {CRITIC_LR}
[inference]
engine = "local"
max_model_len = 64
max_num_seqs = 128
[checkpoint]
interval_steps = 0
"""
SETTING = (
    f"A live SAO run on `reverse`: words of {LETTERS[0]} to {LETTERS[1]} letters, {NUM_WORDS} of them, of which the "
    f"0.43 M-parameter policy has learned those of 3 to 5; {NUM_STEPS} steps of {BATCH_SIZE} rollouts, policy learning "
    f"rate 2e-4, rollouts a version old. Its recorded rollouts then train every arm's critic (mse, lr {CRITIC_LR:g}, "
    "`value_service.updater.Updater` in one process): all arms see the same batches in the same order."
)


def cli(*words: str) -> None:
    """Carry out a `counterpoint` command.

    Raises:
        SystemExit: it failed; with its output.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    argv = [sys.executable, "-m", "services.launch", *words]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"counterpoint {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}")


def config_file(*, num_words: int = NUM_WORDS) -> Path:
    """Write the configuration, into a file named for what is in it.

    Args:
        num_words: That are drawn from; the first ones are the same words whatever their number.
    """
    text = CONFIG.replace("NUM_TASKS", str(num_words))
    path = RUNS / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def carried_out(words: Sequence[str], run_dir: Path) -> None:
    """A command with a run directory, unless it is complete there.

    Args:
        words: The command.
        run_dir: Its directory.
    """
    done = run_dir / "carried_out"
    if not done.exists():
        print(f"{time.strftime('%H:%M:%S')} counterpoint {' '.join(words)}", file=sys.stderr, flush=True)
        cli(*words, "--run.dir", str(run_dir), "--overwrite")
        shutil.rmtree(run_dir / "weights", ignore_errors=True)
        done.write_text(" ".join(words))


@dataclass(frozen=True)
class Recorded:
    """A finished run."""

    config: Config
    context: RunContext
    batches: list[list[TrainingSample]]
    """credited"""

    @property
    def value(self) -> ValueConfig:
        """The critic's section."""
        assert self.config.value is not None
        return self.config.value

    @property
    def mean_rewards(self) -> np.ndarray:
        """Of each batch."""
        return np.array([np.mean([sample.reward for sample in batch]) for batch in self.batches])


def run_of(seed: int, num_steps: int = NUM_STEPS) -> Recorded:
    """Carry out a run and read what it recorded.

    Args:
        seed: Of the run.
        num_steps: Its length.
    """
    config_path = config_file()
    run_dir = RUNS / f"{config_path.stem}-{num_steps}-{seed}"
    words = ["run", str(config_path), "--seed", str(seed), "--orchestrator.max_steps", str(num_steps)]
    carried_out(words, run_dir)
    config, context = load_run(run_dir)
    algorithm, batches = build(config.algorithm), []
    for step in open_record(run_dir / "rollouts"):
        groups = [step.read(index).samples for index in range(len(step.header.groups))]
        algorithm.credit(groups)
        batches.append([sample for group in groups for sample in group])
    assert len(batches) == num_steps
    return Recorded(config, context, batches)


def critic_rows(recorded: Recorded, **changes: Any) -> list[dict[str, Any]]:
    """Train a critic on a run's batches, one grid each.

    Args:
        recorded: The run.
        changes: To the critic's section, by key.

    Returns:
        The critic's metrics row of each batch.
    """
    value = recorded.value.model_copy(update=changes)
    config, ranks, mesh = recorded.config.model_copy(update={"value": value}), Ranks(), Mesh()
    _, critic = build_critic(config, recorded.context, mesh)
    updater = Updater(critic, ranks, mesh, value, movement_interval_steps=0)
    rows = []
    for step, samples in enumerate(recorded.batches):
        (item,) = build_grid(
            samples,
            stream="critic",
            seq_len=value.model.seq_len,
            num_data_ranks=1,
            run_id="recorded",
            epoch=1,
            step=step,
            policy_version=step,
            temperature=1.0,
            loss_name=value.loss.type,
            loss_constants=value.loss.loss_constants(),
            num_mini_batches=value.mini_batches,
            cost=cost_of_role(value.packing, Path(recorded.context.model_dir), has_vocabulary=False),
        )
        rows.append(updater.train(item))
    return rows


def explained(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """[steps] explained variance; NaN where it is not defined."""
    numbers = [row["value/explained_variance"] for row in rows]
    return np.array([np.nan if number is None else number for number in numbers], dtype=np.float64)


def window_means(curve: np.ndarray, width: int) -> np.ndarray:
    """[steps / width] means over windows side by side; what is left over at the end is not shown."""
    return np.nanmean(curve[: len(curve) // width * width].reshape(-1, width), axis=1)


def policy(seed: int) -> Path:
    """Folder of a tiny model with a warm start of its own."""
    folder = RUNS / f"policy-{seed}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        cli("make-tiny", str(folder), "--task", "reverse", "--seed", str(seed))
    return folder


def rows_of(policy_seed: int, *, num_rows: int, num_words: int) -> Path:
    """The file of rollouts by one policy, recorded by the command line; every policy takes the same words.

    Args:
        policy_seed: Of `policy`.
        num_rows: How many.
        num_words: That are drawn from.
    """
    config_path = config_file(num_words=num_words)
    run_dir = RUNS / f"rows-{config_path.stem}-{policy_seed}-{num_rows}-0"
    who = ["--model.path", str(policy(policy_seed)), "--policy-id", f"policy {policy_seed}"]
    carried_out(["record", str(config_path), "--seed", "0", *who, "--rows", str(num_rows)], run_dir)
    return run_dir / "rows" / "rows.jsonl"


def pretrained(live: Recorded, file: Path, run_dir: Path, *, seed: int, settings: dict[str, Any]) -> tuple[Path, float]:
    """A critic trained on a corpus, as `counterpoint pretrain-value` does but in this process.

    Args:
        live: The run that it is for.
        file: Of the corpus.
        run_dir: To make.
        seed: Of the order of rows and of what is held out.
        settings: Further keys of `[value.pretrain]`.

    Returns:
        The exported critic's folder, and its explained variance of the held-out prompts.
    """
    pretrain = PretrainConfig.model_validate({"files": [str(file)]} | settings)
    value = live.value.model_copy(update={"pretrain": pretrain})
    config = pretraining_config(live.config.model_copy(update={"value": value, "seed": seed}))
    context = live.context.model_copy(update={"dir": str(run_dir)})
    run_dir.mkdir()
    (run_dir / "config.resolved.toml").write_text(to_toml(config))
    (run_dir / "run.json").write_text(context.model_dump_json())
    assert config.value is not None
    ranks, mesh = Ranks(), Mesh()
    backbone, critic = build_critic(config, context, mesh)
    updater = Updater(critic, ranks, mesh, config.value, movement_interval_steps=0)
    part = Part("critic", critic, updater.optimizer, mesh, ranks)
    vocab_size = backbone.model.config.vocab_size
    index = shared_index(config, ranks, vocab_size=vocab_size)
    pretraining = Pretraining(config, context, part, updater, index, vocab_size=vocab_size)
    pretraining.run(threading.Event())
    assert pretraining.held_out is not None
    return export_pretrained(run_dir, pretraining.num_done, index, held_out=pretraining.held_out), pretraining.held_out


def number_of(row: ValueRow) -> int:
    """Number of a row's word, from "reverse:reverse/17/abcd"."""
    return int(row.prompt_id.split("/")[1])


def read_rows(path: Path) -> list[ValueRow]:
    """All rows of a file that `counterpoint record` has written."""
    return [msgspec.json.decode(line, type=ValueRow) for line in path.read_bytes().splitlines()]


def write_rows(folder: Path, rows: Sequence[ValueRow], like: Path) -> Path:
    """Write some of the recorded rows as a corpus.

    Args:
        folder: To make.
        rows: With ids that differ.
        like: A recorded file, whose manifest says the rest.
    """
    folder.mkdir()
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(encode_row(row) for row in rows))
    manifest = msgspec.structs.replace(
        read_manifest(like)[0], files={path.name: FileFacts(sha256_of(path), rows=len(rows))}
    )
    (folder / MANIFEST).write_bytes(write_manifest(folder, manifest))
    return path
