"""Write deploy/constraints.txt: the exact versions of everything that the images install, as this environment has them.

    python scripts/pin_dependencies.py [--out FILE]

Notable:
- What the project and the extras named below need, directly or not; nothing of the tools of development.
- A local version (`2.13.0+cpu`) is pinned by its public part: which build of torch an image gets is the image's choice.
- Packages that only a CUDA build of torch asks for are not here: torch pins each of them exactly.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("lora", "router")
HEADER = "# What the images install. Made by scripts/pin_dependencies.py from an environment that passed the tests.\n"


def pins(project: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Version of every distribution that a project needs, by normalised name; its own is left out.

    Raises:
        PackageNotFoundError: one that is needed here is not installed.
    """
    found: dict[str, str] = {}
    waiting = [(project, extras)]
    while waiting:
        name, wanted = waiting.pop()
        for text in distribution(name).requires or []:
            need = Requirement(text)
            environments = [{**default_environment(), "extra": extra} for extra in ("", *wanted)]
            if need.marker is not None and not any(need.marker.evaluate(each) for each in environments):
                continue
            key = re.sub(r"[-_.]+", "-", need.name).lower()
            if key not in found:
                found[key] = distribution(need.name).version.partition("+")[0]
                waiting.append((need.name, tuple(need.extras)))
    return dict(sorted(found.items()))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "deploy" / "constraints.txt", help="the file")
    args = parser.parse_args()
    try:
        found = pins("counterpoint", EXTRAS)
    except PackageNotFoundError as error:
        sys.stderr.write(f"{error.name} is not installed here; `make install` first\n")
        return 69
    args.out.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in found.items()))
    sys.stdout.write(f"{len(found)} packages in {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
