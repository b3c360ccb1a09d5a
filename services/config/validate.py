"""From merged layers to a typed config: every schema problem at once, and a best effort to go on with the rest.

Notable:
- A value that does not fit is reported, then dropped so that the remaining checks still run; what was dropped is
  remembered as `broken`, and no check that depends on it says anything.
- Strict types: the text "7" is not the number 7.
"""

from __future__ import annotations

import copy
import difflib
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from services.config.algorithm import AlgorithmConfig
from services.config.base import Section
from services.config.layers import Layers, Problem
from services.config.schema import Config
from services.config.toml_lines import KeyPath, dotted
from services.config.train import ValueLossConfig

ALGORITHMS: dict[str, type[Section]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(AlgorithmConfig)[0])
}
VALUE_LOSSES: dict[str, type[Section]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ValueLossConfig)[0])
}
_TAGGED: dict[tuple[str, ...], dict[str, type[Section]]] = {
    ("algorithm",): ALGORITHMS,
    ("value", "loss"): VALUE_LOSSES,
}
"""Tables whose `type` decides which keys they have."""
_PLACEHOLDERS: dict[str, Any] = {
    "model": {"path": ""},
    "model.path": "",
    "algorithm": {"type": "sao"},
    "algorithm.type": "sao",
    "value.loss.type": "mse",
    "env": [{"type": "add"}],
    "env.type": "add",
    "eval.type": "add",
}
_MAX_ROUNDS = 8
_ELASTIC = re.compile(r"\d+:\d+")


def validate(layers: Layers) -> tuple[Config | None, set[KeyPath]]:
    """Validate `layers.data`, adding to `layers.problems`.

    Returns:
        A config (of what could be used), and the paths that were dropped or filled with placeholders. None where even
        that fails.
    """
    broken: set[KeyPath] = set()
    for _ in range(_MAX_ROUNDS):
        try:
            return Config.model_validate(layers.data, strict=True), broken
        except ValidationError as error:
            # later array items first, so that dropping one leaves the others' indices right
            for detail in sorted(error.errors(include_url=False), key=lambda item: _order(item["loc"]), reverse=True):
                _repair(layers, detail, broken)
    return None, broken


def known_keys() -> list[str]:
    """Every key of the schema, dotted (arrays of tables without an index)."""
    keys: list[str] = []
    _walk(Config, "", keys)
    return keys


def _repair(layers: Layers, detail: Any, broken: set[KeyPath]) -> None:
    path = _clean(detail["loc"])
    kind = detail["type"]
    if kind == "string_type" and path in layers.raw_texts:
        parent = layers.parent(path)
        parent[path[-1]] = layers.raw_texts[path]  # `--run.name 7` means the text
        return
    if kind.startswith("union_tag"):
        path = (*path, "type")
    if path in broken and kind != "missing":
        return
    if kind == "extra_forbidden" and any(
        path[: len(table)] == table and (*table, "type") in broken for table in _TAGGED
    ):
        layers.drop(path)  # nobody knows which keys the table should have
        return
    layers.problems.append(Problem(layers.where(path), path, *_describe(kind, path, detail, layers)))
    if kind != "extra_forbidden":
        broken.add(path)
    name = dotted(tuple(part for part in path if isinstance(part, str)))
    parent = layers.parent(path)
    placeholder = _PLACEHOLDERS.get(name)
    if placeholder is not None and isinstance(parent, dict):
        parent[path[-1]] = copy.deepcopy(placeholder)
    else:
        layers.drop(path)


def _describe(kind: str, path: KeyPath, detail: Any, layers: Layers) -> tuple[str, str]:
    """What is wrong, and the fix."""
    if kind == "extra_forbidden":
        return "unknown key", _suggest(path, layers)
    if path == ("algorithm", "type") or path == ("algorithm",):
        choice = f"choose algorithm.type = {', '.join(ALGORITHMS)}"
        if kind == "union_tag_invalid":
            return f"unknown algorithm {detail['ctx']['tag']!r}", choice
        return "no algorithm is chosen", f"add [algorithm] and {choice}"
    if path == ("value", "loss", "type") and kind.startswith("union_tag"):
        choice = f"choose value.loss.type = {', '.join(VALUE_LOSSES)}"
        if kind == "union_tag_invalid":
            return f"unknown loss {detail['ctx']['tag']!r}", choice
        return "no loss is chosen", choice
    if kind == "missing" or path == ("env",):
        return "required but missing", _how_to_add(path)
    if path[0] == "deployment" and _ELASTIC.fullmatch(str(detail["input"])):
        what = f"{detail['input']} is an elastic size, and groups of ranks have a fixed one"
        return what, "give one number: after the loss of a process the launcher starts the group anew"
    rule = detail["msg"].removeprefix("Input should be ").replace(" or instance of ", ", [")
    if kind == "model_type":
        return f"{_shown(detail['input'])} is not a table", f"write it as [{dotted(path)}]"
    return f"{_shown(detail['input'])} does not fit", f"give {rule}"


def _how_to_add(path: KeyPath) -> str:
    if path == ("env",):
        return "add an [[env]] table with a type"
    if path[0] == "model":
        return '[model] needs path = "FOLDER", "tiny:TASK" or "dummy:CONFIG_DIR"'
    table = dotted(path[:-1])
    return f"add {path[-1]} = ... to {table}" if table else f"add [{path[-1]}]"


def _suggest(path: KeyPath, layers: Layers) -> str:
    names = tuple(part for part in path if isinstance(part, str))
    key = ".".join(names)
    if "kl" in re.split(r"[._]", key) and names[:2] != ("policy", "kl"):
        why = "rewards hold no KL penalty, for the critic trains on them before the policy trainer has seen a token"
        return f"use policy.kl.coef, a penalty in the loss: {why}"
    keys = known_keys()
    for table, kinds in _TAGGED.items():
        if names[: len(table)] == table:  # only the keys of the chosen type
            kind = (layers.parent((*table, "type")) or {}).get("type", "")
            fields = kinds[kind].model_fields if kind in kinds else {}
            owners = [other for other, section in kinds.items() if names[-1] in section.model_fields]
            if owners and kind in kinds and len(names) == len(table) + 1:
                return f"delete it: it belongs to {dotted(table)}.type = {', '.join(owners)}"
            prefix = f"{'.'.join(table)}."
            keys = [name for name in keys if not name.startswith(prefix)] + [prefix + name for name in fields]
    siblings = [name for name in keys if name.rpartition(".")[0] == key.rpartition(".")[0]]
    names_here = {name.rpartition(".")[2]: name for name in siblings}
    close = difflib.get_close_matches(names[-1], names_here, n=1, cutoff=0.7)
    same_name = [name for name in keys if name.rpartition(".")[2] == names[-1]]
    elsewhere = difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
    for guess in (*(names_here[name] for name in close), *same_name, *elsewhere):
        return f"did you mean {guess}? Else delete it"
    choices = ", ".join(name.rpartition(".")[2] for name in siblings)
    return f"delete it, or use one of: {choices}" if choices else "delete it"


def _walk(section: type[Section], prefix: str, keys: list[str]) -> None:
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        for inner in _sections(info.annotation):
            _walk(inner, f"{prefix}{name}.", keys)


def _sections(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _sections(get_args(annotation)[0])
    return [found for inner in get_args(annotation) for found in _sections(inner)]


def _clean(loc: tuple[str | int, ...]) -> KeyPath:
    """Drop the tag of a table's type that pydantic puts into the path."""
    for table, kinds in _TAGGED.items():
        if loc[: len(table)] == table and len(loc) > len(table) and loc[len(table)] in kinds:
            return (*table, *loc[len(table) + 1 :])
    return loc


def _order(loc: tuple[str | int, ...]) -> list[tuple[int, str]]:
    return [(part, "") if isinstance(part, int) else (-1, part) for part in loc]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
