"""Write docs/tested.md: what is tested and how, read from the tests themselves.

    python scripts/tested.py [--check]

Notable:
- A row is a file of tests: the first sentence of its docstring, and how many tests it holds, cases of one counted once.
- Nothing is imported and nothing is run: the files are parsed.
- `--check` writes nothing and ends with 1 where the page is not what it would be; a unit test does the same.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tested.md"
KINDS = {
    "unit": ("In one process", "`make check`", "No process is started but where a row says so."),
    "contract": ("Bytes on the wire", "`make test`", "Compared with recorded ones."),
    "processes": (
        "Real processes",
        "`make test`",
        "torchrun groups on gloo, ZMQ, HTTP, whole runs of the command line.",
    ),
    "faults": ("Faults", "`make test`", "Processes killed and frozen, wires cut, disks full."),
    "slurm": ("SLURM", "`make test`", "Real daemons: a controller and two nodes on loopback."),
    "vllm": ("vLLM", "`make test-vllm`", "vLLM's own server, CPU build."),
    "gpu": ("GPUs", "`pytest tests/gpu`", "Skipped where there is no CUDA device: the only reason to skip a test."),
}


def tests_in(path: Path) -> tuple[str, int]:
    """The first sentence of a file's docstring, and the number of its tests."""
    tree = ast.parse(path.read_text())
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return text.replace("|", "\\|"), sum(node.name.startswith("test_") for node in found)


def page() -> str:
    """The whole page as Markdown."""
    lines = [
        "# What is tested, and how",
        "",
        "Made from the tests by `python scripts/tested.py`. A number counts test functions; many run on several cases.",
        "What takes hours is no test: [the soak](../benchmarks/results/soak.md).",
        "",
    ]
    for kind, (title, command, remark) in KINDS.items():
        files = sorted((ROOT / "tests" / kind).rglob("test_*.py"))
        rows = [(path.relative_to(ROOT / "tests" / kind), *tests_in(path)) for path in files]
        total = sum(number for _, _, number in rows)
        lines += [f"## {title}: {total} by {command}", "", remark, "", "| file | what holds | tests |", "|---|---|---|"]
        lines += [f"| {name} | {text} | {number} |" for name, text, number in rows]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args()
    text = page()
    if args.check:
        return 0 if PAGE.is_file() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    sys.stdout.write(f"{PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
