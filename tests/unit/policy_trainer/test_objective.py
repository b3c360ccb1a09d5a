"""The whole objective against float64: every denominator, KL, entropy, choice of old policy, however it is packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.trainer import PolicyTrainer
from services.config.train import PolicyConfig
from services.packing.grid import build_grid
from services.wire.errors import ContractError
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample
from tests import trainers
from tests.architectures import VOCABULARY, build, own_attention
from tests.samples import make_sample

TEMPERATURE = 0.8
CONSTANTS = {"dis": {"eps_low": 0.3, "eps_high": 5.0}, "ppo_clip": {"eps_low": 0.2, "eps_high": 0.3}}
MASKS = [[1, 1, 0, 1], [1] * 5, [1], [0, 0, 1, 0, 1, 1, 1]]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return build(tmp_path, "gemma2")


@pytest.fixture
def rows(model: PreTrainedModel, tmp_path: Path) -> list[TrainingSample]:
    """Four samples of uneven lengths whose log-probabilities lie around the model's own."""
    rng, out = np.random.default_rng(1), []
    twin = own_attention(model, tmp_path).double()
    for number, mask in enumerate(MASKS):
        sample = make_sample(mask, trace_id=f"t{number}", group_id=f"g{number}", prompt=2)
        branch = sample.branch
        branch.token_ids = rng.integers(3, VOCABULARY, sample.num_tokens).astype(np.uint32)
        own = own_logprobs(twin, sample)[0].detach().numpy()
        branch.logprobs[branch.action_mask] = own + rng.normal(0, 0.3, len(own))
        sample.advantages = np.where(branch.action_mask, rng.normal(size=sample.num_tokens), 0.0)
        out.append(sample)
    return out


def own_logprobs(twin: PreTrainedModel, sample: TrainingSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [n] at the action tokens, in f64, the sequence alone."""
    ids = torch.from_numpy(sample.branch.token_ids.astype(np.int64))
    t_n = torch.from_numpy(np.flatnonzero(sample.branch.action_mask))
    logprobs = (twin(input_ids=ids[None], use_cache=False).logits[0, t_n - 1] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, ids[t_n, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def items(rows: list[TrainingSample], *, num_ranks: int = 1, seq_len: int = 32, loss: str = "dis", **more) -> list:
    return build_grid(
        rows,
        stream="policy",
        seq_len=seq_len,
        num_data_ranks=num_ranks,
        run_id="run",
        epoch=1,
        step=4,
        policy_version=4,
        temperature=TEMPERATURE,
        loss_name=loss,
        loss_constants=CONSTANTS[loss],
        **more,
    )


def trainer_of(model: PreTrainedModel, lr: float = 0.0, **settings: Any) -> PolicyTrainer:
    config = PolicyConfig.model_validate({"optim": {"lr": lr, "max_grad_norm": 1e9}} | settings)
    return trainers.trainer_of(model, config)


def perturb(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))


def gradient_of(trainer: PolicyTrainer, model: PreTrainedModel, grid: list[GridItem]) -> torch.Tensor:
    """The gradient that the ranks' items add up to."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for item in grid:
        trainer.train(item)
        total += torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    return total


def reference_gradient(
    twin: PreTrainedModel,
    frozen: PreTrainedModel,
    rows: list[TrainingSample],
    *,
    denominator: str,
    kl: str | None,
    entropy: float,
) -> torch.Tensor:
    """DIS with penalty and bonus, sample by sample, by formulas written out here."""
    num_tokens = sum(int(row.branch.action_mask.sum()) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        mask = row.branch.action_mask
        assert row.advantages is not None
        rollout = torch.from_numpy(row.branch.logprobs[mask]).double()
        advantages = torch.from_numpy(row.advantages[mask].astype(np.float32)).double()
        logprobs, entropies = own_logprobs(twin, row)
        ratio = (logprobs - rollout).exp()
        kept = ((ratio > 0.7) & (ratio < 6.0)).double()
        tokens = -(kept * ratio).detach() * advantages * logprobs - entropy * entropies
        if kl is not None:
            d = logprobs - own_logprobs(frozen, row)[0].detach()
            tokens = tokens + 0.1 * ratio * {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kl]
        weight = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / (len(rows) * len(logprobs)),
            "constant": 1 / (len(rows) * 7),
        }[denominator]
        loss = loss + weight * tokens.sum()
    twin.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])


CASES = [
    ("token_mean", None, 0.0),
    ("sequence_mean", None, 0.0),
    ("constant", None, 0.0),
    ("token_mean", "k1", 0.0),
    ("token_mean", "k2", 0.02),
    ("sequence_mean", "k3", 0.02),
]


@pytest.mark.parametrize(("denominator", "kl", "entropy"), CASES)
def test_the_gradient_is_that_of_the_formulas_however_the_samples_are_packed(
    denominator: str, kl: str | None, entropy: float, model: PreTrainedModel, rows: list[TrainingSample], tmp_path: Path
) -> None:
    """Scenario: all in one micro-batch, one sample in each, reversed, three ranks with dummies on one of them."""
    settings: dict[str, Any] = {"entropy_coef": entropy}
    if kl is not None:
        settings["kl"] = {"coef": 0.1, "type": kl}
    trainer, frozen = trainer_of(model, **settings), own_attention(model, tmp_path).double()
    perturb(model)
    header = {"denominator": denominator, "denominator_tokens": 7 if denominator == "constant" else 0}
    expected = reference_gradient(
        own_attention(model, tmp_path).double(), frozen, rows, denominator=denominator, kl=kl, entropy=entropy
    )
    layouts = [items(rows, **header), items(rows, seq_len=9, **header), items(rows[::-1], **header)]
    layouts.append(items(rows, num_ranks=3, seq_len=20, **header))
    assert any(0 in item.arrays["sample_counts"] for item in items(rows, num_ranks=5, **header))
    layouts.append(items(rows, num_ranks=5, **header))
    for grid in layouts:
        found = gradient_of(trainer, model, grid)
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_the_reported_loss_is_the_surrogate_over_its_own_denominator(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    """Four samples of 3, 5, 1 and 4 loss tokens: 13 tokens, 4 samples, 28 constant tokens."""
    losses = {}
    for denominator in ("token_mean", "sequence_mean", "constant"):
        (item,) = items(rows, denominator=denominator, denominator_tokens=7 if denominator == "constant" else 0)
        losses[denominator] = trainer_of(model).train(item)["policy/loss"]
    assert losses["token_mean"] * 13 == pytest.approx(losses["constant"] * 28)
    alone = [trainer_of(model).train(items([row])[0])["policy/loss"] for row in rows]
    assert losses["sequence_mean"] == pytest.approx(float(np.mean(alone)), rel=1e-5)


def test_a_constant_denominator_without_its_number_is_refused(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    with pytest.raises(ContractError, match="constant denominator of 0"):
        trainer_of(model).train(items(rows, denominator="constant")[0])


def test_coefficients_of_zero_give_the_very_same_weights_and_keep_no_reference(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    """B24."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ends = []
    for settings in ({}, {"kl": {"coef": 0.0, "type": "k2"}, "entropy_coef": 0.0}):
        model.load_state_dict(start)
        trainer = trainer_of(model, lr=1e-3, **settings)
        assert trainer._reference is None
        assert "policy/kl_reference" not in trainer.train(items(rows)[0])
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not torch.equal(ends[0][0], start[next(iter(start))])


def test_the_reference_stays_where_the_run_began_and_its_divergence_is_reported(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    trainer = trainer_of(model, lr=1e-3, kl={"coef": 0.1})
    first, second = (trainer.train(items(rows)[0])["policy/kl_reference"] for _ in range(2))
    assert first == pytest.approx(0.0, abs=1e-9) and second > 1e-6


def test_a_large_penalty_keeps_the_policy_near_its_reference(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    start, ends = {name: tensor.clone() for name, tensor in model.state_dict().items()}, []
    for coef in (0.001, 100.0):
        model.load_state_dict(start)
        trainer = trainer_of(model, lr=1e-3, kl={"coef": coef})
        ends.append([trainer.train(items(rows)[0])["policy/kl_reference"] for _ in range(12)][-1])
    assert ends[1] < 0.2 * ends[0]


def test_an_entropy_bonus_raises_entropy(model: PreTrainedModel, rows: list[TrainingSample]) -> None:
    for row in rows:
        row.advantages = np.zeros(row.num_tokens)
    trainer = trainer_of(model, lr=1e-3, entropy_coef=1.0)
    first, *_, last = (trainer.train(items(rows)[0])["policy/entropy"] for _ in range(5))
    assert last > first + 0.01


# ---------------------------------------------------------------- whose log-probabilities are the old ones


def test_recomputed_log_probabilities_are_those_before_the_first_update(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    """The rollout's are off by e: against them every ratio is; against a forward of the same weights, none is."""
    for row in rows:
        row.branch.logprobs[row.branch.action_mask] -= 1.0
    (item,) = items(rows, loss="ppo_clip", num_mini_batches=2)
    rollout = trainer_of(model).train(item)
    still = trainer_of(model, old_logprobs="recomputed").train(item)
    assert rollout["policy/ratio_mean"] > 2.0 and still["policy/ratio_mean"] == 1.0
    assert still["policy/log_ratio_abs_max"] == 0.0 and still["policy/clip_fraction"] == 0.0
    assert still["policy/kl_rollout"] == pytest.approx(rollout["policy/kl_rollout"], rel=1e-6)
    moving = trainer_of(model, lr=1e-3, old_logprobs="recomputed").train(item)
    assert 0 < moving["policy/log_ratio_abs_max"] < 1.0  # the second mini-batch sees the first one's update


def test_recomputed_log_probabilities_do_not_depend_on_the_packing(
    model: PreTrainedModel, rows: list[TrainingSample]
) -> None:
    trainer = trainer_of(model, old_logprobs="recomputed")
    whole = gradient_of(trainer, model, items(rows, loss="ppo_clip"))
    for grid in (items(rows, loss="ppo_clip", seq_len=9), items(rows, loss="ppo_clip", num_ranks=5)):
        assert float((gradient_of(trainer, model, grid) - whole).norm() / whole.norm()) < 1e-5
