"""Reading `metrics.jsonl`, and drawing curves as text.

Notable:
- A last line that is still being written is left out.
- A stream's series is ordered by step; a step that appears twice counts as its last row.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Series:
    """One metric over steps."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)

    def first_tenth(self) -> float:
        """Mean over the first tenth of the steps (at least one)."""
        return _mean(self.values[: self._tenth()])

    def last_tenth(self) -> float:
        """Mean over the last tenth of the steps (at least one)."""
        return _mean(self.values[-self._tenth() :])

    def _tenth(self) -> int:
        return max(1, len(self.values) // 10)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """All complete rows of a run's `metrics.jsonl`; empty where there is none yet."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def series(rows: list[dict[str, Any]], stream: str, name: str) -> Series:
    """One metric of one stream, where it is a finite number."""
    points: dict[int, float] = {}
    for row in rows:
        value = row.get(name)
        if row.get("stream") == stream and isinstance(value, int | float) and math.isfinite(value):
            points[row["step"]] = float(value)
    steps = sorted(points)
    return Series(steps, [points[step] for step in steps])


def accuracies(rows: list[dict[str, Any]]) -> dict[str, Series]:
    """Greedy accuracy of every evaluated environment, by its name."""
    names = sorted({key for row in rows if row.get("stream") == "eval" for key in row if key.endswith("/accuracy")})
    return {name.split("/")[1]: series(rows, "eval", name) for name in names}


def chart(data: Series, *, width: int = 64, height: int = 8) -> list[str]:
    """Draw a series as lines of text, axis labels included; each column is the mean of its share of the steps."""
    if not data.values:
        return ["(no data)"]
    columns = _resample(data.values, width)
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    levels = [(value - low) / span * (height - 1) for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{low + span * row / (height - 1):8.3f} " if row in (0, height - 1, height // 2) else " " * 9
        marks = "".join("•" if round(level) == row else " " for level in levels)
        lines.append(f"{label}┤{marks}".rstrip())
    first, last = f"step {data.steps[0]}", f"step {data.steps[-1]}"
    lines.append(f"{'':9}└{'─' * len(columns)}")
    lines.append(f"{'':10}{first}{last:>{max(len(last) + 1, len(columns) - len(first))}}")
    return lines


def sparkline(values: list[float], *, width: int = 32, low: float | None = None, high: float | None = None) -> str:
    """Draw values as one line of bars."""
    if not values:
        return ""
    columns = _resample(values, width)
    bottom = min(columns) if low is None else low
    top = max(columns) if high is None else high
    span = (top - bottom) or 1.0
    scaled = ((min(max(value, bottom), top) - bottom) / span for value in columns)
    return "".join(_BARS[round(level * (len(_BARS) - 1))] for level in scaled)


def _resample(values: list[float], width: int) -> list[float]:
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    return [_mean(values[start:stop]) for start, stop in itertools.pairwise(edges)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
