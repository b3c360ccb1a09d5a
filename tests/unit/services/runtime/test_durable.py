"""Atomic files: old bytes or new ones, no leftovers, and a full disk that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.durable import rename_dir, write_atomic
from services.wire.errors import CannotWrite

ROOT = Path(__file__).parents[4]
LIMITED = """
import resource, signal, sys
from pathlib import Path
from services.runtime.durable import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
write_atomic(Path(sys.argv[1]), b"x" * 5000)
"""


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "first")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_too_large_for_the_disk_leaves_the_old_one_and_no_rest(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert f"CannotWrite: cannot write {path}: File too large" in done.stderr
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_missing_folder_is_cannot_write(tmp_path):
    with pytest.raises(CannotWrite, match="No such file or directory"):
        write_atomic(tmp_path / "absent" / "file", b"")


def test_a_folder_gets_its_name_in_one_step_and_never_over_a_full_one(tmp_path):
    source, target = tmp_path / "part", tmp_path / "whole"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "file").write_text("x")
    rename_dir(source, target)
    assert (target / "inner" / "file").read_text() == "x"
    source.mkdir()
    with pytest.raises(CannotWrite, match="cannot publish"):
        rename_dir(source, target)
