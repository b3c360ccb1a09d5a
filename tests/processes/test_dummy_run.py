"""`make dummy-run`: the dry run of the machinery holds, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.runs import ROOT, processes_of


def test_dry_run_of_the_machinery_holds() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/dummy_run.py"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for said in ("burst", "critic", "policy"):
        assert said in done.stdout.lower()
    assert not processes_of(ROOT / "runs" / "dummy")
