"""The causal language model of one role, ready to train: loaded, adapted, frozen in part, divided and sharded.

Notable:
- In this order: freezing, adapters, experts divided over ranks, numbers spread, layers sharded. What the role adds
  around it (a value head, log-probabilities) is sharded last, with whatever lies outside of the layers.
- A single process that computes in float32 shards nothing: its model is the loaded one.
- `skeleton` is the plain architecture on the meta device; snapshots are written through it, so that hub names and
  tied weights are transformers' business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.config.train import PolicyConfig, TrainModelConfig, ValueConfig
from services.model.attention import IMPLEMENTATION
from services.model.experts import choose_experts, divide_experts
from services.model.freeze import Role, freeze
from services.model.load import DTYPES, load_causal_lm
from services.model.lora import add_lora
from services.model.mesh import Mesh
from services.model.shard import Spreader, checkpoint_activations, gather_state, shard_layers, shard_root

Prepare = Callable[[PreTrainedModel], None]


@dataclass(frozen=True)
class Backbone:
    """A causal language model in its layout."""

    model: PreTrainedModel
    skeleton: PreTrainedModel
    """the architecture without numbers, adapters or layout"""
    mesh: Mesh = field(default_factory=Mesh)
    dtype: str = "float32"
    divided: tuple[str, ...] = ()
    """parameters of `model` of which this rank holds its experts only"""

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP holds the parameters."""
        return self.mesh.size > 1 or self.dtype != "float32"

    def complete(self, root: nn.Module, *, methods: tuple[str, ...], exact: tuple[nn.Module, ...] = ()) -> None:
        """Shard the module around this model; call once, before the first forward.

        Args:
            root: Holds `model`, or a part of it, and is what a role calls.
            methods: Its methods that compute with parameters.
            exact: Modules within it that compute in float32, each with a method `outputs`.
        """
        root.to(self.mesh.device)
        if not self.is_sharded:
            return
        shard_root(root, self.mesh, dtype=self.dtype, exact=exact)
        for method in methods:
            register_fsdp_forward_method(root, method)
        for module in exact:
            register_fsdp_forward_method(module, "outputs")

    def gather(self, root: nn.Module, *, wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        """The language model within `root`, whole and by its own names, on rank 0; nothing on the other ranks.

        Args:
            root: What `complete` was given, holding the model as `language_model`.
            wanted: Which names; None = all.
        """
        prefix = "language_model."
        divided = {prefix + name for name in self.divided}
        state = gather_state(
            root, self.mesh, divided, wanted=lambda name: wanted is None or wanted(name.removeprefix(prefix))
        )
        return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def what_trains(section: PolicyConfig | ValueConfig, *, role: Role, seed: int) -> Prepare:
    """What `load_backbone` is to do with a role's model: freeze parts of it, and put adapters into the rest."""

    def prepare(model: PreTrainedModel) -> None:
        freeze(model, section.freeze, role=role)
        if section.lora is not None:
            add_lora(model, section.lora, frozen=section.freeze, role=role, seed=seed, ep=section.model.ep)

    return prepare


def load_backbone(
    model_dir: Path | str,
    config: TrainModelConfig,
    mesh: Mesh,
    *,
    role: str = "policy",
    init: str = "pretrained",
    seed: int = 0,
    prepare: Prepare | None = None,
) -> Backbone:
    """Load a model in the layout of `mesh`; every rank calls it.

    Args:
        model_dir: A local Hugging Face folder.
        config: The role's layout and compute type.
        mesh: This rank's place in it.
        role: "policy" or "value", for errors.
        init: "pretrained", or "random" for seeded random weights.
        seed: Of random weights.
        prepare: Called with the whole model before it is divided: adapters, freezing. On every rank alike, and on rank
            0 a second time, with real numbers.

    Raises:
        ConfigError: when transformers cannot build the model, or it cannot be divided as asked.
    """
    source = load_causal_lm(model_dir, init=init, seed=seed, needs_output=role == "policy") if mesh.rank == 0 else None
    whole = Backbone(source, _skeleton(model_dir, config.dtype), mesh, config.dtype) if source is not None else None
    if source is not None and prepare is not None:
        prepare(source)
    if whole is not None and not whole.is_sharded:
        if config.activation_checkpointing:
            checkpoint_activations(whole.model)
        return whole
    skeleton = _skeleton(model_dir, config.dtype)
    model = _skeleton(model_dir, config.dtype)
    if prepare is not None:
        prepare(model)
    divided = divide_experts(model, ep_rank=mesh.ep_rank, ep_size=mesh.ep, group=mesh.ep_group, key=f"{role}.model.ep")
    if config.activation_checkpointing:
        checkpoint_activations(model)
    spreader = Spreader(source, model, divided, mesh)
    shard_layers(model, mesh, dtype=config.dtype, divided=divided, spreader=spreader)
    return Backbone(model, skeleton, mesh, config.dtype, tuple(divided))


def _skeleton(model_dir: Path | str, dtype: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.float32)
    choose_experts(model, DTYPES[dtype])
    return model.eval()
