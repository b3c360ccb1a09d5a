"""What a user finds after a process was killed, at any moment: hundreds of starts, and a page of what became of them.

    python scripts/soak.py [PART ...] [--jobs N] [--only CELL] [--minutes N] [--seed S] [--dir DIR] [--out FILE]
    python scripts/soak.py --merge DIR

Notable:
- Parts: `replays` (resumed equals uninterrupted, bit for bit), `kills` (every process, every phase), `signals` (every
  process told to end).
- Results are kept in DIR, a book a part: the next soak makes the cells that have none, or that failed. The page is
  about all of them, and says where each was made: `--merge` adds the books of another machine.
- With `--time-shared` all roles of the runs take turns. Its results have a folder and a page of their own.
- A cell wants about three cores; `--jobs` makes several at once. It needs the packages, but no installed project.
- Exit 0 only if no cell of this soak failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SHARED_VARIABLE = "COUNTERPOINT_SOAK_SHARED"
"""As in `soak_phases`, which is imported in the processes of cells alone."""
TIME_SHARED = "With `--time-shared`: policy, critic and engine of every run take turns, one of them awake at a time."
sys.path.insert(0, str(ROOT))  # the project and its `tests` need not be installed

from soak_book import Book, Row, carry_out, end_on_sigterm  # noqa: E402

from services.wire.errors import EXIT_BUG, EXIT_DONE  # noqa: E402

PARTS = {"replays": "soak_replay", "kills": "soak_kills", "signals": "soak_signals"}
"""Module of each: its BOOK and kind of ROW, `keys_in_order`, `prepare`, `run`, and its `section` of the page. They are
imported by name, so that a cell's process has no more than its own."""


# ---------------------------------------------------------------------------------------------------------------------
# The page


def module_of(part: str) -> ModuleType:
    """What makes and shows the cells of a part."""
    return importlib.import_module(PARTS[part])


def book_of(part: str, folder: Path) -> Book:
    """Where the results of a part are kept."""
    module = module_of(part)
    return Book(folder / module.BOOK, module.ROW)


def page(folder: Path) -> str:
    """All results in the books of a folder, as Markdown."""
    found = {part: book_of(part, folder).newest() for part in PARTS}
    rows = [row for part in PARTS for row in found[part].values()]
    places = sorted({row.place for row in rows}, key=lambda place: min(r.date for r in rows if r.place == place))
    letters = {place: chr(ord("a") + number) for number, place in enumerate(places)}
    lines = [
        "# What the soak found",
        "",
        *([TIME_SHARED, ""] if SHARED_VARIABLE in os.environ else []),
        "`make soak` starts whole runs, ends processes of them, and looks at what a user finds then. Cells that failed",
        "are made again by the next soak; until then they stand here as failed.",
        "",
        "| where | machine | software | cells at once | cells | failed | dates (UTC) |",
        "|---|---|---|---|---|---|---|",
        *(_place_line(letter, place, [r for r in rows if r.place == place]) for place, letter in letters.items()),
    ]
    for part in PARTS:
        if found[part]:
            lines += ["", *module_of(part).section(found[part], letters)]
    if failures := [f"- {row.key}: {row.failure}" for row in rows if row.problems]:
        lines += ["", "## What failed", "", *failures]
    return "\n".join(lines) + "\n"


def _place_line(letter: str, place: tuple[str, str, int], rows: list[Row]) -> str:
    machine, software, at_once = place
    dates, failed = sorted(row.date for row in rows), sum(bool(row.problems) for row in rows)
    return f"| {letter} | {machine} | {software} | {at_once} | {len(rows)} | {failed} | {dates[0]} to {dates[-1]} |"


# ---------------------------------------------------------------------------------------------------------------------
# The soak


def soak(part: str, args: argparse.Namespace, until: float) -> int:
    """Make the cells of a part that are to be made; returns how many failed."""
    book, module, failed = book_of(part, args.dir), module_of(part), 0
    good = {key for key, row in book.newest().items() if not row.problems}
    keys = [key for key in module.keys_in_order(args.seed) if _is_wanted(key, args.only, good)]
    if not keys or time.monotonic() > until:
        return 0
    module.prepare(args.dir)
    for key, row in carry_out(module.run, keys, args.seed, args.dir, jobs=args.jobs, until=until):
        if row is not None:
            book.add(row)
            args.out.write_text(page(args.dir))
        failed += row is None or bool(row.problems)
        said = "DIED: see above" if row is None else f"FAILED: {row.failure}" if row.problems else f"ok, {row.said}"
        print(f"{part:<9}{key:<28}{0 if row is None else row.seconds:5.0f} s  {said}", flush=True)
    return failed


def _is_wanted(key: str, only: str | None, good: set[str]) -> bool:
    """Named parts of `only` are those of the key; without it, whatever has no good result."""
    if only is None:
        return key not in good
    return all(word in ("", at) for word, at in zip(only.split("/"), key.split("/"), strict=False))


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once (default: 1)")
    parser.add_argument("--only", metavar="CELL", help="PROCESS/PHASE or ALGORITHM; a part may be left out: `/commit`")
    parser.add_argument("--minutes", type=float, default=180.0, help="begin no cell after so many (default: 180)")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the moments and the runs (default: 0)")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="add the books in DIR, write the page, and end")
    parser.add_argument("--time-shared", action="store_true", help="kills and signals in runs whose roles take turns")
    parser.add_argument("--dir", type=Path, help="runs and results (default: runs/soak)")
    parser.add_argument("--out", type=Path, help="the page")
    args = parser.parse_args()
    name = "soak-time-shared" if args.time_shared else "soak"
    args.dir = args.dir or ROOT / "runs" / name
    args.out = args.out or ROOT / "benchmarks" / "results" / f"{name.replace('-', '_')}.md"
    if args.time_shared:
        os.environ[SHARED_VARIABLE] = "1"  # read by the modules of the cells
        args.parts = args.parts or ["kills", "signals"]
    if unknown := {*args.parts} - {*PARTS}:
        parser.error(f"no part: {', '.join(sorted(unknown))}")
    args.dir = args.dir.resolve()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.merge is not None:
        for part in PARTS:
            print(f"{part}: {book_of(part, args.dir).merge(args.merge / module_of(part).BOOK)} added")
        args.out.write_text(page(args.dir))
        return EXIT_DONE
    end_on_sigterm()
    until = time.monotonic() + 60 * args.minutes
    failed = sum(soak(part, args, until) for part in PARTS if not args.parts or part in args.parts)
    return EXIT_BUG if failed else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
