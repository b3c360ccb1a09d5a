"""What the critic's options do in a live run: which parts of it moved, by how much, and whether the others stayed.

    python -m benchmarks.evidence.in_the_loop [--only NAME] [--write]

Legend: K passes of the critic over a batch, M mini-batches of a pass.

Notable:
- Each row is a whole run of `configs/demo/sao.toml`, three steps of 32 rollouts, started by the command line.
- Two witnesses: `value/moved/<part>` of the run's metrics and, where parts must stay, the critic that `counterpoint
  export` makes of the last commit, compared bit for bit with the model it started from.
- The head starts random rather than zero: a zero head passes no gradient down, and the first step could move nothing
  but itself.
- Runs that are complete in runs/evidence/in_the_loop/ are not repeated.
- Exits with 1 if a row is not as it must be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.evidence.common import table
from benchmarks.evidence.recorded import ROOT, RUNS, cli
from benchmarks.timing import machine
from services.config.context import load_run
from services.training.movement import PARTS, part_of

RESULT = ROOT / "benchmarks" / "results" / "in_the_loop.md"
STEPS, BATCH = 3, 32
COMMON = {
    "orchestrator.max_steps": STEPS,
    "orchestrator.batch_size": BATCH,
    "orchestrator.max_concurrent_rollouts": BATCH,
    "checkpoint.interval_steps": STEPS,
    "deployment.num_value_gpus": 1,
    "value.updates_per_batch": 1,
    "value.head.init_std": 0.02,
    "eval": "none",
}
BACKBONE = ("attention", "mlp", "embeddings", "norms")
SEED = 1


@dataclass
class Run:
    """What a finished run left behind."""

    rows: dict[str, list[dict[str, Any]]]
    """metrics by stream, in order"""
    changed: dict[str, tuple[int, int]]
    """of the exported critic's tensors by part: how many differ from the model it started from, and how many there are;
    empty where it was not exported"""
    seconds: float

    def moved(self, part: str) -> list[float]:
        """`value/moved/<part>` of each step; empty where the critic has no such part."""
        return [row[f"value/moved/{part}"] for row in self.rows["critic"] if f"value/moved/{part}" in row]

    def updates(self) -> list[int]:
        """Optimizer updates of the critic after each step."""
        return [row["value/updates"] for row in self.rows["critic"]]


Finding = tuple[str, bool]
"""What was looked at, and whether it is as it must be"""


@dataclass(frozen=True)
class Option:
    """One row."""

    name: str
    settings: dict[str, Any]
    must: Callable[[Run], list[Finding]]
    is_exported: bool = False
    """whether the second witness is asked"""


def moves(run: Run, parts: Sequence[str], *, steps: Sequence[int] = range(STEPS)) -> Finding:
    """Every part moved in each of the steps."""
    moved = all(len(run.moved(part)) == STEPS and all(run.moved(part)[step] > 0 for step in steps) for part in parts)
    return f"{', '.join(parts)} moved in {_steps(steps)}", moved


def stays(run: Run, parts: Sequence[str], *, steps: Sequence[int] = range(STEPS)) -> Finding:
    """Every part moved by exactly 0 in each of the steps."""
    stayed = all(len(run.moved(part)) == STEPS and all(run.moved(part)[step] == 0 for step in steps) for part in parts)
    return f"{', '.join(parts)} moved by exactly 0 in {_steps(steps)}", stayed


def same_bits(run: Run, parts: Sequence[str]) -> Finding:
    """The exported critic has the parts as they were."""
    counts = [run.changed[part] for part in parts]
    words = f"{', '.join(parts)} of the exported critic: {sum(total for _, total in counts)} tensors, all bit-equal"
    return words, all(changed == 0 < total for changed, total in counts)


def other_bits(run: Run, parts: Sequence[str]) -> Finding:
    """In the exported critic every tensor of the parts differs."""
    counts = [run.changed[part] for part in parts]
    words = f"{', '.join(parts)} of the exported critic: {sum(total for _, total in counts)} tensors, none as it was"
    return words, all(changed == total > 0 for changed, total in counts)


def updates(run: Run, expected: Sequence[int]) -> Finding:
    """The critic's own count of optimizer updates."""
    return f"updates after each step {_shown(run.updates())}", run.updates() == list(expected)


def _steps(steps: Sequence[int]) -> str:
    return "every step" if len(steps) == STEPS else f"step {' and '.join(str(step + 1) for step in steps)}"


def _all(run: Run, expected: Sequence[int]) -> list[Finding]:
    return [moves(run, ["head", *BACKBONE]), updates(run, expected)]


def _plain(run: Run) -> list[Finding]:
    return [*_all(run, [1, 2, 3]), (f"{len(run.rows['policy'])} policy steps", len(run.rows["policy"]) == STEPS)]


def _control(run: Run) -> list[Finding]:
    return [stays(run, ["head", *BACKBONE]), same_bits(run, BACKBONE), updates(run, [1, 2, 3])]


def _critic_only(run: Run) -> list[Finding]:
    num_policy = len(run.rows["policy"])
    versions = [row["policy/version"] for row in run.rows["policy"]]
    return [*_all(run, [1, 2, 3]), (f"{num_policy} policy step, to version {_shown(versions)}", versions == [1])]


def _head_only(run: Run) -> list[Finding]:
    return [moves(run, ["head"]), stays(run, BACKBONE, steps=[0, 1]), moves(run, BACKBONE, steps=[2])]


def _frozen(run: Run) -> list[Finding]:
    free = [part for part in BACKBONE if part != "attention"]
    return [
        *(stays(run, ["attention"]), same_bits(run, ["attention"])),
        *(moves(run, ["head", *free]), other_bits(run, free)),
    ]


def _lora(run: Run) -> list[Finding]:
    untouched = ["embeddings", "norms"]
    return [
        *(moves(run, ["head", "adapters"]), stays(run, BACKBONE)),
        *(same_bits(run, untouched), other_bits(run, ["attention", "mlp"])),  # adapters are added in at the export
    ]


def _evpo(run: Run, expected: Callable[[float], bool]) -> list[Finding]:
    fractions = [row.get("evpo/critic_fraction", -1.0) for row in run.rows["credit"]]
    as_expected = len(fractions) == STEPS and all(map(expected, fractions))
    return [*_all(run, [1, 2, 3]), (f"share of baselines that were the critic's {_shown(fractions)}", as_expected)]


def _evpo_batch(run: Run) -> list[Finding]:
    explained = [row["value/explained_variance_at_scoring"] for row in run.rows["critic"]]
    words = f"explained variance at scoring {_shown(explained)}: below the threshold"
    return [*_evpo(run, lambda fraction: fraction == 0), (words, all(ev is not None and ev < 0 for ev in explained))]


def _refreshed(run: Run) -> list[Finding]:
    before = [row["credit/advantage_abs_mean"] for row in run.rows["credit"]]
    after = [row["credit/advantage_abs_mean_refreshed"] for row in run.rows.get("refresh", [])]
    differ = len(after) == STEPS and all(a != b for a, b in zip(after, before, strict=True))
    words = f"mean absolute advantage {_shown(before)}, after scoring again {_shown(after)}"
    return [*_all(run, [1, 2, 3]), (words, differ)]


EVPO = {"algorithm.type": "evpo", "algorithm.alpha": "none"}
OPTIONS = [
    Option("as it is", {}, _plain),
    Option("control", {"value.optim.lr": 0}, _control, is_exported=True),
    Option("K = 2", {"value.updates_per_batch": 2}, lambda run: _all(run, [2, 4, 6])),
    Option("K = 2, M = 2", {"value.updates_per_batch": 2, "value.mini_batches": 2}, lambda run: _all(run, [4, 8, 12])),
    Option("critic only", {"value.warmup.critic_only_steps": 2}, _critic_only),
    Option("head only", {"value.warmup.head_only_updates": 2}, _head_only),
    Option(
        "frozen attention",
        {"value.freeze": '["attention"]', "value.optim.weight_decay": 0.1},
        _frozen,
        is_exported=True,
    ),
    Option("LoRA", {"value.lora.rank": 4}, _lora, is_exported=True),
    Option("refreshed", {"value.refresh": "refreshed"}, _refreshed),
    Option("EVPO, group", EVPO | {"orchestrator.group_size": 4}, lambda run: _evpo(run, lambda f: 0 <= f <= 1)),
    Option("EVPO, batch", EVPO | {"algorithm.scope": "batch"}, _evpo_batch),
    Option(
        "EVPO, batch, low bar",
        EVPO | {"algorithm.scope": "batch", "algorithm.threshold": -100},
        lambda run: _evpo(run, lambda fraction: fraction == 1),
    ),
]


def carry_out(option: Option) -> Run:
    """Run it, unless it has been run, and look at what it left behind."""
    settings = COMMON | option.settings
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    kept = RUNS / "in_the_loop" / f"{hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            kept.write_text(json.dumps(asdict(_run(words, Path(name), is_exported=option.is_exported))))
    return Run(**json.loads(kept.read_text()))


def _run(words: Sequence[str], folder: Path, *, is_exported: bool) -> Run:
    started = time.monotonic()
    run_dir, exported = folder / "run", folder / "critic"
    cli("run", "configs/demo/sao.toml", "--seed", str(SEED), "--run.dir", str(run_dir), *words)
    changed: dict[str, tuple[int, int]] = {}
    if is_exported:
        cli("export", str(run_dir), "--role", "critic", str(exported))
        changed = _changed(Path(load_run(run_dir)[1].model_dir), exported)
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["stream"], []).append(row)
    return Run(rows, changed, time.monotonic() - started)


def _changed(start: Path, exported: Path) -> dict[str, tuple[int, int]]:
    """Tensors by part that differ between two folders, and how many there are."""
    before, after = load_file(start / "model.safetensors"), load_file(exported / "model.safetensors")
    counts = {part: (0, 0) for part in PARTS}
    for name in before.keys() & after.keys():
        changed, total = counts[part_of(name)]
        differs = before[name].tobytes() != after[name].tobytes()
        counts[part_of(name)] = (changed + differs, total + 1)
    return counts


def _shown(numbers: Sequence[float | None]) -> str:
    return " / ".join("-" if number is None else f"{number:.3g}" for number in numbers)


def row_of(option: Option, run: Run) -> list[str]:
    """A line of the table."""
    critic = run.rows["critic"]
    return [
        option.name,
        *(_shown(run.moved(part)) or "" for part in ("head", *BACKBONE, "adapters")),
        _shown([row["value/explained_variance"] for row in critic]),
        _shown([row["value/grad_norm"] for row in critic]),
    ]


def page(rows: list[list[str]], findings: list[list[str]], made_by: str) -> str:
    """The result page."""
    head = ["", "head", *BACKBONE, "adapters", "EV", "gradient norm"]
    settings = [[option.name, _settings(option.settings)] for option in OPTIONS]
    common = _settings(COMMON)
    about = f"Each row is a whole run of `configs/demo/sao.toml`, started by the command line with {common}, and:"
    return f"""# The critic's options in a live run

{textwrap.fill(about, 120, break_long_words=False, break_on_hyphens=False)}

{table(["", "settings"], settings)}

How far each part of the critic moved, relative to its norm (`value/moved/<part>`), its explained variance (EV) before
the step's updates, and its gradient norm; steps 1 / 2 / 3. A 0 is exact.

{table(head, rows)}

What has to be so. "Exported" is the critic that `counterpoint export` makes of the run's last commit, compared with the
model that it started from.

{table(["", "looked at", "as it must be"], findings)}

{textwrap.fill(made_by, 120, break_long_words=False, break_on_hyphens=False)}
"""


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{key} = {value}`" for key, value in settings.items())


def main() -> None:
    """Carry all options out, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[option.name for option in OPTIONS], help="one row")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    if args.only and args.write:
        parser.error("a page needs all rows")
    load, seconds, rows, findings, failed = os.getloadavg()[0], 0.0, [], [], []
    for option in OPTIONS:
        if args.only in (None, option.name):
            run = carry_out(option)
            rows.append(row_of(option, run))
            found = option.must(run)
            findings += [[option.name, words, "yes" if holds else "**no**"] for words, holds in found]
            failed += [f"{option.name}: {words}" for words, holds in found if not holds]
            seconds += run.seconds
            print(" | ".join(rows[-1]), *found, sep="\n", flush=True)
    command = "python -m benchmarks.evidence.in_the_loop --write"
    made_by = f"{machine(command, ('torch', 'transformers', 'peft'), load)} {seconds:.0f} s."
    if args.write:
        RESULT.write_text(page(rows, findings, made_by))
    if failed:
        raise SystemExit("not as it must be:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
