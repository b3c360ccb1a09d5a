"""Parts of a model by their names, as `freeze` and `lora.targets` give them.

Notable:
- Whole components of a dotted path are compared, never substrings: "attention" is not in `post_attention_layernorm`.
- What names alone tell is checked before a run; whether the model has such parts is seen when it is loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from services.config.toml_lines import KeyPath
from services.config.train import PolicyConfig, PolicyLoraConfig, ValueConfig

ATTENTION = frozenset({"attention", "attn", "self_attn", "self_attention", "cross_attn", "linear_attn"})
"""What architectures call the part that a setting calls "attention"."""

PartProblem = tuple[KeyPath, str, str, tuple[KeyPath, ...]]
"""Path, what is wrong, the fix, and further paths that were read."""


def is_part(path: str, name: str) -> bool:
    """Whether the components of `name` appear one after another in `path`.

    Args:
        path: Of a parameter or a layer, as in "model.layers.0.self_attn.q_proj.weight".
        name: One or more dotted components; "attention" stands for any of its usual names.
    """
    have, want = path.split("."), name.split(".")
    return any(
        all(_means(part, component) for part, component in zip(have[start:], want, strict=False))
        for start in range(len(have) - len(want) + 1)
    )


def training_problems(role: str, section: PolicyConfig | ValueConfig, model_path: str) -> Iterator[PartProblem]:
    """What is wrong with `freeze` and `lora` of a role, as far as names alone tell."""
    freeze, targets, lora = (role, "freeze"), (role, "lora", "targets"), section.lora
    yield from _no_names(freeze, section.freeze)
    if lora is None:
        return
    if importlib.util.find_spec("peft") is None:
        yield (role, "lora"), "peft is not installed", "pip install 'counterpoint[lora]', or delete it", ()
    yield from _no_names(targets, lora.targets)
    if not lora.targets:
        yield targets, "no layer is named", 'give ["all-linear"], or names such as "q_proj"', ()
    elif all(any(is_part(target, name) for name in section.freeze) for target in lora.targets):
        fix = f"name other layers, or shorten {role}.freeze"
        yield targets, f"{role}.freeze holds all of them", fix, (freeze,)
    if isinstance(lora, PolicyLoraConfig) and lora.publish == "adapter" and model_path.startswith("dummy:"):
        what = "random weights lie in no file that an engine could add an adapter to"
        yield (role, "lora", "publish"), what, 'give "merged", or a model with weights', (("model", "path"),)


def _no_names(key: KeyPath, names: list[str]) -> Iterator[PartProblem]:
    for name in names:
        if not all(name.split(".")):
            yield key, f"{name!r} is no name of a part", 'give components with dots between, as "layers.0"', ()


def _means(component: str, wanted: str) -> bool:
    return component == wanted or (wanted == "attention" and component in ATTENTION)
