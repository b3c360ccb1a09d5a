"""Expert parallelism: each rank of a group keeps its share of every mixture's experts, and rows travel to them.

Notable:
- No model names: a module is divided where it has `num_experts`, parameters of three dimensions whose first is that
  number, and a forward of (hidden states, chosen experts, their weights), as transformers fuses them. Class, names and
  computation stay; the instance gets a forward around that computation, which reads the parameters when it is called,
  so that FSDP2 may shard and gather them beneath it.
- Three exchanges a layer, on every rank whatever was routed (law 5): how many rows each expert gets, the rows, the
  results. A rank that receives no row still stands in the graph and gives its parameters gradients of zero: otherwise
  its peers would wait for it in backward, and a recompute (`torch.utils.checkpoint`) would stop before its exchanges.
- A parameter of an expert gets the gradient of the tokens of all ranks of the group, any other that of its own rank's.
  With sums over tokens as losses: sum an expert's gradient over the ranks of equal `ep_rank`, any other over all ranks.
- Routing weights stay at home: experts compute with weight 1 and results are weighed where the token lives.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from services.wire.errors import ConfigError, PeerLost

ROUTED_ARGUMENTS = 4  # self, hidden states, chosen experts, their weights


@dataclass(frozen=True)
class Division:
    """How one experts module is divided: rank r of the group holds experts r * E/EP to (r + 1) * E/EP."""

    num_experts: int  # E, over all ranks
    ep_size: int
    group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        """A copied model (the reference policy) talks over the same group, which cannot be copied."""
        return self


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` that hold all experts of a mixture and route rows to them, with their qualified names."""
    for name, module in model.named_modules():
        num_experts = getattr(module, "num_experts", None)
        held = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() >= 3]
        if not isinstance(num_experts, int) or not held or any(len(parameter) != num_experts for parameter in held):
            continue
        if len(inspect.signature(type(module).forward).parameters) == ROUTED_ARGUMENTS:
            yield name, module


def choose_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Leave transformers' grouped products, or take its plain ones where those cannot compute.

    Args:
        model: with or without a mixture.
        dtype: what it computes in. Grouped products know no float64 and need rows of a multiple of 16 bytes.
    """
    for _, module in fused_experts(model):
        for parameter in module.parameters(recurse=False):
            if dtype == torch.float64 or any(n * dtype.itemsize % 16 for n in parameter.shape[1:]):
                model.set_experts_implementation("eager")
                return


def divide_experts(
    model: nn.Module, *, ep_rank: int, ep_size: int, group: dist.ProcessGroup | None, key: str = "policy.model.ep"
) -> list[str]:
    """Keep 1/`ep_size` of every mixture's experts in `model`, in place, and route rows to the rank that holds them.

    Args:
        model: on any device, meta included; parameters keep their names and `requires_grad`.
        ep_rank: this rank's place in `group`.
        ep_size: ranks of `group`; 1 changes nothing.
        group: the ranks that share the experts; None = all ranks.
        key: the config key that asked for it, named in errors.

    Returns:
        Qualified names of the parameters that were divided.

    Raises:
        ConfigError: when there is no mixture, or one that `ep_size` does not divide.
    """
    if ep_size == 1:
        return []
    assert 0 <= ep_rank < ep_size, f"rank {ep_rank} of an expert group of {ep_size}"
    if group is not None:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (ep_rank, ep_size), "not this group's place"
    found = list(fused_experts(model))
    if not found:
        raise ConfigError([f"{key}: {type(model).__name__} has no mixture of experts to divide by {ep_size}"])
    problems = [problem for name, module in found for problem in _problems(name, module, ep_size)]
    if problems:
        raise ConfigError([f"{key}: {problem}" for problem in dict.fromkeys(problems)])
    return [f"{name}.{part}".lstrip(".") for name, module in found for part in _divide(module, ep_rank, ep_size, group)]


def _problems(name: str, module: Any, ep_size: int) -> Iterator[str]:
    assert not hasattr(module, "expert_division"), f"{name} is divided already"
    num_experts: int = module.num_experts
    if num_experts % ep_size:
        yield f"{num_experts} experts cannot be divided by {ep_size}"
    for part, parameter in module.named_parameters():
        # A parameter that all experts share would need another gradient sum than the experts it lies among.
        if "." in part or not parameter.dim() or len(parameter) != num_experts:
            yield f"{type(module).__name__} keeps {part} for all experts together, which cannot be divided"


def _divide(module: Any, ep_rank: int, ep_size: int, group: dist.ProcessGroup | None) -> list[str]:
    num_experts: int = module.num_experts
    num_local = num_experts // ep_size
    parts: list[tuple[str, nn.Parameter]] = list(module.named_parameters(recurse=False))
    for part, parameter in parts:
        local = parameter.detach()[ep_rank * num_local : (ep_rank + 1) * num_local].clone()  # frees the others' share
        setattr(module, part, nn.Parameter(local, requires_grad=parameter.requires_grad))
    module.num_experts = num_local  # what the experts' own computation counts by
    module.expert_division = Division(num_experts, ep_size, group)
    module.forward = MethodType(_routed_forward, module)  # a bound method: a copied model binds its copy
    return [part for part, _ in parts]


def _routed_forward(
    module: Any, hidden_ND: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """What the undivided module computes; N may differ between ranks and may be 0.

    Args:
        module: the experts module.
        hidden_ND: [N, D]
        chosen_NK: [N, K] of all E experts; E itself and above choose none.
        weights_NK: [N, K]

    Returns:
        [N, D]
    """
    division: Division = module.expert_division
    (num_tokens, num_chosen), width = chosen_NK.shape, hidden_ND.shape[1]
    chosen = chosen_NK.flatten()  # [N * K]
    counts_E = torch.bincount(chosen, minlength=division.num_experts)[: division.num_experts]
    counts_RL = counts_E.view(division.ep_size, -1)  # rank, expert of that rank
    arriving_RL = torch.empty_like(counts_RL)
    _all_to_all(arriving_RL, counts_RL, None, None, division.group)
    sent, received = torch.stack([counts_RL.sum(dim=1), arriving_RL.sum(dim=1)]).tolist()  # the one wait for a GPU

    order = chosen.argsort(stable=True)[: sum(sent)]  # by rank and there by expert; those that chose none are last
    rows = _exchange(hidden_ND[order // num_chosen], sent, received, division.group)  # [S, D]
    local_L = torch.arange(module.num_experts, device=chosen.device)
    expert = local_L.repeat(division.ep_size).repeat_interleave(arriving_RL.flatten(), output_size=sum(received))
    results = _exchange(_local_experts(module, rows, expert), received, sent, division.group)

    placed = results.new_zeros(len(chosen), width).index_copy(0, order, results)
    weighed = placed.view(num_tokens, num_chosen, width) * weights_NK[..., None]
    return weighed.sum(dim=1).to(hidden_ND.dtype)


def _local_experts(module: nn.Module, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """The class's own computation of `rows [S, D]`, each by the one local expert `[S]` it came for."""
    if len(rows):
        return type(module).forward(module, rows, expert[:, None], rows.new_ones(len(rows), 1))
    for parameter in module.parameters():
        rows = rows + parameter.flatten()[:0].sum()  # joins the graph, adds nothing
    return rows


def _exchange(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Give the first `sent[0]` rows to rank 0 of the group and so on; the rows received, in rank order."""
    out: torch.Tensor = _Exchange.apply(rows, list(sent), list(received), group)  # pyright: ignore[reportAssignmentType]
    return out


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; its gradient is the same exchange backwards."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.exchange = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        _all_to_all(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        sent, received, group = ctx.exchange
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        _all_to_all(out, grad.contiguous(), sent, received, group)
        return out, None, None, None


def _all_to_all(
    out: torch.Tensor,
    rows: torch.Tensor,
    received: list[int] | None,
    sent: list[int] | None,
    group: dist.ProcessGroup | None,
) -> None:
    try:
        dist.all_to_all_single(out, rows, received, sent, group=group)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise PeerLost(f"rank {dist.get_rank()} lost its peers in an exchange of experts' rows: {reason}") from error
