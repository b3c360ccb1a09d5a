"""The record of rollouts: one whole file a step, and a full disk that ends the record but not the run."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.recorder import Recorder
from services.runtime.records import MARK, path_of, recorded_steps
from services.wire.rollout_files import decode_file
from tests.groups import as_data, make_group

IDENTITY = {"run_id": "demo-1", "epoch": 1}


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond: the write that would says EFBIG, as a full disk says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def record(recorder: Recorder, *steps: int) -> None:
    for step in steps:
        await recorder.record(step, [make_group(order=2 * step), make_group(order=2 * step + 1)], policy_version=step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_each_step_is_a_file_with_its_groups_in_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rollouts", **IDENTITY)
    await record(recorder, 0, 1)
    assert names(tmp_path / "rollouts") == ["step_000000.bin", "step_000001.bin"]
    header, groups = decode_file((tmp_path / "rollouts" / "step_000001.bin").read_bytes())
    assert (header.run_id, header.epoch, header.step, header.policy_version) == ("demo-1", 1, 1, 1)
    assert as_data(groups) == as_data([make_group(order=2), make_group(order=3)])
    assert recorder.num_bytes == sum(path.stat().st_size for path in (tmp_path / "rollouts").iterdir())


async def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    """Scenario: no room for step 1. Result: the mark says so, and no later step is written although it would fit."""
    folder = tmp_path / "rollouts"
    recorder = Recorder(folder, **IDENTITY)
    await record(recorder, 0)
    with file_size_limit(1000):
        await record(recorder, 1)
    await record(recorder, 2)
    assert names(folder) == [MARK, "step_000000.bin"]
    mark = json.loads((folder / MARK).read_text())
    assert mark["step"] == 1 and "File too large" in mark["cause"]
    assert recorder.num_bytes == path_of(folder, 0).stat().st_size


async def test_without_room_for_the_mark_the_run_goes_on_as_well(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rollouts", **IDENTITY)
    with file_size_limit(10):
        await record(recorder, 0, 1)
    assert names(tmp_path / "rollouts") == []


async def test_a_record_that_cannot_even_have_its_folder_ends(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    recorder = Recorder(tmp_path / "rollouts", **IDENTITY)
    await record(recorder, 0)
    assert recorder.num_bytes == 0


async def test_a_later_start_removes_what_ran_ahead_of_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    await record(Recorder(folder, **IDENTITY), 0, 1, 2, 3)
    (folder / ".step_000004.bin.77.tmp").write_text("half of it")
    again = Recorder(folder, **IDENTITY)
    again.go_on_from(2)
    assert names(folder) == ["step_000000.bin", "step_000001.bin"]
    assert again.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    await record(again, 2)
    assert list(recorded_steps(folder)) == [0, 1, 2]


async def test_a_record_with_a_hole_before_the_commit_stays_ended_and_one_after_it_is_mended(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    first = Recorder(folder, **IDENTITY)
    await record(first, 0)
    with file_size_limit(1000):
        await record(first, 1)
    mended = Recorder(folder, **IDENTITY)
    mended.go_on_from(1)  # the commit is older than the hole
    assert names(folder) == ["step_000000.bin"]
    with file_size_limit(1000):
        await record(mended, 1)
    late = Recorder(folder, **IDENTITY)
    late.go_on_from(2)
    await record(late, 2)
    assert names(folder) == [MARK, "step_000000.bin"]
