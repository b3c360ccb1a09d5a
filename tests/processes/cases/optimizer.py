"""The optimizer over sharded parameters is the optimizer of one process: norm, clipping, steps, refusals."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from services.config.train import OptimConfig
from services.training.optimizer import LossFunction, Optimizer
from services.training.ranks import Ranks
from services.wire.grids import MicroBatch
from tests.processes.cases import case

NUM_STEPS, NUM_MICRO_BATCHES, WORLD = 3, 2, 2
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 0.5}
WIDTH = 5
SMALL_PIECE_BYTES = 4 * 16
MOMENTS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """A body, one expert a rank, a replica and a head [1, D], of which one of two ranks holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 7)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, 3, bias=False) for _ in range(WORLD)])
        self.head = nn.Linear(7, 1)
        self.idle = nn.Linear(3, 1)  # no loss reaches it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


def seeded() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def sharded(ranks: Ranks) -> Net:
    """All but this rank's expert over both ranks; the expert over the ranks that hold it: this one alone."""
    net = seeded()
    net.experts = nn.ModuleList([net.experts[ranks.rank]])
    shards = init_device_mesh("cpu", (WORLD,))
    alone = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replica", "ep"))["replica"]
    fully_shard(net.experts[0], mesh=alone)
    for module in (net.body, net):
        fully_shard(module, mesh=shards)
    for module in net.modules():  # each call is about one group of parameters, so every module gets it
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum
    return net


def data(rank: int, number: int) -> torch.Tensor:
    """[4, WIDTH]: what `rank` trains in micro-batch `number`."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def micro_batches() -> list[MicroBatch]:
    """They carry only their number."""
    return [
        MicroBatch(lengths=np.array([4], dtype="<u4"), arrays={"number": np.array([number])}, spans=[])
        for number in range(NUM_MICRO_BATCHES)
    ]


def loss_of(net: Net, shares: list[int], factor: float = 1.0) -> LossFunction:
    """Sum over the data of `shares`; every expert sees the data of all ranks."""

    def loss_function(micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        number = int(micro_batch.arrays["number"][0])
        loss = torch.stack([net(data(rank, number)).square().sum() for rank in shares]).sum()
        everything = torch.cat([data(rank, number) for rank in range(WORLD)])
        for place, expert in zip(shares, net.experts, strict=True):
            loss = loss + (place + 1) * expert(everything).square().sum()
        return loss * factor, {"loss_sum": float(loss.detach())}

    return loss_function


def optimizer_of(net: nn.Module, ranks: Ranks, **settings: bool | float) -> Optimizer:
    return Optimizer(
        net,
        OptimConfig.model_validate(SETTINGS | settings),
        ranks,
        warmup_updates=2,
        piece_bytes=SMALL_PIECE_BYTES,
    )


def local_weights(net: nn.Module) -> list[torch.Tensor]:
    if isinstance(net, FSDPModule):
        net.reshard()
    with torch.no_grad():
        return [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in net.parameters()]


def same_bytes(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(one, other, strict=True))


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    gap = float((found - expected).norm()) / max(float(expected.norm()), 1e-12)
    assert gap <= 1e-5, f"{name}: {gap:.1e}"


@case(2)
def shards_step_like_one_process(ranks: Ranks, folder: Path) -> None:
    """Three clipped updates; norms, sums and every full tensor."""
    net, twin = sharded(ranks), seeded()
    ours, alone = optimizer_of(net, ranks), optimizer_of(twin, Ranks())
    assert min(tensor.numel() for tensor in local_weights(net.head)) == (0 if ranks.rank == 1 else 1)
    for _ in range(NUM_STEPS):
        found = ours.update(micro_batches(), loss_of(net, [ranks.rank]))
        expected = alone.update(micro_batches(), loss_of(twin, list(range(WORLD))))
        assert found.applied and expected.applied
        assert found.grad_norm > SETTINGS["max_grad_norm"], "clipping is what is compared"
        assert math.isclose(found.grad_norm, expected.grad_norm, rel_tol=1e-5)
        assert math.isclose(found.sums["loss_sum"], expected.sums["loss_sum"], rel_tol=1e-5)
        norms = ranks.gather_f64([found.grad_norm])
        assert norms[0] == norms[1], "the norm is one number"
        for name, parameter in twin.named_parameters():
            if name.startswith("experts."):
                if f"experts.{ranks.rank}." in name:
                    assert_close(local_weights(net.experts)[0], parameter.detach(), name)
                continue
            assert parameter.grad is not None
            own = net.get_parameter(name)
            assert isinstance(own, DTensor)
            if own.grad is not None:
                assert isinstance(own.grad, DTensor)
                assert_close(own.grad.full_tensor(), parameter.grad, f"clipped gradient of {name}")
            assert_close(own.full_tensor().detach(), parameter.detach(), name)


@case(2)
def a_loss_that_is_not_finite_on_one_rank_moves_no_rank(ranks: Ranks, folder: Path) -> None:
    """Scenario: a good update, then nan on rank 1 in micro-batch 1. Result: same bytes, same words on both ranks."""
    net = sharded(ranks)
    with torch.no_grad():
        net(data(0, 0))  # leaves the root whole, as a self-test at the start does
    optimizer = optimizer_of(net, ranks)
    assert optimizer.update(micro_batches(), loss_of(net, [ranks.rank])).applied
    before, state = local_weights(net), optimizer.state_dict()

    def spoilt(micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        is_bad = ranks.rank == 1 and int(micro_batch.arrays["number"][0]) == 1
        return loss_of(net, [ranks.rank], math.nan if is_bad else 1.0)(micro_batch)

    def blame(micro_batch: MicroBatch) -> str:
        number = int(micro_batch.arrays["number"][0])
        net(data(ranks.rank, number))  # a collective: every rank must come
        return f"sample {number}{ranks.rank}"

    result = optimizer.update(micro_batches(), spoilt, blame=blame)
    assert not result.applied
    assert same_bytes(before, local_weights(net))
    after = optimizer.state_dict()
    for name, moments in state["moments"].items():
        assert same_bytes([moments["exp_avg"], moments["exp_avg_sq"]], [after["moments"][name][k] for k in MOMENTS])
        assert moments["num_steps"] == after["moments"][name]["num_steps"]
    told = [row.decode() for row in ranks.gather_bytes(result.problem.encode())]
    assert told[0] == told[1]
    assert "rank 1: loss is nan at micro-batch 1 (sample 11)" in told[0], told[0]
    assert "rank 0: gradient is not finite in body.weight" in told[0], "it came by the sum"
    assert "sample 10" not in told[0], "rank 0 was asked too, but its loss is fine"
    assert optimizer.update(micro_batches(), loss_of(net, [ranks.rank])).applied


@case(2)
def moments_in_host_memory_and_across_a_save_change_no_bit(ranks: Ranks, folder: Path) -> None:
    """The same updates plain, with offload, and with offload saved and loaded in between."""
    runs = []
    for offload, saved in ((False, False), (True, False), (True, True)):
        net = sharded(ranks)
        optimizer = optimizer_of(net, ranks, offload=offload)
        for step in range(NUM_STEPS):
            if saved and step == 1:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = optimizer_of(net, ranks, offload=offload)
                optimizer.load_state_dict(state)
            assert optimizer.update(micro_batches(), loss_of(net, [ranks.rank])).applied
        moments = optimizer.state_dict()["moments"]
        runs.append(local_weights(net) + [entry[key] for entry in moments.values() for key in MOMENTS])
    assert same_bytes(runs[0], runs[1]) and same_bytes(runs[0], runs[2])
    assert not same_bytes(local_weights(sharded(ranks)), runs[0][: len(local_weights(net))])


@case(2)
def replicas_are_summed_and_count_once(ranks: Ranks, folder: Path) -> None:
    """Plain parameters in a group: the gradient is the sum, the norm that of one copy, the copies stay equal."""
    net, twin = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
    with torch.no_grad():
        for module in (net, twin):
            module.weight.copy_(torch.linspace(-1, 1, WIDTH)[None])
            module.bias.zero_()
    ours, alone = optimizer_of(net, ranks), optimizer_of(twin, Ranks())
    for _ in range(NUM_STEPS):
        found = ours.update(micro_batches(), lambda m: (net(data(ranks.rank, int(m.arrays["number"][0]))).sum(), {}))
        expected = alone.update(
            micro_batches(), lambda m: (sum(twin(data(r, int(m.arrays["number"][0]))).sum() for r in range(WORLD)), {})
        )
        assert math.isclose(found.grad_norm, expected.grad_norm, rel_tol=1e-5)
    for own, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(own.detach(), other.detach(), "replica")
    copies = ranks.gather_bytes(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    assert copies[0] == copies[1]
