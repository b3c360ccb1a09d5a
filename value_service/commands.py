"""The critic's own commands as one source: a folder to load goes before requests to score."""

from __future__ import annotations

from typing import Any

from value_service.loader import Loader
from value_service.scorer import Scorer


class CriticCommands:
    """What the critic does besides training."""

    kind = "critic"

    def __init__(self, scorer: Scorer, loader: Loader) -> None:
        self._sources = (loader, scorer)
        self._by_kind = {source.kind: source for source in self._sources}
        self._scorer = scorer

    def pending(self) -> bool:
        """Is there something to do."""
        return any(source.pending() for source in self._sources)

    def next_command(self) -> dict[str, Any]:
        """Take the next one (rank 0 only)."""
        source = next(source for source in self._sources if source.pending())
        return {"kind": self.kind, "command": source.next_command()}

    def execute(self, command: dict[str, Any]) -> None:
        """Run it (every rank)."""
        inner = command["command"]
        self._by_kind[inner["kind"]].execute(inner)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a request may be there (rank 0 only)."""
        self._scorer.wait(timeout_s)
