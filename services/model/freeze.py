"""Which parameters train: parts frozen by name for the whole run, and the head that may train alone at first.

Notable:
- Names are compared by path components (`services.config.parts`); a name that matches nothing is an error, for a typing
  mistake would otherwise train what should have stayed.
- Fused experts (`mlp.experts.gate_up_proj`) are parameters like others: "experts" and "mlp" mean them.
- What is frozen requires no gradient: the optimizer never holds it (no weight decay), the norm never counts it.
- While the head trains alone the backbone still requires gradients: freezing is for good, that phase is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from services.config.parts import ATTENTION, is_part
from services.wire.errors import ConfigError

Role = Literal["policy", "value"]


def freeze(model: nn.Module, names: Sequence[str], *, role: Role) -> list[str]:
    """Let the parts that `names` mean stay as they are; call it before adapters, sharding and optimizer are made.

    A tensor with two names (a tied embedding and output head) is frozen by either of them.

    Args:
        model: The causal model, or a critic's backbone alone; the value head, outside of both, always trains.
        names: Dotted path components each, such as "attention", "mlp", "layers.0".
        role: Whose `freeze` it is.

    Returns:
        Names of the frozen parameters, tied ones under each of their names.

    Raises:
        ConfigError: a name matches nothing, or a policy has nothing left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    unmatched = [name for name in names if not any(is_part(path, name) for path, _ in named)]
    if unmatched:
        known = ", ".join(parts_of([path for path, _ in named]))
        raise ConfigError(
            [
                f'{role}.freeze: "{name}" matches no parameter of {type(model).__name__}; its parts are: {known}'
                for name in unmatched
            ]
        )
    chosen = {id(parameter) for path, parameter in named if any(is_part(path, name) for name in names)}
    if role == "policy" and all(id(parameter) in chosen for _, parameter in named):
        raise ConfigError(["policy.freeze: nothing is left to train; fix: name fewer parts"])
    for _, parameter in named:
        if id(parameter) in chosen:
            parameter.requires_grad_(False)
    return [path for path, parameter in named if id(parameter) in chosen]


def parts_of(paths: Sequence[str]) -> list[str]:
    """Components that name parts of a model, in order of appearance: no layer numbers, no "weight" or "bias"."""
    parts = dict.fromkeys(part for path in paths for part in path.split("."))
    named = [part for part in parts if not part.isdigit() and part not in ("weight", "bias")]
    return ["attention", *named] if ATTENTION & set(named) - {"attention"} else named


def is_head(name: str) -> bool:
    """Whether a critic's parameter is the value head's: what trains alone in the first `head_only_updates`."""
    return name.startswith("head.")
