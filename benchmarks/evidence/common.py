"""What the evidence scripts share: a claim and its checks, medians over seeds, the page, the picture and the index.

    python -m benchmarks.evidence.common       # rebuilds the index, benchmarks/results/evidence/README.md

Legend: S seeds, X points of a curve.

Notable:
- A script measures and says which checks hold; the verdict follows from them, and no number of a page is typed in.
- "in part" is a verdict like the others: what does not reproduce stands on the page beside what does.
- Pictures are left out of a quick run, and a quick run writes nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.timing import machine

RESULTS = Path(__file__).parents[1] / "results" / "evidence"
INDEX = RESULTS / "README.md"
MAX_PICTURE_BYTES = 60_000
COLORS = 128
STYLES = ("-", "--", "-.", ":")
"""Of lines one after the other: where two are one, both are seen."""
PACKAGES = ("numpy", "torch")
WIDTH = 120
VERDICT = re.compile(r"^\*\*Reproduced: (yes|no|in part)\.\*\* (.+?)\n\n", re.M | re.S)
"""The paragraph of a page that the index is made from."""


@dataclass(frozen=True)
class Claim:
    """What somebody says."""

    says: str
    source: str
    """a paper's arXiv id and where in it, or "own" for a warning of ours"""


@dataclass(frozen=True)
class Check:
    """One thing that has to be so."""

    criterion: str
    measured: str
    holds: bool
    limits: bool = False
    """a limit of the claim that is to be shown beside it; without weight in the verdict"""


@dataclass(frozen=True)
class Line:
    """One curve: its median over seeds, and the range as a band."""

    label: str
    xs: Sequence[float]  # [X]
    runs: np.ndarray  # [S, X]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    y_range: tuple[float, float] | None = None
    x_log: bool = False
    """ticks are then the points themselves"""
    x_names: Sequence[str] = ()
    """[X] what stands at the points 0, 1, .. instead of numbers"""
    y_log: bool = False


@dataclass(frozen=True)
class Page:
    """All that a page says but for where and when it was made."""

    name: str
    """file name without its end: "E1" """
    title: str
    claim: Claim
    setting: str
    tables: Sequence[str]
    checks: Sequence[Check]
    sentence: str
    """the verdict in one sentence, with its numbers"""
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    """what the claim's reader should know besides: one bullet each"""


Experiment = Callable[[Sequence[int], bool], Page]
"""(seeds, quick) to the page; a quick one is for a look, with a tenth of the work"""


def over_seeds(numbers: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """Median and range: "0.97 [0.96, 0.98]"."""
    array = np.asarray(numbers, dtype=np.float64)
    # "z": no minus before what rounds to zero; it stands after the sign
    sign = form[:1] if form[:1] in "+- " else ""
    form = f"{sign}z{form[len(sign) :]}"
    middle, low, high = (format(x, form) for x in (np.median(array), array.min(), array.max()))
    return f"{middle} [{low}, {high}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def verdict(checks: Sequence[Check]) -> str:
    """Of the claim: yes where all of its checks hold, no where none does, else in part."""
    holds = [check.holds for check in checks if not check.limits]
    return "yes" if all(holds) else "in part" if any(holds) else "no"


def page_text(page: Page, seeds: Sequence[int], made_by: str) -> str:
    """The page in Markdown.

    Args:
        page: What was found.
        seeds: What it was found with.
        made_by: Command, date, machine and versions.
    """
    picture = [f"![{page.title}]({page.name}.png)\n\nLines are medians over the seeds, bands their range."]
    rows = [
        [("limit: " if check.limits else "") + check.criterion, check.measured, "yes" if check.holds else "no"]
        for check in sorted(page.checks, key=lambda check: check.limits)
    ]
    parts = [
        f"# {page.name}: {page.title}",
        _filled(f"**Reproduced: {verdict(page.checks)}.** {page.sentence}"),
        _filled(f"**Claim.** {page.claim.says} Source: {page.claim.source}."),
        _filled(f"**Setting.** {page.setting}"),
        _filled(f"Seeds: {', '.join(map(str, seeds))}. Numbers are medians over them, with the range in brackets."),
        table(["what has to be so", "measured", "holds"], rows),
        *page.tables,
        *(picture if page.panels else []),
        *(["\n".join(_filled(f"- {note}", indent="  ") for note in page.notes)] if page.notes else []),
        _filled(made_by),
    ]
    return "\n\n".join(parts) + "\n"


def write_page(path: Path, page: Page, seeds: Sequence[int], made_by: str) -> None:
    """Write a page, its picture beside it, and the index anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_text(page, seeds, made_by))
    if page.panels:
        plot(path.with_suffix(".png"), page.panels)
    write_index()


def plot(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side.

    Args:
        path: A PNG's.
        panels: One to three of them.

    Raises:
        ValueError: a picture too large for a repository.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(1, len(panels), figsize=(1.0 + 4.2 * len(panels), 3.6), squeeze=False, dpi=90)
    for ax, panel in zip(axes[0], panels, strict=True):
        for index, line in enumerate(panel.lines):
            runs, style = np.asarray(line.runs, dtype=np.float64), STYLES[index % len(STYLES)]  # [S, X]
            (drawn,) = ax.plot(line.xs, np.median(runs, axis=0), style, label=line.label, linewidth=1.6)
            ax.fill_between(line.xs, runs.min(axis=0), runs.max(axis=0), color=drawn.get_color(), alpha=0.18, lw=0)
        ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.x_log:
            ax.set_xscale("log")
            ax.set_xticks(panel.lines[0].xs, [f"{x:g}" for x in panel.lines[0].xs])
            ax.set_xticks([], minor=True)
        if panel.x_names:
            ax.set_xticks(range(len(panel.x_names)), panel.x_names)
        if panel.y_log:
            ax.set_yscale("log")
        if panel.y_range is not None:
            ax.set_ylim(*panel.y_range)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, framealpha=0.85)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    if path.stat().st_size > MAX_PICTURE_BYTES:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, more than {MAX_PICTURE_BYTES}")


def write_index() -> None:
    """All pages with their verdicts, from the pages themselves."""
    rows = []
    for path in sorted(RESULTS.glob("E*.md"), key=_order):
        text = path.read_text()
        found = VERDICT.search(text)
        if found is None:
            raise ValueError(f"{path.name} has no verdict")
        title = text.partition("\n")[0].removeprefix("# ").partition(": ")[2]
        rows.append([f"[{path.stem}]({path.name})", title, found[1], " ".join(found[2].split())])
    head = _filled(
        "Each page says what is claimed and by whom, what was measured on this repository's own code, with which seeds "
        "and by which command. They are toys of seconds to minutes on one core: they show the shape of a claim, not "
        "its size at scale. This index is made from the pages by `python -m benchmarks.evidence.common`."
    )
    title = "# Claims about critics, and what this code shows of them"
    INDEX.write_text(f"{title}\n\n{head}\n\n" + table(["page", "about", "reproduced", "verdict"], rows) + "\n")


def run(doc: str | None, experiments: Sequence[Experiment], *, command: str, num_seeds: int) -> None:
    """A script's main: carry out its experiments, print the pages and, if asked to, write them.

    Args:
        doc: The script's docstring, for --help.
        experiments: One for each page.
        command: As it is to be typed, without options.
        num_seeds: Default number of seeds, 0 up to it.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=num_seeds, help="how many, from 0 on (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a look: a tenth of the work, writes nothing")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.relative_to(RESULTS.parents[2])}")
    args = parser.parse_args()
    if args.write and (args.quick or args.seeds < 3):
        parser.error("a page needs at least 3 seeds and the whole work")
    typed = f"OMP_NUM_THREADS=1 {command} --seeds {args.seeds} --write"
    for experiment in experiments:
        load, started, seeds = os.getloadavg()[0], time.monotonic(), range(args.seeds)
        page = experiment(seeds, args.quick)
        made_by = f"{machine(typed, PACKAGES, load)} {time.monotonic() - started:.0f} s."
        print(page_text(page, seeds, made_by), flush=True)
        if args.write:
            write_page(RESULTS / f"{page.name}.md", page, seeds, made_by)


def _filled(text: str, indent: str = "") -> str:
    """A paragraph, or an item of a list, within the line width; code spans with blanks may be broken."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _order(path: Path) -> tuple[int, str]:
    """E2 before E2b before E10."""
    number = re.match(r"E(\d+)(.*)", path.stem)
    assert number is not None, path
    return int(number[1]), number[2]


if __name__ == "__main__":
    write_index()
