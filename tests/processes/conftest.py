"""The run that several files look at: started once."""

from __future__ import annotations

import pytest

from tests.runs import ROOT, Finished, run_cli
from tests.spies import Seen, Spy


@pytest.fixture(scope="session")
def watched_sao(tmp_path_factory) -> tuple[Finished, Seen]:
    """SAO on `guess` in several turns, critic on two ranks, policy on one, everybody asking for the run's token; and
    what a spy on the same machine saw meanwhile."""
    run_dir = tmp_path_factory.mktemp("sao") / "run"
    spy = Spy(run_dir)
    config = str(ROOT / "tests" / "processes" / "configs" / "sao.toml")
    try:
        run = run_cli(run_dir, config, "--runtime.token", "always")
    finally:
        spy.close()
    return run, spy.seen


@pytest.fixture(scope="session")
def sao(watched_sao: tuple[Finished, Seen]) -> Finished:
    """That run alone."""
    return watched_sao[0]
