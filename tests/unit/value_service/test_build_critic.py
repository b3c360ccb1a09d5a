"""The critic that the value service builds from a run directory, with and without `value.init_from`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.config.context import load_run
from services.model.mesh import Mesh
from services.wire.errors import ConfigError
from tests.exports import base_of, commit, critic_of, make_run, state_of
from value_service.build import build_critic


def test_a_run_continues_another_run_s_critic(tmp_path: Path) -> None:
    """Scenario: a run commits, its critic is exported, another run starts from it. Result: the same critic."""
    from services.model.load import load_causal_lm
    from services.training.export_run import export_commit

    base, trained = base_of(tmp_path / "base", "llama"), critic_of(tmp_path / "base")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    make_run(tmp_path / "first", base)
    commit(tmp_path / "first", 5, policy=load_causal_lm(base), critic=trained)
    folder = export_commit(tmp_path / "first", "critic", 5, tmp_path / "critic")
    make_run(tmp_path / "second", base, ("value.init_from", str(folder)))
    _, critic = build_critic(*load_run(tmp_path / "second"), Mesh())
    before, after = state_of(trained), state_of(critic)
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    make_run(tmp_path / "third", base)
    _, fresh = build_critic(*load_run(tmp_path / "third"), Mesh())
    assert not fresh.head.weight.any() and not torch.equal(
        state_of(fresh)["backbone.norm.weight"], before["backbone.norm.weight"]
    )


def test_a_folder_that_changed_after_the_plan_is_refused_at_start(tmp_path: Path) -> None:
    from tests.exports import write_critic

    base = base_of(tmp_path / "base", "llama")
    folder = write_critic(critic_of(base), base, tmp_path / "critic")
    make_run(tmp_path / "run", base, ("value.init_from", str(folder)))
    write_critic(critic_of(base, points=None), base, tmp_path / "other")
    folder.rename(tmp_path / "gone")
    (tmp_path / "other").rename(folder)
    with pytest.raises(ConfigError, match=r"has a head for a scalar, value\.loss wants 5 bins"):
        build_critic(*load_run(tmp_path / "run"), Mesh())
