"""The evidence on claims about critics: every script explains itself and has a page that says how it was made."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.evidence.common import (
    INDEX,
    MAX_PICTURE_BYTES,
    RESULTS,
    VERDICT,
    Check,
    over_seeds,
    verdict,
)

FOLDER = Path(__file__).parents[2] / "benchmarks" / "evidence"
COMMAND = re.compile(r"python -m benchmarks\.evidence\.(\w+)[^`]*--write`")
PAGES = sorted(RESULTS.glob("E*.md"))
SCRIPTS = sorted(
    path for path in FOLDER.glob("*.py") if "common import" in path.read_text() and " run(" in path.read_text()
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def made_by(page: Path) -> str:
    """The script that its command names."""
    found = COMMAND.search(" ".join(page.read_text().split()))
    assert found is not None, f"{page.name} names no command"
    return found[1]


def test_there_are_scripts_and_pages() -> None:
    assert {"credit", "value_losses", "staleness", "explained_variance", "support_edges"} <= {s.stem for s in SCRIPTS}
    assert {"E1", "E2", "E2b", "E5", "E9", "E10"} <= {page.stem for page in PAGES}


@each_script
def test_every_script_has_help_and_a_page(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process, which has other tests to run
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"benchmarks.evidence.{script.stem}", run_name="__main__")
    shown = capsys.readouterr().out
    assert f"benchmarks.evidence.{script.stem}" in shown and "--write" in shown
    assert script.stem in {made_by(page) for page in PAGES}


@each_page
def test_every_page_names_its_command_its_seeds_and_its_verdict(page: Path) -> None:
    text = page.read_text()
    assert (FOLDER / f"{made_by(page)}.py").exists()
    seeds = re.search(r"^Seeds: ([\d, ]+)\.", text, re.M)
    assert seeds is not None and len(set(seeds[1].split(", "))) >= 3
    assert VERDICT.search(text) and "**Claim.**" in text and "**Setting.**" in text and "Date: 2" in text
    for picture in re.findall(r"\]\((.+\.png)\)", text):
        assert 0 < (page.parent / picture).stat().st_size <= MAX_PICTURE_BYTES


@each_page
def test_a_page_s_verdict_is_that_of_its_checks(page: Path) -> None:
    """Limits of the claim have no say in it."""
    text = page.read_text()
    rows = re.findall(
        r"^\| (?!what has|---)(.+) \| (yes|no) \|$", text.partition("| what has to be so")[2].partition("\n\n")[0], re.M
    )
    found = VERDICT.search(text)
    assert rows and found is not None
    assert (
        verdict([Check(what, "", holds == "yes", limits=what.startswith("limit: ")) for what, holds in rows])
        == found[1]
    )


@each_page
def test_every_page_has_a_row_of_the_index(page: Path) -> None:
    found = VERDICT.search(page.read_text())
    assert found is not None
    (row,) = [line for line in INDEX.read_text().splitlines() if line.startswith(f"| [{page.stem}]({page.name}) |")]
    assert f"| {found[1]} |" in row and " ".join(found[2].split()) in row


def test_the_verdict_is_in_part_where_only_some_checks_hold() -> None:
    yes, no = Check("", "", holds=True), Check("", "", holds=False)
    limit = Check("", "", holds=True, limits=True)
    assert [verdict(checks) for checks in ([yes, yes], [yes, no], [no, limit])] == ["yes", "in part", "no"]


def test_medians_stand_before_their_range() -> None:
    assert over_seeds([3.0, 1.0, 2.0]) == "2.00 [1.00, 3.00]"
    assert over_seeds([-0.001, 0.0], ".1f") == "0.0 [0.0, 0.0]"
