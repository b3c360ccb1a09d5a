"""FSDP2 over all ranks of a train group: from a model in rank 0's memory to one shard of everything on each rank.

Notable:
- Every rank builds the model on the meta device; rank 0 alone loads the folder. Then layer by layer the numbers are
  broadcast and the layer is sharded at once, so a rank holds one whole layer at most besides its shards. Rank 0 keeps
  the loaded model in host memory until the last layer is out.
- Gradients are summed over ranks, never averaged: losses are divided by the grid's own denominators (law 1).
- Compute type is a matter of the all-gather: shards, gradients and their sums stay float32.
- Divided experts are sharded over the ranks that hold the same ones; everything else over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from services.model.load import DTYPES
from services.model.mesh import Mesh
from services.wire.errors import ConfigError


class Spreader:
    """Fills a model on the meta device with the numbers of rank 0's model, module by module."""

    def __init__(self, source: nn.Module | None, skeleton: nn.Module, divided: Iterable[str], mesh: Mesh) -> None:
        """Remember who is who.

        Args:
            source: The loaded model on rank 0, None on the others.
            skeleton: The same model on meta, its experts divided.
            divided: Names of the parameters of which each rank keeps its experts only.
            mesh: The layout.
        """
        self._source = dict(_tensors_of(source)) if source is not None else {}
        self._names = {id(tensor): name for name, tensor in _tensors_of(skeleton)}
        self._divided = frozenset(divided)
        self._mesh = mesh
        self._filled: dict[int, torch.Tensor] = {}  # tied parameters stay tied

    def fill(self, module: nn.Module) -> None:
        """Give every parameter and buffer within `module` its numbers, on this rank's device."""
        for child in module.modules():
            for store in (child._parameters, child._buffers):
                for leaf, tensor in store.items():
                    if tensor is not None and tensor.is_meta:
                        if id(tensor) not in self._filled:
                            self._filled[id(tensor)] = self._receive(tensor)
                        store[leaf] = self._filled[id(tensor)]  # pyright: ignore[reportArgumentType]
            strays = [name for name, value in vars(child).items() if isinstance(value, torch.Tensor) and value.is_meta]
            if strays:
                raise ConfigError([f"model.path: {type(child).__name__} keeps {strays} outside of its buffers"])

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        name, mesh = self._names[id(tensor)], self._mesh
        shape = list(tensor.shape)
        if name in self._divided:
            shape[0] *= mesh.ep
        whole = torch.empty(shape, dtype=tensor.dtype, device=mesh.device)
        if mesh.rank == 0:
            whole.copy_(self._source.pop(name).detach())
        dist.broadcast(whole.view(torch.uint8) if whole.dtype == torch.bool else whole, src=0)
        if name in self._divided:
            whole = whole.chunk(mesh.ep)[mesh.ep_rank].clone()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(whole, requires_grad=tensor.requires_grad)
        return whole


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that architectures are cut into: those that transformers itself would never split."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def shard_layers(model: PreTrainedModel, mesh: Mesh, *, dtype: str, divided: Sequence[str], spreader: Spreader) -> None:
    """Fill and shard every layer, one after the other; what is outside of layers is filled and stays whole."""
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    # routing weights may be float32 beside hidden states of another type, and stay so
    as_they_come = MixedPrecisionPolicy(
        param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    experts = {name.rpartition(".")[0] for name in divided}
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers_of(model):
        spreader.fill(layer)
        for module in layer.modules():
            if names[id(module)] in experts:
                _shard(module, mesh.expert_mesh, as_they_come)
        _shard(layer, mesh.shard_mesh, policy)
    spreader.fill(model)


def shard_root(root: nn.Module, mesh: Mesh, *, dtype: str, exact: Sequence[nn.Module] = ()) -> None:
    """Shard what is not within a layer, and make all gradients sums.

    Args:
        root: The module whose forward is called; holds the layers.
        mesh: The layout.
        dtype: What the root's own parameters compute in.
        exact: Modules that compute in float32 whatever `dtype` says (a value head).
    """
    for module in exact:
        _shard(module, mesh.shard_mesh, MixedPrecisionPolicy(cast_forward_inputs=False))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    _shard(root, mesh.shard_mesh, policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a sum and a division by one: gloo knows no other


def _shard(module: nn.Module, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy) -> None:
    assert mesh is not None
    fully_shard(module, mesh=mesh, mp_policy=policy)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep of each layer only its input for the backward pass, and compute the rest again there."""
    for layer in layers_of(model):
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor whole, on every rank, without gradient; any other as it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_state(
    model: nn.Module, mesh: Mesh, divided: Iterable[str] = (), *, wanted: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """All parameters and saved buffers, whole, in host memory on rank 0; nothing on the others.

    Every rank calls it.

    Args:
        model: Sharded or not; where it is, the module whose forward is called.
        mesh: The layout.
        divided: Names of the parameters whose experts are divided.
        wanted: Which names; None = all.
    """
    state: dict[str, torch.Tensor] = {}
    divided = frozenset(divided)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without a backward the root's parameters are still whole
    for name, parameter in model.named_parameters():
        if wanted is not None and not wanted(name):
            continue
        whole = whole_tensor(parameter)
        if name in divided:
            parts = [torch.empty_like(whole) for _ in range(mesh.ep)]
            dist.all_gather(parts, whole.contiguous(), group=mesh.ep_group)
            whole = torch.cat(parts)
        if mesh.rank == 0:
            state[name] = whole.cpu()
    if mesh.rank == 0:
        for prefix, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                if buffer is None or leaf in module._non_persistent_buffers_set or (wanted and not wanted(name)):
                    continue
                state[name] = buffer.cpu()
    return state
