"""Fixtures that several kinds of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The warm-started tiny model of `add`, where runs keep it: made once, by whoever comes first."""
    import sys

    from services.launch.models import MODELS_DIR, model_source

    source = model_source("tiny:add", root=ROOT, models_dir=ROOT / MODELS_DIR, python=sys.executable)
    folder = source.dir
    if not source.is_complete:
        from services.model.tiny import make_tiny

        folder.parent.mkdir(parents=True, exist_ok=True)
        make_tiny(folder, "add", 0)
    return folder
