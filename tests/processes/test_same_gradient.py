"""Law 1: a group of two or three ranks computes the gradient that one process computes on the same batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RELATIVE = 1e-5


@pytest.fixture(scope="module", params=[2, 3])
def gradients(request, tiny_model: Path, tmp_path_factory) -> dict:
    """What one torchrun of `param` ranks wrote."""
    out = tmp_path_factory.mktemp("gradients") / f"{request.param}.pt"
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(request.param)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *(str(Path(__file__).with_name("gradient_worker.py")), str(tiny_model), str(out)),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True) | {"told": json.loads(out.with_suffix(".json").read_text())}


@pytest.mark.parametrize("role", ["critic", "policy"])
@pytest.mark.parametrize("other", ["alone", "reference"])
def test_gradient_of_a_group_equals_one_process_and_a_float64_reference(gradients: dict, role: str, other: str) -> None:
    group, single = gradients[role]["group"], gradients[role][other]
    assert group.keys() == single.keys()
    for name, gradient in group.items():
        expected = single[name].double()
        difference = (gradient.double() - expected).norm() / expected.norm().clamp_min(1e-12)
        assert difference < RELATIVE, f"{role} {name}: {difference:.2e}"


@pytest.mark.parametrize("role", ["critic", "policy"])
def test_every_parameter_has_a_gradient(gradients: dict, role: str) -> None:
    assert all(gradient.norm() > 0 for gradient in gradients[role]["group"].values())


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("starved", "received no grid item"),
        ("step", "disagree about step"),
        ("grid", "disagree about grid_digest"),
        ("swapped", "received another rank's item"),
    ],
)
def test_ranks_that_hold_different_grids_are_all_told_alike(gradients: dict, case: str, said: str) -> None:
    told = gradients["told"][case]
    assert len(set(told)) == 1 and said in told[0] and len(told) > 1


def test_ranks_that_hold_the_same_grid_go_on(gradients: dict) -> None:
    assert set(gradients["told"]["agreed"]) == {""}
