"""The record of rollouts as files: heads say what is where, holes end it, damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.records import MARK, open_record, open_step, path_of, recorded_steps, why_it_ends
from services.wire.errors import CodecError
from services.wire.rollout_files import encode_file
from tests.groups import as_data, make_group


def write(folder: Path, step: int, *, says: int | None = None) -> None:
    groups = [make_group(order=2 * step, seed=step), make_group(order=2 * step + 1, seed=step + 100)]
    step_in_it = step if says is None else says
    data = encode_file(groups, run_id="demo-1", epoch=1, step=step_in_it, policy_version=step)
    path_of(folder, step).write_bytes(data)


def test_any_group_of_any_step_is_read_by_itself(tmp_path: Path) -> None:
    for step in range(3):
        write(tmp_path, step)
    steps = open_record(tmp_path)
    assert [step.header.step for step in steps] == [0, 1, 2]
    assert as_data(steps[2].read(1)) == as_data(make_group(order=5, seed=102))
    assert as_data(steps[0].read(0)) == as_data(make_group(order=0, seed=0))


def test_a_record_ends_at_its_first_hole(tmp_path: Path) -> None:
    for step in (0, 1, 3):
        write(tmp_path, step)
    (tmp_path / "step_x.bin").touch()
    assert len(open_record(tmp_path)) == 2 and list(recorded_steps(tmp_path)) == [0, 1, 3]
    assert open_record(tmp_path / "nowhere") == []


def test_a_damaged_head_a_cut_file_and_a_wrong_name_are_told_by_file(tmp_path: Path) -> None:
    write(tmp_path, 0)
    data = path_of(tmp_path, 0).read_bytes()
    for broken in (data[:5], data[:40], data[:-1], data[:30] + b"\0" + data[31:]):
        path_of(tmp_path, 0).write_bytes(broken)
        with pytest.raises(CodecError, match=r"step_000000.bin: "):
            open_record(tmp_path)
    write(tmp_path, 0, says=4)
    with pytest.raises(CodecError, match="is the file of step 4"):
        open_step(path_of(tmp_path, 0), 0)


@pytest.mark.parametrize("text", ["", "[1]", '{"step": 3}', "\0"])
def test_a_mark_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    assert why_it_ends(tmp_path) == ""
    (tmp_path / MARK).write_text(text)
    assert why_it_ends(tmp_path) == ""
    (tmp_path / MARK).write_text('{"step": 3, "cause": "No space left on device"}')
    assert why_it_ends(tmp_path) == "No space left on device"
