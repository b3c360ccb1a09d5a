"""Shell scripts in the place of SLURM's commands."""

from __future__ import annotations

from pathlib import Path


def put(commands: Path, name: str, script: str) -> None:
    """Let `name` be this script, in a folder of PATH."""
    path = commands / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
