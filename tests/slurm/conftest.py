"""One SLURM of two nodes for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The daemons; they and their jobs have ended when the session has."""
    folder = Path(tempfile.mkdtemp(prefix="counterpoint-slurm-"))  # short: it holds a socket, and munged reads the path
    started = Cluster(folder)
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)
