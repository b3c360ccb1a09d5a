"""Low-rank adapters on a model's linear layers: W + (alpha / r) B A, of which A and B alone train.

Paper: arXiv 2106.09685, eq. 3.
Deviations: A starts Kaiming-uniform, as everywhere in peft, where the paper draws a Gaussian. There is no dropout.

Notable:
- peft puts the adapters into the model in place: it stays the class it was, with its `base_model`, its packed attention
  and its attributes. Only names change: `q_proj.weight` is now `q_proj.base_layer.weight`.
- B starts at zero, so before the first update the model is the base, exactly.
- The base stays in the model untouched: it is the reference of a KL penalty at no cost (`without_lora`).
- Fused experts take adapters where a target names them ("experts"); "all-linear" means linear layers alone.
- peft is imported where it is used: it takes seconds, and a run without adapters does without it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from services.config.parts import is_part
from services.config.train import LoraConfig, PolicyLoraConfig
from services.model.freeze import Role, parts_of
from services.model.head import Critic
from services.wire.errors import ConfigError, ContractError

ALL_LINEAR = "all-linear"
ADAPTER = "default"
"""peft's name for the only adapter."""
_OWN = frozenset({"lora_A", "lora_B"})
"""Path components of an adapter's own parameters."""

State = Mapping[str, torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Adding adapters


def add_lora(
    model: PreTrainedModel, config: LoraConfig, *, frozen: Collection[str], role: Role, seed: int, ep: int = 1
) -> PreTrainedModel:
    """Put adapters into a model, in place, before it is divided and sharded; afterwards they alone require a gradient.

    Args:
        model: The causal model (on meta too), or a critic's backbone alone.
        config: Rank, scale and targets.
        frozen: What takes no adapter: names that `freeze` was given, or parameters that it returned.
        role: Whose `lora` it is.
        seed: Of every A.
        ep: Ranks that the experts will be divided over.

    Returns:
        The same object.

    Raises:
        ConfigError: a target matches no layer, nothing is left to adapt, or the adapters cannot be divided or published
            as asked.
    """
    layers, parameters = choose_targets(model, config, frozen=frozen, role=role)
    if parameters and ep > 1:
        what = f"experts that {role}.model.ep divides take no adapters ({parameters[0]})"
        raise ConfigError([f"{role}.lora.targets: {what}; fix: other targets, or {role}.model.ep = 1"])
    if parameters and isinstance(config, PolicyLoraConfig) and config.publish == "adapter":
        what = f"engines cannot add an adapter of fused experts ({parameters[0]})"
        raise ConfigError([f'policy.lora.publish: {what}; fix: publish = "merged", or other targets'])
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    peft_config = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] - peft only divides it by the rank
        lora_dropout=0.0,
        target_modules=layers,
        target_parameters=parameters or None,
        task_type="FEATURE_EXTRACTION" if model.get_output_embeddings() is None else "CAUSAL_LM",  # pyright: ignore[reportArgumentType]
        base_model_name_or_path=str(model.name_or_path),
    )
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU, whatever the device
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, model, ADAPTER)
    placed = {adapter.parameter for adapter in adapters_of(model)}
    assert placed == {f"{layer}.weight" for layer in layers} | set(parameters), "peft chose other layers"
    return model


def choose_targets(
    model: PreTrainedModel, config: LoraConfig, *, frozen: Collection[str], role: Role
) -> tuple[list[str], list[str]]:
    """Names of the linear layers and of the fused expert parameters that get an adapter.

    Raises:
        ConfigError: see `add_lora`.
    """
    linear, fused = _candidates(model)
    output = model.get_output_embeddings()
    if role == "value":  # a critic reads hidden states: its causal model's output head computes nothing
        linear = {path: layer for path, layer in linear.items() if layer is not output}
    wanted: dict[str, None] = {}
    problems = []
    for target in config.targets:
        if target == ALL_LINEAR:
            found = [path for path, layer in linear.items() if layer is not output]
        else:
            found = [path for path in (*linear, *fused) if is_part(path, target)]
        if not found:
            known = ", ".join(parts_of([*linear, *fused]))
            what = f'"{target}" matches no linear layer of {type(model).__name__}; parts with some are: {known}'
            problems.append(f"{role}.lora.targets: {what}")
        wanted |= dict.fromkeys(found)
    if problems:
        raise ConfigError(problems)
    wanted = {path: None for path in wanted if not _is_frozen(path if path in fused else f"{path}.weight", frozen)}
    if not wanted:
        raise ConfigError([f"{role}.lora.targets: {role}.freeze leaves none of them to adapt; fix: name other layers"])
    embedding = model.get_input_embeddings()
    if any(path in linear and linear[path].weight is getattr(embedding, "weight", None) for path in wanted):
        what = "the output head is tied to the embedding, which has no adapter"
        raise ConfigError([f"{role}.lora.targets: {what}; fix: leave the output head out"])
    return [path for path in linear if path in wanted], [path for path in fused if path in wanted]


def _candidates(model: nn.Module) -> tuple[dict[str, nn.Linear], list[str]]:
    """Linear layers by name, and names of the parameters that hold the weights of several experts `[E, ., .]`."""
    linear: dict[str, nn.Linear] = {}
    fused: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linear[path] = module
        elif not isinstance(module, nn.Conv1d):  # whose kernel [out, in, width] is no stack of matrices
            fused += [f"{path}.{name}" for name, value in module.named_parameters(recurse=False) if value.dim() == 3]
    return linear, fused


def _is_frozen(path: str, frozen: Collection[str]) -> bool:
    return path in frozen or any(is_part(path, name) for name in frozen)


# ---------------------------------------------------------------------------------------------------------------------
# The base alone


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Within, every forward is the base's. Nothing else changes: peft's own switch would also touch `requires_grad`."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model without adapters has no other self"
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


# ---------------------------------------------------------------------------------------------------------------------
# Adapters as tensors


@dataclass(frozen=True)
class Adapter:
    """One adapter of a model: where its tensors are, and how they become a change of the base's weight."""

    path: str
    """of the layer with the adapter, in the adapted model"""
    parameter: str
    """what it changes, in the plain model's names"""
    scale: float
    num_experts: int | None
    """None = a matrix `[out, in]`; else a stack of E matrices"""
    is_transposed: bool
    """whether the stack is `[E, in, out]`, not `[E, out, in]`"""

    def tensors(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """A `[r, in]` and B `[out, r]`, or those of E experts: `[E * r, in]` and `[out, r * E]`."""
        a, b = (state[f"{self.path}.{name}.{ADAPTER}.weight"] for name in ("lora_A", "lora_B"))
        return a, b

    def delta(self, state: State) -> torch.Tensor:
        """The change of the weight, f32, in the weight's shape."""
        a, b = (tensor.float() for tensor in self.tensors(state))
        if self.num_experts is None:
            return self.scale * (b @ a)
        a = a.reshape(self.num_experts, -1, a.shape[1])  # [E, r, in]
        b = b.reshape(b.shape[0], -1, self.num_experts)  # [out, r, E]: peft's order, experts last
        return self.scale * torch.einsum("ore,eri->eio" if self.is_transposed else "ore,eri->eoi", b, a)


def adapters_of(model: nn.Module) -> list[Adapter]:
    """Every adapter of a model, in the order of its layers."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    found = []
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        is_fused = isinstance(module, ParamWrapper)
        name = module.parameter_name if is_fused else "weight"
        found.append(
            Adapter(
                path=path,
                parameter=plain_name(f"{path}.{name}"),
                scale=float(module.scaling[ADAPTER]),
                num_experts=module.num_experts if is_fused else None,
                is_transposed=is_fused and bool(getattr(module.get_base_layer(), "is_transposed", False)),
            )
        )
    return found


def plain_name(name: str) -> str:
    """The name that a parameter of the base has in the plain model."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of the adapted model is an adapter's."""
    return not _OWN.isdisjoint(name.split("."))


def merged_state_dict(state: State, model: nn.Module) -> dict[str, torch.Tensor]:
    """The plain model's state dict, the adapters added in; nothing that comes in is changed.

    Args:
        state: The adapted model's whole state dict, gathered, as plain tensors.
        model: The adapted model: its structure is read, never its (perhaps sharded) numbers.

    Returns:
        Every weight under the name that it has without adapters, in its type; sums are f32.
    """
    merged = {plain_name(name): tensor for name, tensor in state.items() if not is_adapter_name(name)}
    for adapter in adapters_of(model):
        weight = merged[adapter.parameter]
        merged[adapter.parameter] = (weight.float() + adapter.delta(state)).to(weight.dtype)
    return merged


def adapter_files(state: State, model: PreTrainedModel, folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` as peft does; peft and vLLM read them.

    Args:
        state: The adapted model's whole state dict (or its adapters alone), gathered, as plain tensors.
        model: What `add_lora` returned.
        folder: Exists already.
    """
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
        if is_adapter_name(name)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config: Any = copy.copy(model.peft_config[ADAPTER])  # pyright: ignore[reportIndexIssue]
    peft_config.inference_mode = True
    peft_config.target_modules = sorted(peft_config.target_modules)  # a set: the same bytes every time
    peft_config.save_pretrained(folder)


def lora_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that training changes, copied to the CPU: the adapters, and a critic's head with its points."""
    has_head = isinstance(model, Critic)
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in model.state_dict().items()
        if is_adapter_name(name) or (has_head and name.startswith("head."))
    }


@torch.no_grad()
def load_lora_state(model: nn.Module, state: State) -> None:
    """Put back, bit for bit, what `lora_state` took from a model with the same adapters.

    Raises:
        ContractError: a tensor is missing, unknown or of another shape; nothing was replaced.
    """
    own = model.state_dict()
    expected = lora_state(model)
    for problem, names in (("lacks", set(expected) - set(state)), ("has the unknown", set(state) - set(expected))):
        if names:
            raise ContractError(f"the saved adapters' state {problem} {min(names)}")
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            shapes = f"{list(tensor.shape)}, not {list(own[name].shape)}"
            raise ContractError(f"the saved adapters' {name} has shape {shapes}: another rank or another model")
    for name, tensor in state.items():
        own[name].copy_(tensor)
