"""`orchestrator.schedule`: what goes with "overlap", and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.wire.errors import ConfigError
from services.wire.messages import ROWS_KEPT

BASE = """
model.path = "tiny:add"
algorithm.type = "sao"
[[env]]
type = "add"
max_trace_tokens = 32
[value]
[inference]
max_model_len = 64
"""
OVERLAP = ("orchestrator.schedule", "overlap")


def problems(tmp_path: Path, *settings: tuple[str, str]) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    try:
        resolve([path], list(settings))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("lag", [0, 1, ROWS_KEPT - 1])
def test_overlap_goes_with_a_critic_that_lags_as_far_as_its_status_reaches(tmp_path: Path, lag: int) -> None:
    """So many rows and one more are under way at once, and the critic may finish them all between two looks."""
    assert problems(tmp_path, OVERLAP, ("orchestrator.max_critic_lag", str(lag))) == []


def test_a_lag_that_would_lose_metrics_is_refused_with_the_greatest_that_does_not(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, OVERLAP, ("orchestrator.max_critic_lag", str(ROWS_KEPT)))
    assert "orchestrator.max_critic_lag: 8 is too far behind" in problem and "give at most 7" in problem


def test_a_lag_says_nothing_without_overlap(tmp_path: Path) -> None:
    assert problems(tmp_path, ("orchestrator.max_critic_lag", "100")) == []


def test_refreshed_values_and_overlap_contradict_each_other_by_name(tmp_path: Path) -> None:
    assert problems(tmp_path, ("value.refresh", "refreshed")) == []
    (problem,) = problems(tmp_path, OVERLAP, ("value.refresh", "refreshed"))
    assert "value.refresh: " in problem and 'orchestrator.schedule = "overlap"' in problem
    assert 'fix: give "pre_update", or orchestrator.schedule = "critic_first"' in problem


def test_without_a_critic_there_is_nothing_to_overlap(tmp_path: Path) -> None:
    grpo = [("algorithm.type", "grpo"), ("orchestrator.group_size", "4"), ("value", "none")]
    assert problems(tmp_path, *grpo) == []
    (problem,) = problems(tmp_path, OVERLAP, *grpo)
    assert "orchestrator.schedule: " in problem and "nothing to overlap" in problem and "delete it" in problem


def test_an_algorithm_that_lacks_its_critic_is_the_only_problem_of_it(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, OVERLAP, ("value", "none"))
    assert "algorithm.type: sao needs a critic" in problem
