"""A plan's GPUs are those that the launcher may use, whatever their numbers on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launch.planner import Site
from services.launch.supervisor import site_here


def test_without_a_restriction_gpu_i_is_the_machines() -> None:
    assert Site(Path("/project")).gpu_names([0, 3]) == "0,3"


def test_gpu_i_of_a_plan_is_the_ith_that_the_launcher_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,GPU-7f")

    site = site_here()

    assert site.gpu_names([0]) == "4"
    assert site.gpu_names([1, 2]) == "6,GPU-7f"
    assert site.gpu_names([]) == "", "no GPU is visible to a process that has none"
