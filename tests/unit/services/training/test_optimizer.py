"""One optimizer step that all ranks take or none; here a group of one."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from loguru import logger
from torch import nn

from services.config.train import OptimConfig
from services.training.optimizer import HeadOnly, LossFunction, Optimizer, add_sums
from services.training.ranks import Ranks
from services.wire.errors import ContractError, NonFiniteError
from services.wire.grids import MicroBatch

X = torch.tensor([1.0, -2.0, 0.5])


def micro_batch() -> MicroBatch:
    """The loss functions here read nothing of it."""
    return MicroBatch(lengths=np.array([3], dtype="<u4"), arrays={}, spans=[])


def model_of() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 1)


def optimizer_of(
    model: nn.Module, *, warmup_updates: int = 0, head_only: HeadOnly | None = None, **settings: float
) -> Optimizer:
    config = OptimConfig.model_validate({"lr": 0.1} | settings)
    return Optimizer(model, config, Ranks(), warmup_updates=warmup_updates, head_only=head_only)


def linear(model: nn.Linear, factor: float = 1.0) -> LossFunction:
    """Loss factor * (w x + b): its gradient is factor * (x, 1)."""
    return lambda _: (factor * model(X).sum(), {"loss_sum": factor, "ratio_max": factor})


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- the step


def test_a_step_is_adamw_on_the_clipped_gradient() -> None:
    """Against torch's own AdamW, two updates."""
    model = model_of()
    twin = copy.deepcopy(model)
    own = optimizer_of(model, weight_decay=0.1, max_grad_norm=1.0, beta1=0.8, beta2=0.9, eps=1e-6)
    adam = torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for factor in (1.0, 3.0):
        own.update([micro_batch()], linear(model, factor))
        adam.zero_grad()
        (factor * twin(X).sum()).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        adam.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(model), weights(twin), strict=True))


def test_clipping_is_by_the_norm_of_all_parameters_together_and_the_norm_told_is_the_one_before() -> None:
    model = model_of()
    result = optimizer_of(model, max_grad_norm=0.5).update([micro_batch()], linear(model, 2.0))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert result.grad_norm == pytest.approx(2 * math.sqrt(1 + 4 + 0.25 + 1))
    norm = torch.linalg.norm(torch.cat([g.flatten() for g in gradients if g is not None]))
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_a_small_gradient_is_left_as_it_is() -> None:
    model = model_of()
    optimizer_of(model, max_grad_norm=100.0).update([micro_batch()], linear(model))
    assert model.weight.grad is not None and torch.equal(model.weight.grad[0], X)


def test_micro_batches_add_up_and_are_not_averaged() -> None:
    """Losses come divided by the global denominators already."""
    model = model_of()
    result = optimizer_of(model, max_grad_norm=100.0).update([micro_batch()] * 3, linear(model))
    assert model.weight.grad is not None and torch.equal(model.weight.grad[0], 3 * X)
    assert result.sums == {"loss_sum": 3.0, "ratio_max": 1.0}


def test_gradients_of_one_update_do_not_reach_the_next() -> None:
    model = model_of()
    optimizer = optimizer_of(model, max_grad_norm=100.0)
    norms = [optimizer.update([micro_batch()], linear(model)).grad_norm for _ in range(2)]
    assert norms[0] == norms[1]


def test_a_parameter_that_no_loss_reaches_counts_as_zero() -> None:
    """A frozen head in a first phase, an expert that no token chose."""
    model = nn.ModuleList([model_of(), nn.Linear(2, 2)])
    used, idle = model[0], model[1]
    assert isinstance(used, nn.Linear) and isinstance(idle, nn.Linear)
    before = weights(idle)
    assert optimizer_of(model).update([micro_batch()], linear(used)).applied
    assert same(before, weights(idle)) and not same(weights(used), weights(model_of()))


def test_frozen_parameters_stay_bit_equal() -> None:
    model = model_of()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    result = optimizer_of(model, weight_decay=0.5).update([micro_batch()], linear(model))
    assert torch.equal(model.bias, before) and result.grad_norm == pytest.approx(math.sqrt(5.25))


def test_a_learning_rate_of_zero_is_a_control_run() -> None:
    model = model_of()
    before = weights(model)
    optimizer = optimizer_of(model, lr=0.0, weight_decay=0.5)
    assert optimizer.update([micro_batch()], linear(model)).applied
    assert same(before, weights(model)) and optimizer.num_updates == 1


def test_the_norm_of_many_numbers_is_summed_in_f64() -> None:
    """Ten million times 1e-3: an f32 sum of squares on one core is 0.4 % off."""
    model = nn.Linear(10_000_000, 1, bias=False)
    ones = torch.full((10_000_000,), 1e-3)
    result = optimizer_of(model).update([micro_batch()], lambda _: ((model.weight[0] * ones).sum(), {}), step=False)
    assert result.grad_norm == pytest.approx(1e-3 * math.sqrt(1e7), rel=1e-6)


def test_a_norm_beyond_f32_is_still_finite_and_clipped() -> None:
    model = model_of()
    result = optimizer_of(model, max_grad_norm=1.0).update([micro_batch()], linear(model, 1e38))
    assert result.applied and result.grad_norm == pytest.approx(1e38 * math.sqrt(6.25))
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad[0], X / math.sqrt(6.25), rtol=1e-4)


# ---- a phase of the head alone


def head_first(num_updates: int, **settings: float) -> tuple[nn.ModuleDict, Optimizer]:
    model = nn.ModuleDict({"body": model_of(), "head": model_of()})
    phase = HeadOnly(num_updates, lambda name: name.startswith("head."))
    return model, optimizer_of(model, head_only=phase, **settings)


def both(model: nn.ModuleDict, *, body: float, head: float) -> LossFunction:
    return lambda _: (body * model["body"](X).sum() + head * model["head"](X).sum(), {})


def test_at_first_the_head_trains_as_if_it_were_the_whole_model() -> None:
    """Two updates of the head, by a norm that leaves the body's gradient out; then both, the body with fresh moments.

    The same as three other optimizers: of the head alone, of the body alone, and of both.
    """
    model, optimizer = head_first(2, weight_decay=0.5, max_grad_norm=100.0)
    alone, late = model_of(), model_of()
    of_head, of_body = (optimizer_of(twin, weight_decay=0.5, max_grad_norm=100.0) for twin in (alone, late))
    for _ in range(2):
        result = optimizer.update([micro_batch()], both(model, body=7.0, head=1.0))
        expected = of_head.update([micro_batch()], linear(alone))
        assert result.grad_norm == expected.grad_norm == pytest.approx(2.5)
        assert same(weights(model["head"]), weights(alone)) and same(weights(model["body"]), weights(late))
    for _ in range(2):
        result = optimizer.update([micro_batch()], both(model, body=7.0, head=1.0))
        of_head.update([micro_batch()], linear(alone))
        of_body.update([micro_batch()], linear(late, 7.0))
        assert result.grad_norm == pytest.approx(2.5 * math.sqrt(50))
        assert same(weights(model["head"]), weights(alone)) and same(weights(model["body"]), weights(late))
    assert not same(weights(late), weights(model_of()))


def test_skipped_updates_do_not_end_the_phase() -> None:
    model, optimizer = head_first(1)
    optimizer.update([micro_batch()], both(model, body=1.0, head=math.nan))
    optimizer.update([micro_batch()], both(model, body=1.0, head=1.0), step=False)
    optimizer.update([micro_batch()], both(model, body=1.0, head=1.0))
    assert same(weights(model["body"]), weights(model_of())) and optimizer.num_updates == 1
    optimizer.update([micro_batch()], both(model, body=1.0, head=1.0))
    assert not same(weights(model["body"]), weights(model_of()))


def test_a_gradient_that_is_not_applied_cannot_spoil_an_update() -> None:
    """An infinite gradient of the body while only the head trains; the loss itself is finite."""
    model, optimizer = head_first(1)

    def loss_function(_: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        return (model["body"](X) * 0).abs().sqrt().sum() + model["head"](X).sum(), {}

    assert optimizer.update([micro_batch()], loss_function).applied
    assert not optimizer.update([micro_batch()], loss_function).applied, "from here on the body trains"


# ---- warmup


def test_warmup_rises_linearly_over_the_optimizers_own_updates() -> None:
    model = model_of()
    optimizer = optimizer_of(model, lr=0.4, warmup_updates=4)
    rates = []
    for _ in range(6):
        rates.append(optimizer.lr)
        optimizer.update([micro_batch()], linear(model))
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_without_warmup_the_first_update_has_the_full_rate() -> None:
    model = model_of()
    before = weights(model)
    optimizer_of(model, lr=0.01, max_grad_norm=100.0).update([micro_batch()], linear(model))
    moved = (before[0] - weights(model)[0]).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.01), rtol=1e-4), "Adam's first step is the rate itself"


def test_updates_that_were_not_taken_do_not_warm_up() -> None:
    model = model_of()
    optimizer = optimizer_of(model, lr=0.4, warmup_updates=4)
    optimizer.update([micro_batch()], linear(model), step=False)
    optimizer.update([micro_batch()], linear(model, float("nan")))
    assert optimizer.num_updates == 0 and optimizer.lr == pytest.approx(0.1)


# ---- what is no step


def test_without_a_loss_token_no_step_is_taken() -> None:
    model = model_of()
    before = weights(model)
    optimizer = optimizer_of(model, weight_decay=0.5)
    result = optimizer.update([micro_batch()], linear(model, 0.0), step=False)
    assert not result.applied and optimizer.num_updates == 0 and same(before, weights(model))


def test_a_rank_without_micro_batches_still_joins() -> None:
    model = model_of()
    result = optimizer_of(model).update([], linear(model), step=False)
    assert result.grad_norm == 0.0 and result.sums == {}


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_non_finite_loss_leaves_weights_and_moments_untouched(factor: float) -> None:
    """Scenario: a bad update between two good ones. Result: the same weights as without it."""
    model, twin = model_of(), model_of()
    optimizer, calm = optimizer_of(model), optimizer_of(twin)
    optimizer.update([micro_batch()], linear(model))
    before = weights(model)
    result = optimizer.update([micro_batch(), micro_batch()], linear(model, factor))
    assert not result.applied and same(before, weights(model))
    optimizer.update([micro_batch()], linear(model))
    for _ in range(2):
        calm.update([micro_batch()], linear(twin))
    assert same(weights(model), weights(twin)) and optimizer.num_updates == calm.num_updates == 2


def test_a_finite_loss_with_a_non_finite_gradient_is_no_step_either() -> None:
    model = model_of()
    before = weights(model)
    result = optimizer_of(model).update([micro_batch()], lambda _: ((model(X) * 0).abs().sqrt().sum(), {}))
    assert not result.applied and not math.isfinite(result.grad_norm) and same(before, weights(model))


def test_one_bad_micro_batch_among_good_ones_spoils_the_update() -> None:
    model = model_of()
    before = weights(model)
    factors = iter([1.0, float("nan"), 1.0])
    result = optimizer_of(model).update([micro_batch()] * 3, lambda m: linear(model, next(factors))(m))
    assert not result.applied and same(before, weights(model))


def test_the_third_bad_update_in_a_row_stops_the_run_with_finite_weights() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.update([micro_batch()], linear(model))
    before = weights(model)
    bad = linear(model, float("nan"))
    for _ in range(2):
        assert not optimizer.update([micro_batch()], bad).applied
    with pytest.raises(NonFiniteError, match="3 updates in a row") as caught:
        optimizer.update([micro_batch()], bad)
    assert caught.value.exit_code == 70 and same(before, weights(model))


def test_a_good_update_in_between_starts_the_count_anew() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    for factor in (math.nan, math.nan, 1.0, math.nan, math.nan, 1.0):
        assert optimizer.update([micro_batch()], linear(model, factor)).applied == (factor == 1.0)


def test_what_was_not_finite_is_named_by_rank_micro_batch_sample_and_parameter() -> None:
    """The loss of micro-batch 1 is not a number; who knows the sample is asked about that micro-batch alone."""
    model = model_of()
    optimizer = optimizer_of(model)
    asked: list[MicroBatch] = []

    def blame(suspect: MicroBatch) -> str:
        assert not torch.is_grad_enabled()
        asked.append(suspect)
        return "sample 4"

    rows = [micro_batch() for _ in range(3)]
    factors = iter([1.0, math.nan, math.inf])
    result = optimizer.update(rows, lambda m: linear(model, next(factors))(m), blame=blame)
    infinite = float(model(X).sum().detach()) * math.inf
    assert result.problem == (
        f"rank 0: loss is nan at micro-batch 1 (sample 4), loss is {infinite} at micro-batch 2, "
        "gradient is not finite in weight, bias"
    )
    assert len(asked) == 1 and asked[0] is rows[1]
    assert optimizer.update([micro_batch()], linear(model)).problem == ""


def test_of_many_parameters_the_first_are_named_and_the_rest_counted() -> None:
    model = nn.ModuleList([model_of() for _ in range(3)])
    result = optimizer_of(model).update(
        [micro_batch()], lambda _: (sum((layer(X) * 0).abs().sqrt().sum() for layer in model), {})
    )
    assert result.problem == "rank 0: gradient is not finite in 0.weight, 0.bias, 1.weight and 3 more"


def test_every_skipped_update_warns_and_the_last_error_says_why() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    try:
        optimizer.update([micro_batch()], linear(model))
        for _ in range(2):
            optimizer.update([micro_batch()], linear(model, math.nan))
        with pytest.raises(NonFiniteError, match="rank 0: loss is nan at micro-batch 0, gradient is not finite in"):
            optimizer.update([micro_batch()], linear(model, math.nan))
    finally:
        logger.remove(sink)
    assert [line.split(":")[0] for line in lines] == [
        "update 2 is skipped, 1 in a row",
        "update 2 is skipped, 2 in a row",
    ]


# ---- its state


def test_saved_and_loaded_in_the_middle_is_the_same_bit_for_bit() -> None:
    """Warmup, phase, moments and the count of skipped updates all go on where they were."""
    factors = [1.0, -2.0, math.nan, math.nan, 0.5, 3.0, -1.0]
    whole, optimizer = head_first(3, lr=0.05, weight_decay=0.1)
    for factor in factors:
        optimizer.update([micro_batch()], both(whole, body=2 * factor, head=factor))
    for cut in range(len(factors)):
        model, first = head_first(3, lr=0.05, weight_decay=0.1)
        for factor in factors[:cut]:
            first.update([micro_batch()], both(model, body=2 * factor, head=factor))
        resumed, second = head_first(3, lr=0.05, weight_decay=0.1)
        resumed.load_state_dict(model.state_dict())
        second.load_state_dict(first.state_dict())
        assert second.lr == first.lr
        for factor in factors[cut:]:
            second.update([micro_batch()], both(resumed, body=2 * factor, head=factor))
        assert same(weights(whole), weights(resumed)), f"cut after {cut} updates"


def test_skipped_updates_before_a_save_count_after_it() -> None:
    model = model_of()
    first, second = optimizer_of(model), optimizer_of(model)
    for _ in range(2):
        first.update([micro_batch()], linear(model, math.nan))
    second.load_state_dict(first.state_dict())
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        second.update([micro_batch()], linear(model, math.nan))


@pytest.mark.parametrize("missing", ["num_updates", "skipped_in_a_row", "moments"])
def test_a_state_without_one_of_its_parts_is_refused(missing: str) -> None:
    optimizer = optimizer_of(model_of())
    state = optimizer.state_dict()
    del state[missing]
    with pytest.raises(ContractError, match=missing):
        optimizer.load_state_dict(state)


# ---- sums


def test_sums_add_and_maxima_do_not() -> None:
    total = {"tokens": 2.0, "gap_max": -3.0}
    add_sums(total, {"tokens": 3.0, "gap_max": -5.0, "late": 1.0, "late_max": -2.0})
    assert total == {"tokens": 5.0, "gap_max": -3.0, "late": 1.0, "late_max": -2.0}
