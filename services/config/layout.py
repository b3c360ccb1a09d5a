"""How a role's GPUs are divided into data, context and expert axes, and what the model must offer for that."""

from __future__ import annotations

from collections.abc import Iterator

from services.config.model_path import model_folder, text_config
from services.config.toml_lines import KeyPath
from services.config.train import TrainModelConfig

TINY_HEADS = 4
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What architectures call the number of experts of a mixture."""

LayoutProblem = tuple[KeyPath, str, str, tuple[KeyPath, ...]]
"""Path, what is wrong, the fix, further paths that it depends on."""


def layout_problems(
    role: str, layout: TrainModelConfig, num_gpus: int, gpus_key: KeyPath, model_path: str
) -> Iterator[LayoutProblem]:
    """What is wrong with cp and ep of `[policy.model]` or `[value.model]`.

    Args:
        role: "policy" or "value".
        layout: The section.
        num_gpus: Of the role.
        gpus_key: Where that is said.
        model_path: `model.path`.
    """
    model_key = ("model", "path")
    for name, degree in (("cp", layout.cp), ("ep", layout.ep)):
        if num_gpus % degree:
            key = ".".join(map(str, gpus_key))
            is_plain = gpus_key[-1] in ("num_policy_gpus", "num_value_gpus")
            what = f"{degree} does not divide " + (
                f"{key} = {num_gpus}" if is_plain else f"the role's {num_gpus} GPUs ({key})"
            )
            yield (role, "model", name), what, f"give a divisor of {num_gpus}, or other GPUs", (gpus_key,)
    heads, experts = _sizes(model_path)
    if heads is not None and heads % layout.cp:
        what = f"{layout.cp} ranks cannot share the model's {heads} attention heads"
        yield (role, "model", "cp"), what, f"give a divisor of {heads}", (model_key,)
    if layout.ep > 1 and experts is not None:
        key = (role, "model", "ep")
        if not experts:
            yield key, "the model has no mixture of experts to divide", "delete it", (model_key,)
        elif experts % layout.ep:
            what = f"{layout.ep} does not divide the model's {experts} experts"
            yield key, what, f"give a divisor of {experts}", (model_key,)


def attention_heads(model_path: str) -> int | None:
    """Heads of the model, where its `config.json` says them; None where unknown."""
    return _sizes(model_path)[0]


def _sizes(model_path: str) -> tuple[int | None, int | None]:
    """Attention heads, and experts of a mixture (0: none), where `config.json` says them; None where unknown."""
    folder = model_folder(model_path)
    if folder is None:
        return TINY_HEADS, 0
    config = text_config(folder)
    if not config:
        return None, None
    heads = config.get("num_attention_heads")
    experts = next((config[key] for key in EXPERT_KEYS if isinstance(config.get(key), int)), 0)
    return heads if isinstance(heads, int) else None, experts
