"""The layers of a configuration: TOML files left to right, then `--section.key value`; and where each value came from.

Notable:
- Tables merge key by key, arrays (of tables or of values) replace; `none` on the command line drops a key or a table.
- A command line value is read as TOML, and as plain text where that fails: `--run.name demo` needs no quotes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.config.toml_lines import KeyPath, dotted, key_lines
from services.wire.errors import UsageError

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where, and what to do."""

    where: str
    """file:line, or "command line"."""
    path: KeyPath
    what: str
    fix: str

    def __str__(self) -> str:
        key = f"{dotted(self.path)}: " if self.path else ""
        return f"{self.where}: {key}{self.what}; fix: {self.fix}"


@dataclass
class Layers:
    """What the layers say together."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    fallback: str = COMMAND_LINE
    """Where a problem without a place of its own is said to be."""
    raw_texts: dict[KeyPath, str] = field(default_factory=dict)
    """Command line values as they were typed."""

    def where(self, path: KeyPath) -> str:
        """Origin of a path, or of the nearest table above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.fallback

    def drop(self, path: KeyPath) -> None:
        """Remove a value and everything known about it."""
        parent = self.parent(path)
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
        elif isinstance(parent, list) and isinstance(path[-1], int) and path[-1] < len(parent):
            parent.pop(path[-1])
        self._forget(path)

    def parent(self, path: KeyPath) -> Any:
        """The table or array that holds `path`; None where there is none."""
        node: Any = self.data
        for part in path[:-1]:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                return None
        return node

    def add_file(self, path: Path) -> None:
        """Merge one TOML file over what is there."""
        if self.fallback == COMMAND_LINE:
            self.fallback = f"{path}:1"
        text = ""
        try:
            text = path.read_bytes().decode()
            data = tomllib.loads(text)
        except OSError as error:
            self.problems.append(
                Problem(f"{path}:1", (), f"cannot be read: {error.strerror}", "name a file that exists")
            )
            return
        except UnicodeDecodeError as error:
            self.problems.append(Problem(f"{path}:1", (), f"is not UTF-8: {error.reason}", "save it as UTF-8"))
            return
        except tomllib.TOMLDecodeError as error:
            self.problems.append(_syntax_problem(path, text, error))
            return
        places = {key: f"{path}:{line}" for key, line in key_lines(text).items()}
        self._merge(self.data, data, (), places)

    def add_override(self, key: str, text: str) -> None:
        """Set one value from the command line."""
        path: KeyPath = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        node: Any = self.data
        for length, part in enumerate(path[:-1], 1):
            if isinstance(node, dict) and isinstance(part, str) and part not in node and text != "none":
                node[part] = {}
                self.origins.setdefault(path[:length], COMMAND_LINE)
            node = _child(node, part)
        last, value = path[-1], _read_value(text)
        if text == "none":
            self.drop(path)
            return
        self._forget(path)
        if not _put(node, last, value):
            what = f"there is no table {dotted(path[:-1])} to set it in"
            self.problems.append(Problem(COMMAND_LINE, path, what, "check the key, or set the table in the file"))
            return
        self._record(path, value, {path: COMMAND_LINE})
        self.raw_texts[path] = text

    def _merge(self, target: dict[str, Any], source: dict[str, Any], path: KeyPath, places: dict[KeyPath, str]) -> None:
        for key, value in source.items():
            here = (*path, key)
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                if here in places:
                    self.origins[here] = places[here]
                self._merge(target[key], value, here, places)
                continue
            self._forget(here)
            target[key] = value
            self._record(here, value, places)

    def _record(self, path: KeyPath, value: Any, places: dict[KeyPath, str]) -> None:
        """Note the origin of everything at and below `path`."""
        self.origins |= {known: place for known, place in places.items() if known[: len(path)] == path}
        for leaf, _ in leaves(value, path):
            for length in range(len(leaf), 0, -1):
                if leaf[:length] in places:
                    self.origins[leaf] = places[leaf[:length]]
                    break

    def _forget(self, path: KeyPath) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Walk through tables and arrays of tables down to the values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def parse_overrides(args: list[str]) -> list[tuple[str, str]]:
    """Pair up `--section.key value` and `--section.key=value`.

    Raises:
        UsageError: A key without a value, or a word that is no key.
    """
    pairs, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise UsageError(f"unexpected argument {word!r}; settings are written --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise UsageError(f"--{key} needs a value")
            value = rest.pop(0)
        pairs.append((key, value))
    return pairs


def _child(node: Any, part: str | int) -> Any:
    try:
        return node[part]
    except (KeyError, IndexError, TypeError):
        return None


def _put(node: Any, key: str | int, value: Any) -> bool:
    """Set a value in a table or an existing place of an array; False where neither is there."""
    if isinstance(node, dict) and isinstance(key, str):
        node[key] = value
        return True
    if isinstance(node, list) and isinstance(key, int) and key < len(node):
        node[key] = value
        return True
    return False


def _read_value(text: str) -> Any:
    try:
        data = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return data["value"] if set(data) == {"value"} else text


def _syntax_problem(path: Path, text: str, error: tomllib.TOMLDecodeError) -> Problem:
    found = re.search(r"\(at line (\d+), column \d+\)", str(error))
    line = int(found.group(1)) if found else text.count("\n") + 1
    what = re.sub(r" \(at .*\)$", "", str(error))
    return Problem(f"{path}:{line}", (), f"not TOML: {what[:1].lower()}{what[1:]}", "mend the syntax of this line")
