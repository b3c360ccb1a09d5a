"""The whole loop on vLLM: the same command, another engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engines import full_logprobs
from tests.runs import ROOT, Finished, processes_of, read_lines, run_cli

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SAO = str(ROOT / "tests" / "processes" / "configs" / "sao.toml")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Finished:
    """SAO on `guess` in several turns, sampled by vLLM's own server, which asks for the run's token."""
    settings = ("--inference.engine", "vllm", "--runtime.token", "always")
    return run_cli(tmp_path_factory.mktemp("vllm") / "run", SAO, *settings, timeout_s=500)


def test_run_ends_normally_and_leaves_nothing_running(run: Finished) -> None:
    assert run.code == 0, run.output[-3000:]
    assert not processes_of(run.dir)
    assert len(run.rows("policy")) == 4


def test_log_probabilities_agree_with_the_trainer_at_zero_staleness(run: Finished) -> None:
    rows = [row for row in run.rows("policy") if row["policy/mismatch_tokens"] > 0]
    assert rows and max(row["policy/mismatch_max"] for row in rows) < 1e-4


def test_every_span_is_what_its_snapshot_says(run: Finished) -> None:
    """Versions on the engine are those of the snapshots, also around updates in flight."""
    seen = set()
    for trace in read_lines(run.dir / "traces.jsonl"):
        for start, end, version in trace["version_spans"]:
            seen.add(version)
            folder = run.dir / "weights" / f"v{version:06d}" if version else Path(run.context["model_dir"])
            own = full_logprobs(folder, trace["token_ids"][:end])[start - 1 : end - 1]
            assert np.abs(own - np.array(trace["logprobs"][start:end])).max() < 1e-4
    assert 0 in seen and len(seen) > 1
