"""A role as this rank holds it, and where its pieces lie in the whole tensors.

Notable:
- A piece is described by a DTensor over a mesh of CPU ranks without process groups of its own: whoever writes or reads
  it has it in host memory, and makes no collective for it.
- Divided experts are rows of the whole [E, ...]: first by expert rank, then by replica.
- An empty piece is left out. torch.distributed.checkpoint names pieces by where they begin, and where an empty one does
  is up to torch: it must not be taken for the one that begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from services.model.backbone import Backbone
from services.model.mesh import Mesh
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks


@dataclass(frozen=True)
class Part:
    """One role as this rank holds it."""

    role: Literal["policy", "critic"]
    model: nn.Module
    """the module that the optimizer was made for, in its layout"""
    optimizer: Optimizer
    mesh: Mesh
    ranks: Ranks
    divided: frozenset[str] = frozenset()
    """parameters of which this rank holds its experts only, by their names in the checkpoint"""
    prefix: str = ""
    """what the module's names begin with and those in the checkpoint do not"""


class TensorSpec(msgspec.Struct, frozen=True):
    """A whole tensor, without its numbers."""

    shape: list[int]
    dtype: str


class Places:
    """Where this rank's pieces lie in the whole tensors."""

    def __init__(self, part: Part) -> None:
        mesh = part.mesh
        self._rank, self._ep, self._divided = part.ranks.rank, mesh.ep, part.divided
        self._parameters = dict(parameters_of(part))
        self._meshes: tuple[DeviceMesh, DeviceMesh] | None = None
        if mesh.size > 1:
            everyone = torch.arange(mesh.size)
            by_expert = everyone.view(-1, mesh.ep).T  # [ep, replica]
            self._meshes = (
                DeviceMesh("cpu", everyone, mesh_dim_names=("shard",), _init_backend=False),
                DeviceMesh("cpu", by_expert, mesh_dim_names=("ep", "replica"), _init_backend=False),
            )

    def spec(self, name: str) -> TensorSpec:
        """The whole parameter."""
        spec = spec_of(self._parameters[name])
        factor = self._ep if name in self._divided else 1
        return TensorSpec([spec.shape[0] * factor, *spec.shape[1:]], spec.dtype) if factor > 1 else spec

    def whole(self, name: str, local: torch.Tensor, *, everywhere: bool = False) -> torch.Tensor | None:
        """A tensor laid out as parameter `name`, of which this rank holds `local`, whose memory it shares.

        Args:
            name: Of the parameter.
            local: In host memory.
            everywhere: Whether ranks other than the first have to do with a replica.

        Returns:
            None where this rank has nothing to write or read.
        """
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor) or self._meshes is None:
            return local if everywhere or self._rank == 0 else None
        start, end = rows_of(len(parameter), parameter.device_mesh)
        assert parameter.placements == (Shard(0),), f"{name} lies {parameter.placements}"
        assert local.shape == (end - start, *parameter.shape[1:]), f"{name}: {list(local.shape)} of rows {start}:{end}"
        if local.numel() == 0:
            return None
        is_divided = name in self._divided
        shape = torch.Size(self.spec(name).shape)
        return DTensor.from_local(
            local,
            self._meshes[is_divided],
            (Shard(0), Shard(0)) if is_divided else (Shard(0),),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


def rows_of(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's rows of a sharded tensor: the first ranks hold equally many, the last ones what remains."""
    per_rank = -(-num_rows // mesh.size())
    start = min(mesh.get_local_rank() * per_rank, num_rows)
    return start, min(start + per_rank, num_rows)


def divided_in_critic(backbone: Backbone) -> frozenset[str]:
    """Names that parameters with divided experts have in a critic, which holds the base model alone."""
    base = f"{backbone.model.base_model_prefix}."
    return frozenset(f"backbone.{name.removeprefix(base)}" for name in backbone.divided)


def parameters_of(part: Part) -> Iterator[tuple[str, nn.Parameter]]:
    """Frozen ones too; a tied one once."""
    for name, parameter in part.model.named_parameters():
        yield name.removeprefix(part.prefix), parameter


def buffers_of(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that are saved."""
    for path, module in part.model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}".removeprefix(part.prefix).lstrip("."), buffer


def random_state_of(part: Part) -> dict[str, torch.Tensor]:
    """This rank's, by keys that no other rank uses."""
    state = {f"rng/{part.ranks.rank}": torch.get_rng_state()}
    if part.mesh.device.type == "cuda":
        state[f"rng_cuda/{part.ranks.rank}"] = torch.cuda.get_rng_state(part.mesh.device)
    return state


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and type."""
    return TensorSpec(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@torch.no_grad()
def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def reshard(model: nn.Module) -> None:
    """After a forward without a backward, the root's parameters are still whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
