"""AdamW in pieces, its moments wherever they live, is torch's AdamW."""

from __future__ import annotations

import copy

import pytest
import torch

from services.config.train import OptimConfig
from services.training.moments import Moments
from services.wire.errors import ContractError

F32_BYTES = 4
SHAPES = {"embedding": (40, 8), "norm": (8,), "empty shard": (0, 8), "scalar": (), "bias": (3,)}
PIECE = 64
"""Elements: the embedding is cut into five pieces, the small ones share the last."""
CONFIG = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def tensors(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def moments_of(parameters: dict[str, torch.Tensor], *, piece: int = PIECE, **settings: bool | float) -> Moments:
    config = OptimConfig.model_validate(CONFIG | settings)
    return Moments(parameters, config, piece_bytes=F32_BYTES * piece)


def step(moments: Moments, parameters: dict[str, torch.Tensor], seed: int, *, lr: float = 0.1) -> None:
    device = str(next(iter(parameters.values())).device)
    moments.step(list(parameters.values()), dict(enumerate(tensors(seed, device).values())), lr=lr)


def stepped(num_steps: int, *, device: str = "cpu", piece: int = PIECE, **settings: bool | float):
    parameters = tensors(0, device)
    moments = moments_of(parameters, piece=piece, **settings)
    for seed in range(1, num_steps + 1):
        step(moments, parameters, seed)
    return parameters, moments


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_state(one: Moments, other: Moments) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(
        torch.equal(a[name][key], b[name][key]) if key != "num_steps" else a[name][key] == b[name][key]
        for name in a
        for key in ("exp_avg", "exp_avg_sq", "num_steps")
    )


# ---- the step


@pytest.mark.parametrize("piece", [1000, PIECE, 5])
@pytest.mark.parametrize("offload", [False, True])
def test_three_steps_in_pieces_are_those_of_torchs_own_class(piece: int, offload: bool) -> None:
    """A cut may move a number from a vector unit to a scalar one, which rounds differently: the last bit."""
    found, moments = stepped(3, piece=piece, offload=offload)
    expected = tensors(0)
    adam = torch.optim.AdamW(list(expected.values()), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for seed in (1, 2, 3):
        for parameter, gradient in zip(expected.values(), tensors(seed).values(), strict=True):
            parameter.grad = gradient
        adam.step()
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-6, rtol=1e-6, msg=name)
        own = moments.state_dict()[name]
        torch.testing.assert_close(own["exp_avg"], adam.state[parameter]["exp_avg"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(own["exp_avg_sq"], adam.state[parameter]["exp_avg_sq"], atol=1e-6, rtol=1e-6)
        assert own["num_steps"] == 3 and own["exp_avg"].shape == parameter.shape


def test_the_first_step_of_one_number_by_hand() -> None:
    """p = 2, g = 3: decay 2 (1 - 0.1 x 0.1) = 1.98; the corrected moments are 3 and 9, so p = 1.98 - 0.1."""
    parameters = {"p": torch.tensor([2.0])}
    moments = moments_of(parameters, eps=1e-12)
    moments.step(list(parameters.values()), {0: torch.tensor([3.0])}, lr=0.1)
    assert float(parameters["p"]) == pytest.approx(1.88)
    state = moments.state_dict()["p"]
    assert float(state["exp_avg"]) == pytest.approx(0.6) and float(state["exp_avg_sq"]) == pytest.approx(0.9)


@pytest.mark.parametrize("piece", [1000, PIECE, 7])
def test_moments_in_host_memory_change_no_bit(piece: int) -> None:
    plain, there = stepped(3, piece=piece)
    offloaded, here = stepped(3, piece=piece, offload=True)
    assert same(plain, offloaded) and same_state(there, here)
    assert here.devices == {torch.device("cpu")}


@pytest.mark.gpu
@needs_cuda
def test_moments_in_host_memory_change_no_bit_of_a_step_on_a_gpu() -> None:
    """Several pieces on their way at once; the host's copy is complete when the step returns."""
    plain, there = stepped(4, device="cuda")
    offloaded, here = stepped(4, device="cuda", offload=True)
    assert same(plain, offloaded) and same_state(there, here)
    assert here.devices == {torch.device("cpu")} and {device.type for device in there.devices} == {"cuda"}


def test_gradients_in_another_memory_order_count_the_same() -> None:
    plain, transposed = tensors(0), tensors(0)
    one, other = moments_of(plain), moments_of(transposed)
    gradient = tensors(1)["embedding"]
    one.step(list(plain.values()), {0: gradient}, lr=0.1)
    other.step(list(transposed.values()), {0: gradient.t().contiguous().t()}, lr=0.1)
    assert same(plain, transposed) and same_state(one, other)


# ---- some parameters only


def test_parameters_without_a_gradient_keep_their_bits_moments_and_counts() -> None:
    """Two of a piece's parameters step, the others are as if nothing had been."""
    parameters, moments = stepped(1)
    before, state = copy.deepcopy(parameters), moments.state_dict()
    gradients = list(tensors(2).values())
    moments.step(list(parameters.values()), {1: gradients[1], 4: gradients[4]}, lr=0.1)
    after = moments.state_dict()
    for name in SHAPES:
        moved = name in ("norm", "bias")
        assert torch.equal(before[name], parameters[name]) != moved, name
        assert torch.equal(state[name]["exp_avg"], after[name]["exp_avg"]) != moved, name
        assert after[name]["num_steps"] == (2 if moved else 1)


def test_a_parameter_that_joins_later_starts_its_own_bias_correction() -> None:
    """Its first step has the size of the rate, however often others have stepped."""
    parameters = {"early": torch.zeros(2), "late": torch.zeros(2)}
    moments = moments_of(parameters, weight_decay=0.0)
    for _ in range(5):
        moments.step(list(parameters.values()), {0: torch.ones(2)}, lr=0.1)
    moments.step(list(parameters.values()), {0: torch.ones(2), 1: torch.ones(2)}, lr=0.1)
    torch.testing.assert_close(parameters["late"], torch.full((2,), -0.1))


# ---- the state


@pytest.mark.parametrize("offload", [False, True])
def test_saved_and_loaded_in_the_middle_is_the_same_bit_for_bit(offload: bool) -> None:
    """Also into the other place: where moments live is no part of the state."""
    whole, _ = stepped(4)
    parameters, moments = stepped(2, offload=offload)
    state = moments.state_dict()
    step(moments, parameters, 9)  # the state is a copy: what happens after it does not reach it
    resumed, _ = stepped(2)
    later = moments_of(resumed, offload=not offload)
    later.load_state_dict(state)
    for seed in (3, 4):
        step(later, resumed, seed)
    assert same(whole, resumed)


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    parameters, moments = stepped(2)
    untouched = copy.deepcopy(moments.state_dict())
    good = copy.deepcopy(untouched)
    for changed, message in (
        ({name: entry for name, entry in good.items() if name != "norm"}, "no exp_avg of norm"),
        (good | {"norm": {"exp_avg": good["norm"]["exp_avg"], "num_steps": 1}}, "no exp_avg_sq of norm"),
        (good | {"bias": good["norm"]}, r"exp_avg of bias has shape \[8\], not \[3\]"),
        (good | {"adapter": good["norm"]}, "do not train here: adapter"),
    ):
        with pytest.raises(ContractError, match=message):
            moments.load_state_dict(changed)
    fresh = moments_of(parameters)
    fresh.load_state_dict(untouched)
    assert same_state(moments, fresh)


def test_without_a_trainable_parameter_there_is_nothing_to_do() -> None:
    moments = moments_of({})
    moments.step([], {}, lr=0.1)
    assert moments.state_dict() == {} and moments.devices == set()
