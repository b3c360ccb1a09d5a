"""Resume equivalence of every algorithm: on one record, 2N steps equal N steps, a kill, and N more, bit for bit.

    python scripts/soak_replay.py [ALGORITHM ...] [--dir DIR]

Notable:
- Records one small run, then replays it under each algorithm three times: whole; ended on the way; resumed.
- Every other algorithm is ended by SIGKILL to the launcher after a commit, the others by SIGKILL to the orchestrator
  within one. Twenty starts or so, a third of a minute each; exit 0 only if nothing differs anywhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `tests` is no package that is installed

from tests.replays import (  # noqa: E402
    CONFIG,
    SETTINGS,
    differences,
    kill_launcher_after_commit,
    random_state_differences,
    run_replay,
)
from tests.runs import Finished, run_cli  # noqa: E402

STEP = 6
"""of the last commit of CONFIG"""
EXIT_DIFFERS = 70


def ended(run: Finished, what: str) -> Finished:
    """The run, if it ended well."""
    if run.code != 0:
        raise SystemExit(f"{what} ended with {run.code}:\n{run.output[-2000:]}")
    return run


def compare(name: str, source: Path, folder: Path, *, kills_launcher: bool) -> list[str]:
    """Whole against cut and resumed; what differs."""
    words = SETTINGS[name]
    whole = ended(run_replay(source, folder / f"{name}-whole", *words), f"{name}, whole")
    cut = folder / f"{name}-cut"
    if kills_launcher:
        kill_launcher_after_commit(source, cut, 2, *words)
    else:
        died = run_replay(source, cut, *words, fault="commit:before-marker@2:kill")
        assert died.code != 0, "the fault did not strike"
    resumed = ended(run_replay(source, cut, *words, "--resume"), f"{name}, resumed")
    return [*differences(whole.dir, resumed.dir, step=STEP), *random_state_differences(resumed.dir, 2, STEP)]


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--dir", type=Path, help="where to run (default: a new temporary folder)")
    args = parser.parse_args()
    folder = args.dir or Path(tempfile.mkdtemp(prefix="soak-replay-"))
    folder.mkdir(parents=True, exist_ok=True)
    recorded = ended(run_cli(folder / "recorded", str(ROOT / CONFIG)), "the run to be recorded")
    failed = False
    for number, name in enumerate(args.algorithms):
        started = time.monotonic()
        found = compare(name, recorded.dir, folder, kills_launcher=number % 2 == 1)
        failed = failed or bool(found)
        verdict = "equal bit for bit" if not found else f"{len(found)} differences, the first: {found[0]}"
        print(f"{name:<14}{verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    return EXIT_DIFFERS if failed else 0


if __name__ == "__main__":
    sys.exit(main())
