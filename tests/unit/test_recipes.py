"""Every recipe resolves: what the repository ships can be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.config.schema import from_toml, to_toml

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*(ROOT / "configs").rglob("*.toml"), *(ROOT / "tests" / "processes" / "configs").glob("*.toml")])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recipe_resolves_and_loads_as_it_was_dumped(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = resolve([path], []).config
    assert from_toml(to_toml(config)) == config
