"""Does it learn: SAO, PPO and GRPO on `add`, several seeds, each beside a control at learning rate 0.

Runs whole systems one after another by the command line and writes the table to benchmarks/results/learning.md.

    python -m benchmarks.learning              # all: about an hour on two cores
    python -m benchmarks.learning --only sao --seeds 1

Runs that are complete in runs/learning/ are not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "learning"
RESULT = Path(__file__).parent / "results" / "learning.md"
SEEDS = {"sao": [1, 2, 3, 4, 5], "ppo": [1, 2, 3], "grpo": [1, 2, 3]}
CONTROL = ("--policy.optim.lr", "0", "--value.optim.lr", "0")


@dataclass
class Outcome:
    """What one run's metrics say."""

    first: float
    last: float
    accuracy: tuple[float, float]
    explained_variance: float | None
    staleness: float
    seconds: float
    steps: int

    @property
    def gain(self) -> float:
        """Mean reward of the last tenth minus the first."""
        return self.last - self.first


def arguments(algorithm: str, seed: int, control: bool) -> list[str]:
    """Command line of one run."""
    lr = [] if not control else list(CONTROL if algorithm != "grpo" else CONTROL[:2])
    name = f"{algorithm}-{seed}" + ("-control" if control else "")
    config = f"configs/demo/{algorithm}.toml"
    return ["run", config, "--seed", str(seed), "--run.dir", f"runs/learning/{name}", *lr, "--overwrite"]


def carry_out(algorithm: str, seed: int, control: bool) -> Outcome:
    """Run, unless it has been run, and read the outcome."""
    argv = arguments(algorithm, seed, control)
    run_dir = ROOT / argv[5]
    seconds_file = run_dir / "seconds"
    if not seconds_file.exists():
        print(f"{time.strftime('%H:%M:%S')} counterpoint {' '.join(argv)}", flush=True)
        started = time.monotonic()
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with run_dir.with_suffix(".out").open("wb") as out:
            code = subprocess.run(
                [sys.executable, "-m", "services.launch", *argv], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            ).returncode
        if code != 0:
            raise SystemExit(f"exit code {code}: see {run_dir.with_suffix('.out')}")
        seconds_file.write_text(f"{time.monotonic() - started:.0f}")
        shutil.rmtree(run_dir / "weights", ignore_errors=True)
    return read(run_dir, float(seconds_file.read_text()))


def read(run_dir: Path, seconds: float) -> Outcome:
    """The outcome from `metrics.jsonl`."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rollout = [row for row in rows if row["stream"] == "rollout"]
    rewards = np.array([row["reward/mean"] for row in rollout])
    tenth = max(1, len(rewards) // 10)
    critic = [row["value/explained_variance"] for row in rows if row["stream"] == "critic"][-tenth:]
    defined = [ev for ev in critic if ev is not None]
    evaluations = [row["eval/add/accuracy"] for row in rows if row["stream"] == "eval"]
    return Outcome(
        first=float(rewards[:tenth].mean()),
        last=float(rewards[-tenth:].mean()),
        accuracy=(evaluations[0], evaluations[-1]),
        explained_variance=float(np.mean(defined)) if defined else None,
        staleness=float(np.mean([row["rollout/staleness"] for row in rollout])),
        seconds=seconds,
        steps=len(rollout),
    )


def row_of(algorithm: str, seed: int, control: bool, outcome: Outcome) -> str:
    """One line of the table."""
    variance = "-" if outcome.explained_variance is None else f"{outcome.explained_variance:+.2f}"
    before, after = outcome.accuracy
    return (
        f"| {algorithm} | {seed} | {'control, lr 0' if control else ''} | {outcome.first:.3f} | {outcome.last:.3f} "
        f"| {outcome.gain:+.3f} | {variance} | {before:.2f} -> {after:.2f} | {outcome.staleness:.2f} "
        f"| {outcome.seconds:.0f} |"
    )


def write(lines: list[str]) -> None:
    """The result page, rewritten after every run."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    head = f"""# Learning on `add`

Reward is the sampled exact match on one-digit addition at temperature 1. "First" and "last" are means over the first
and the last tenth of the steps; explained variance is the mean over the last tenth; accuracy is greedy, on all 100
problems, before and after. Each run is a whole system: engine, orchestrator, policy trainer and (but for GRPO) value
service, started by `counterpoint run configs/demo/ALGORITHM.toml --seed SEED`; a control adds
`--policy.optim.lr 0 --value.optim.lr 0`. Seconds are wall time, with whatever else the machine was doing.

Command: `python -m benchmarks.learning`. Date: {time.strftime("%Y-%m-%d")}. Machine: {platform.machine()}, 2 cores,
no accelerator. Python {platform.python_version()}, {packages}.

| algorithm | seed | | first | last | gain | explained variance | greedy accuracy | staleness | seconds |
|---|---|---|---|---|---|---|---|---|---|
"""
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(head + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SEEDS), help="one algorithm")
    parser.add_argument("--seeds", type=int, help="how many seeds (default: 5 for sao, 3 for the others)")
    args = parser.parse_args()
    algorithms = [args.only] if args.only else list(SEEDS)
    jobs = [(a, seed, control) for a in algorithms for seed in SEEDS[a][: args.seeds] for control in (False, True)]
    outcomes: dict[tuple[str, int, bool], Outcome] = {}
    # what learns comes first, with one control each; the other controls say the same again
    for job in sorted(jobs, key=lambda job: job[2] and job[1] != SEEDS[job[0]][0]):
        outcomes[job] = carry_out(*job)
        print(row_of(*job, outcomes[job]), flush=True)
        write([row_of(*job, outcomes[job]) for job in jobs if job in outcomes])


if __name__ == "__main__":
    main()
