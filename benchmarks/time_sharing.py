"""Time sharing beside all roles resident on the same devices: memory, what a hand-over costs, and the time of a step.

    python -m benchmarks.time_sharing configs/demo/time_shared.toml [--section.key value ...] [--only time]

Notable:
- Two whole runs of one configuration, `deployment.sharing = "time"` and "none". With one GPU set
  CUDA_VISIBLE_DEVICES=0,0,0: the second run then has its three roles on the same card.
- Device memory is all that nvidia-smi counts on the first card, CUDA contexts included, ten times a second. A phase is
  the time for which a role has the devices; a hand-over is the time between two. On CPU only times are measured.
- A step is the time from one policy row to the next; the first, which warms up, does not count.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import machine

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "time-sharing"
SAMPLE_S = 0.1
GB = 1e9
MIB = 2**20


@dataclass
class Memory:
    """Samples of a card's memory in use, until `stop`."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    """Unix time, bytes"""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while shutil.which("nvidia-smi") and not self._stop.wait(SAMPLE_S):
            done = subprocess.run(query, capture_output=True, text=True)
            if done.returncode == 0:
                self.samples.append((time.time(), int(done.stdout.split()[0]) * MIB))

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join()

    def peak(self, start: float, end: float) -> int:
        """Most bytes in use between two Unix times; 0 where there is no sample."""
        return max((used for at, used in self.samples if start <= at <= end), default=0)


@dataclass
class Outcome:
    """One run."""

    memory: Memory
    rows: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    """hand-overs, in order"""

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        ends = [row["time_s"] for row in self.rows if row["stream"] == "policy"]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    def hand_over_s(self, role: str, word: str) -> float:
        """Median time for which a role fell asleep or woke up; 0 where it never did."""
        key = {"sleep": "before", "wake": "holder"}[word]
        return statistics.median([turn[f"{word}_s"] for turn in self.turns if turn[key] == role] or [0.0])

    def phases(self, role: str) -> list[int]:
        """Peak memory of each time that a role had the devices."""
        return [
            self.memory.peak(begun["time_s"], ended["time_s"] - ended["sleep_s"] - ended["wake_s"])
            for begun, ended in itertools.pairwise(self.turns)
            if begun["holder"] == role
        ]

    def between(self) -> int:
        """Peak memory of all hand-overs."""
        spans = [(turn["time_s"] - turn["sleep_s"] - turn["wake_s"], turn["time_s"]) for turn in self.turns]
        return max((self.memory.peak(start, end) for start, end in spans), default=0)


def carry_out(sharing: str, words: list[str]) -> Outcome:
    """Run to the end, or end with the run's own output."""
    run_dir = RUNS / sharing
    argv = [sys.executable, "-m", "services.launch", "run", *words, "--deployment.sharing", sharing]
    argv += ["--run.dir", str(run_dir), "--overwrite"]
    print(f"{time.strftime('%H:%M:%S')} counterpoint {' '.join(argv[3:])}", file=sys.stderr, flush=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    memory = Memory()
    log = run_dir.with_suffix(".out")
    with log.open("wb") as out:
        code = subprocess.run(argv, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode
    memory.stop()
    if code != 0:
        raise SystemExit(f"exit code {code}:\n{log.read_text()[-6000:]}")
    lines = {name: (run_dir / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "events")}
    rows, events = ([json.loads(line) for line in lines[name]] for name in ("metrics", "events"))
    return Outcome(memory, rows, [event for event in events if event["event"] == "turn"])


def report(shared: Outcome, resident: Outcome | None) -> None:
    """The tables, as Markdown."""
    ends = {
        name: (outcome.memory.peak(0, time.time()) / GB, outcome.step_s)
        for name, outcome in (("in turns", shared), ("all resident", resident))
        if outcome is not None
    }
    print("| roles | peak memory, GB | step, s |\n|---|---|---|")
    for name, (peak, step) in ends.items():
        print(f"| {name} | {peak:.2f} | {step:.2f} |")
    if resident is not None:
        (ours, own_step), (theirs, other_step) = ends.values()
        print(f"| ratio | {ours / theirs if theirs else float('nan'):.2f} | {own_step / other_step:.2f} |")
    columns = ("falls asleep, s", "wakes up, s", "GB that move", "GB that torch keeps asleep", "peak of its phases, GB")
    print(f"\n| role | {' | '.join(columns)} |\n|---|---|---|---|---|---|")
    for role in ("inference", "critic", "policy"):
        moved = [turn.get("wake_bytes", 0) for turn in shared.turns if turn["holder"] == role]
        left = [turn.get("left_bytes", 0) for turn in shared.turns if turn["before"] == role]
        times = " | ".join(f"{shared.hand_over_s(role, word):.2f}" for word in ("sleep", "wake"))
        peak = max(shared.phases(role), default=0)
        sizes = " | ".join(f"{number / GB:.2f}" for number in (max(moved, default=0), max(left, default=0), peak))
        print(f"| {role} | {times} | {sizes} |")
    peaks = [peak for role in ("inference", "critic", "policy") for peak in shared.phases(role)]
    if any(peaks):
        print(f"\nPeak of the hand-overs {shared.between() / GB:.2f} GB; largest phase {max(peaks) / GB:.2f} GB.")


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        sys.exit(__doc__)
    load = os.getloadavg()[0]
    only = "--only" in words
    words = [word for word in words if word not in ("--only", "time")] if only else words
    shared = carry_out("time", words)
    resident = None if only else carry_out("none", words)
    print(machine(f"python -m benchmarks.time_sharing {' '.join(words)}", ["torch", "transformers"], load), "\n")
    report(shared, resident)


if __name__ == "__main__":
    main()
