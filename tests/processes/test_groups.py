"""Every case of a real process group as a test of its own; one torchrun a world size runs them all."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.processes import cases

ROOT = Path(__file__).parents[2]
cases.load_all()


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    """What each rank said about each case, empty where all was well."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
            *(str(Path(__file__).with_name("group_worker.py")), str(out)),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        told: dict[str, list[str]] = json.loads(out.read_bytes()) if out.exists() else {}
        if done.returncode != 0:
            told["the whole group"] = [done.stderr[-3000:]]
        return told


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world", "name"), sorted(cases.CASES), ids=lambda part: str(part))
def test_every_rank_of(world: int, name: str) -> None:
    told = results(world)
    assert name in told, f"not run: {told.get('the whole group')}"
    wrong = {rank: text for rank, text in enumerate(told[name]) if text}
    assert not wrong, "\n".join(f"rank {rank}:\n{text}" for rank, text in wrong.items())
    assert "the whole group" not in told, told["the whole group"]
