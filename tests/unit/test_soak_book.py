"""The book of a soak: the newest result counts, books of two machines become one, and a cell that dies is no result."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))  # `scripts` are programs, no package

from soak_book import Book, Row, carry_out

SEED = 3


@dataclasses.dataclass
class Cell(Row):
    name: str
    said: str = ""

    @property
    def key(self) -> str:
        return self.name


def cell(name: str, date: str, **rest) -> dict:
    return dataclasses.asdict(Cell(name, date=date, **rest))


def written(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_newest_result_of_a_cell_counts_and_a_lines_place_only_within_its_minute(tmp_path: Path) -> None:
    lines = [
        cell("a", "2026-11-30 01:00", problems=["x\ny", "z"]),
        cell("a", "2026-11-29 23:59"),
        cell("b", "2026-11-30 01:00"),
        cell("b", "2026-11-30 01:00", said="later"),
    ]
    newest = Book(written(tmp_path / "book", *lines), Cell).newest()
    assert newest["a"].failure == "x / z"
    assert newest["b"].said == "later"


def test_a_line_from_before_machines_were_noted_is_of_the_first_one(tmp_path: Path) -> None:
    (row,) = Book(written(tmp_path / "book", {"name": "a", "date": "2026-11-29 22:22"}), Cell).newest().values()
    assert row.place == (
        "Intel(R) Xeon(R) Processor, 2 cores",
        "Python 3.11.7, torch 2.13.0+cpu, transformers 5.24.0, numpy 2.4.6, pyzmq 27.3.0",
        1,
    )


def test_books_are_merged_once(tmp_path: Path) -> None:
    """A book that was taken along to another machine comes back longer: only what is new is added."""
    old = cell("a", "2026-11-29 22:22")
    del old["machine"]
    own = Book(written(tmp_path / "own", old), Cell)
    foreign = written(tmp_path / "foreign", old, cell("b", "2026-11-30 01:00", machine="16 cores", at_once=5))
    assert [own.merge(foreign), own.merge(foreign)] == [1, 0]
    assert own.newest()["b"].place[::2] == ("16 cores", 5)
    assert own.merge(tmp_path / "absent") == 0


def meet(key: str, seed: int, folder: Path) -> Cell:
    """Returns only once another cell has come: so two run at once, or none ever ends."""
    folder.with_name(f"{folder.name}-came").touch()
    until = time.monotonic() + 30
    while len(list(folder.parent.glob("*-came"))) < 2:
        assert time.monotonic() < until, "no other cell came"
        time.sleep(0.02)
    return Cell(key, said=f"{seed} {folder.name}")


def test_cells_run_at_once_and_say_where(tmp_path: Path) -> None:
    until = time.monotonic() + 60
    rows = dict(carry_out(meet, ["a/1", "b/2"], SEED, tmp_path, jobs=2, until=until))
    assert {key: row.said for key, row in rows.items() if row} == {"a/1": "3 a-1", "b/2": "3 b-2"}
    place = (f"{len(os.sched_getaffinity(0))} cores", 2)
    assert all(row and (row.machine.split(", ")[1], row.at_once) == place and row.seconds > 0 for row in rows.values())


def die(key: str, _seed: int, _folder: Path) -> Cell:
    if key == "dies":
        os._exit(1)
    return Cell(key)


def test_a_cell_that_dies_is_told_and_the_others_are_made(tmp_path: Path) -> None:
    rows = list(carry_out(die, ["dies", "a"], SEED, tmp_path, jobs=1, until=time.monotonic() + 60))
    assert [(key, row is None) for key, row in rows] == [("dies", True), ("a", False)]


def test_no_cell_begins_when_the_time_is_up(tmp_path: Path) -> None:
    assert list(carry_out(die, ["a"], SEED, tmp_path, jobs=1, until=time.monotonic())) == []


def linger(key: str, _seed: int, folder: Path) -> Cell:
    """Leaves its pid, and a word when it is ended in order."""
    folder.mkdir()
    try:
        (folder / "pid").write_text(str(os.getpid()))
        if key == "stays":
            time.sleep(60)
    finally:
        (folder / "ended").touch()
    return Cell(key)


def test_who_stops_listening_ends_the_cells_under_way_in_order(tmp_path: Path) -> None:
    def until_there() -> bool:
        return (tmp_path / "stays" / "pid").is_file() and (tmp_path / "stays" / "pid").read_text() != ""

    results = carry_out(linger, ["stays", "goes"], SEED, tmp_path, jobs=2, until=time.monotonic() + 60)
    assert next(results)[0] == "goes"
    ends = time.monotonic() + 30
    while not until_there():
        assert time.monotonic() < ends
        time.sleep(0.02)
    results.close()
    assert (tmp_path / "stays" / "ended").is_file()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "stays" / "pid").read_text()), 0)
