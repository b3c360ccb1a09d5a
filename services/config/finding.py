"""What a cross-check finds, before its line is known."""

from __future__ import annotations

from dataclasses import dataclass

from services.config.toml_lines import KeyPath


@dataclass(frozen=True)
class Finding:
    """A problem, before its line is known."""

    path: KeyPath
    what: str
    fix: str
    reads: tuple[KeyPath, ...] = ()
    """Further paths the check depends on."""
