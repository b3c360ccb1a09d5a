"""Where each key of a TOML file stands: a small scanner, because TOML parsers keep no line numbers.

Notable:
- It runs only on text that tomllib has accepted, so it follows structure and never judges it.
- Arrays of tables appear as paths with an index: `("env", 0, "type")`. Keys inside inline tables are not listed; the
  line of the nearest listed parent is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Print a path: `("env", 0, "type")` as `env[0].type`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def key_lines(text: str) -> dict[KeyPath, int]:
    """Find the line (from 1) of every table header and key of a valid TOML document."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    value = _Value()
    for number, line in enumerate(text.split("\n"), 1):
        if value.is_open:
            value.feed(line)
            continue
        body = line.strip()
        if not body or body.startswith("#"):
            continue
        if body.startswith("[["):
            header = _indexed(_parse_key(body[2:])[0], counts)
            counts[header] = counts.get(header, 0) + 1
            lines.setdefault(header, number)
            prefix = (*header, counts[header] - 1)
            lines[prefix] = number
        elif body.startswith("["):
            prefix = _indexed(_parse_key(body[1:])[0], counts, last=True)
            lines.setdefault(prefix, number)
        else:
            parts, end = _parse_key(body)
            for length in range(1, len(parts) + 1):
                lines.setdefault((*prefix, *parts[:length]), number)
            value.feed(body[end + 1 :])
    return lines


def _indexed(parts: list[str], counts: dict[KeyPath, int], *, last: bool = False) -> KeyPath:
    """Insert the current index behind every part that is an array of tables."""
    path: KeyPath = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        if path in counts and (last or position < len(parts) - 1):
            path = (*path, counts[path] - 1)
    return path


def _parse_key(text: str) -> tuple[list[str], int]:
    """Split a dotted key, quoted parts included; also returns the position of the `=` or `]` behind it."""
    parts, current, position = [], "", 0
    while position < len(text):
        char = text[position]
        if char in "\"'":
            end = position + 1
            while text[end] != char:
                end += 2 if text[end] == "\\" and char == '"' else 1
            current += text[position + 1 : end]
            position = end
        elif char == ".":
            parts.append(current)
            current = ""
        elif char in "=]":
            break
        elif not char.isspace():
            current += char
        position += 1
    return [*parts, current], position


@dataclass
class _Value:
    """How far a value that may span lines has come."""

    depth: int = 0
    quote: str = ""
    """The triple quote that is open."""

    @property
    def is_open(self) -> bool:
        return bool(self.quote) or self.depth > 0

    def feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            advance = self._in_triple if self.quote else self._outside
            position = advance(text, position)

    def _in_triple(self, text: str, position: int) -> int:
        if text[position] == "\\" and self.quote == '"""':
            return position + 2
        if text.startswith(self.quote, position):
            end = position + 3
            while text[end : end + 1] == self.quote[0]:  # a string may end in quotes of its own
                end += 1
            self.quote = ""
            return end
        return position + 1

    def _outside(self, text: str, position: int) -> int:
        char = text[position]
        if char == "#":
            return len(text)
        if text.startswith(('"""', "'''"), position):
            self.quote = text[position : position + 3]
            return position + 3
        if char in "\"'":
            end = position + 1
            while text[end] != char:
                end += 2 if text[end] == "\\" and char == '"' else 1
            return end + 1
        self.depth += (char in "[{") - (char in "]}")
        return position + 1
