"""The one ordered resolver: layers, shared values, schema, cross-checks; every problem at once.

    defaults < a.toml < b.toml < --section.key value

Notable:
- Shared values fill what a section leaves unset: `value.optim.lr` takes `policy.optim.lr`, and that 1e-6; `run.name`
  is the first file's stem, `run.dir` is runs/<name>; a job has a longer grace than a run on this machine.
- `Resolved.origins` knows where each value came from; `counterpoint plan --explain` prints it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config.checks import check
from services.config.finding import Finding
from services.config.layers import Layers, Problem, leaves
from services.config.schema import Config
from services.config.toml_lines import KeyPath, dotted
from services.config.validate import validate
from services.wire.errors import ConfigError

DEFAULT_LR = 1e-6
SLURM_GRACE_S = 540.0
"""`runtime.shutdown_grace_s` of a job: what is left of `slurm.signal_lead_s` for a commit, with a minute to spare."""
_OF_A_CRITIC = ("seed", "run", "model", "value", "runtime", "monitor")
"""What a value service reads when it is alone, besides its number of ranks."""
_FOR_A_CRITIC: dict[str, Any] = {"algorithm": {"type": "sao"}, "env": [{"type": "add"}]}
"""Tables that every run needs and a value service alone does not look at."""


@dataclass(frozen=True)
class Resolved:
    """A configuration that can run, and where its values came from."""

    config: Config
    origins: dict[KeyPath, str]
    """For every value that is not a default."""

    def explain(self) -> Iterator[tuple[str, Any, str]]:
        """Every value with its dotted key and its origin."""
        for path, value in leaves(self.config.model_dump(mode="json"), ()):
            yield dotted(path), value, self.origins.get(path, "default")


def resolve(
    paths: Sequence[str | Path], overrides: Sequence[tuple[str, str]] = (), *, only_critic: bool = False
) -> Resolved:
    """Resolve a run's configuration.

    Args:
        paths: TOML files; later ones win.
        overrides: Dotted key and text, as typed after `--`; these win over files.
        only_critic: A value service alone is to start: no other table is needed, and nothing else is checked.

    Raises:
        ConfigError: With one line per problem: `file:line: section.key: what is wrong; fix: what to do`.
    """
    layers = Layers()
    for path in paths:
        layers.add_file(Path(path))
    unreadable = bool(layers.problems)
    for key, text in overrides:
        layers.add_override(key, text)
    _fill_shared(layers, Path(paths[0]).stem if paths else "run")
    if unreadable and not layers.data.keys() & {"model", "algorithm", "env"}:
        raise ConfigError([str(problem) for problem in layers.problems])  # nothing more can be known
    if only_critic:
        _fill_for_critic(layers)
    config, broken = validate(layers)
    if config is not None:
        layers.problems += check(config, layers, broken, about=_is_of_critic if only_critic else lambda finding: True)
    if layers.problems or config is None:
        raise ConfigError(sorted({str(problem): None for problem in layers.problems}, key=_by_place))
    return Resolved(config, layers.origins)


def _fill_for_critic(layers: Layers) -> None:
    for key, table in _FOR_A_CRITIC.items():
        layers.data.setdefault(key, copy.deepcopy(table))
    if isinstance(layers.data.get("deployment"), dict):
        layers.data["deployment"]["kind"] = "local"  # a service that is alone is on this machine
    if "value" not in layers.data:
        what, fix = "there is no critic to serve", "add a [value] table; it may be empty"
        layers.problems.append(Problem(layers.fallback, ("value",), what, fix))


def _is_of_critic(finding: Finding) -> bool:
    paths = (finding.path, *finding.reads)
    return all(path[0] in _OF_A_CRITIC or path == ("deployment", "num_value_gpus") for path in paths)


def _fill_shared(layers: Layers, stem: str) -> None:
    run = _table(layers, "run")
    if run is not None:
        if not run.get("name"):
            run["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", stem)
            layers.origins["run", "name"] = "name of the first file"
        if not run.get("dir"):
            run["dir"] = f"runs/{run['name']}"
            layers.origins["run", "dir"] = "runs/<run.name>"
    deployment = layers.data.get("deployment")
    if isinstance(deployment, dict) and deployment.get("kind") == "slurm":
        runtime = _table(layers, "runtime")
        if runtime is not None and "shutdown_grace_s" not in runtime:
            runtime["shutdown_grace_s"] = SLURM_GRACE_S
            layers.origins["runtime", "shutdown_grace_s"] = 'deployment.kind = "slurm"'
    policy = _table(layers, "policy", "optim")
    if policy is None:
        return
    origin = layers.origins.get(("policy", "optim", "lr"), "default")
    policy_lr = policy.setdefault("lr", DEFAULT_LR)
    if "value" in layers.data:
        value = _table(layers, "value", "optim")
        if value is not None and "lr" not in value and isinstance(policy_lr, int | float):
            value["lr"] = policy_lr
            layers.origins["value", "optim", "lr"] = f"policy.optim.lr ({origin})"


def _table(layers: Layers, *names: str) -> dict[str, Any] | None:
    """The table of that name, made where missing; None where something else stands in its place."""
    node: Any = layers.data
    for name in names:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            return None
    return node


def _by_place(line: str) -> tuple[str, int]:
    found = re.match(r"(.*?):(\d+): ", line)
    return (found.group(1), int(found.group(2))) if found else ("~", 0)
