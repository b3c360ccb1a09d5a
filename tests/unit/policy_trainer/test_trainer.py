"""One policy step: the loss that the header names, log-probabilities at its temperature, then a published version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.trainer import PolicyTrainer
from services.config.train import PolicyConfig
from services.model.freeze import freeze
from services.model.snapshot import verify_snapshot
from services.model.tiny import byte_tokenizer
from services.packing.grid import build_grid
from services.training.board import StatusBoard
from services.wire.errors import ContractError
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample, VersionSpan
from tests import trainers
from tests.architectures import VOCABULARY, build, own_attention
from tests.samples import make_sample

DIS = {"eps_low": 0.3, "eps_high": 5.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return build(folder, "gemma2")  # its logits are capped at the end, which a trainer must not forget


def trainer_of(model: PreTrainedModel, folder: Path, board: StatusBoard | None = None, **settings) -> PolicyTrainer:
    config = PolicyConfig.model_validate({"optim": {"lr": 1e-3}} | settings)
    board = board or StatusBoard("policy")
    return trainers.trainer_of(model, config, folder=folder, board=board)


def samples(model: PreTrainedModel, folder: Path, *, temperature: float, version: int = 4) -> list[TrainingSample]:
    """Samples whose log-probabilities are the model's own at a temperature, by transformers' own attention."""
    twin, rng = own_attention(model, folder), np.random.default_rng(1)
    out = []
    for number, mask in enumerate([[1, 1, 0, 1], [1] * 5]):
        sample = make_sample(mask, trace_id=f"t{number}", prompt=2)
        branch = sample.branch
        branch.token_ids = rng.integers(3, VOCABULARY, sample.num_tokens).astype(np.uint32)
        ids = torch.from_numpy(branch.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = twin(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        own = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        branch.logprobs = np.where(branch.action_mask, np.concatenate([[0.0], own]), 0.0).astype(np.float32)
        branch.version_spans = [VersionSpan(start, end, version) for start, end, _ in branch.version_spans]
        sample.advantages = np.where(branch.action_mask, 1.0 - 2 * number, 0.0)
        out.append(sample)
    return out


def grid(rows: list[TrainingSample], *, temperature: float = 1.0, loss_name: str = "dis", parts: int = 1) -> GridItem:
    (item,) = build_grid(
        rows,
        stream="policy",
        seq_len=32,
        num_data_ranks=1,
        run_id="run",
        epoch=1,
        step=4,
        policy_version=4,
        temperature=temperature,
        loss_name=loss_name,
        loss_constants=DIS if loss_name == "dis" else {},
        num_mini_batches=parts,
    )
    return item


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def changed(before: list[torch.Tensor], model: PreTrainedModel) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_on_its_own_samples_the_ratio_is_one_at_the_temperature_of_sampling(
    temperature: float, model: PreTrainedModel, folder: Path
) -> None:
    """T06: at any other temperature, and without the architecture's last cap, it would not be."""
    rows = samples(model, folder, temperature=temperature)
    row = trainer_of(model, folder).train(grid(rows, temperature=temperature))
    assert row["policy/mismatch_tokens"] == 8 and row["policy/mismatch_max"] < 1e-4
    assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert row["policy/dis_reject_low"] == row["policy/dis_reject_high"] == 0


def test_another_temperature_than_that_of_sampling_shows_as_a_mismatch(model: PreTrainedModel, folder: Path) -> None:
    rows = samples(model, folder, temperature=0.6)
    pairs = zip(rows, samples(model, folder, temperature=1.0), strict=True)
    gaps = np.concatenate([(b.branch.logprobs - a.branch.logprobs)[a.branch.loss_mask] for a, b in pairs])
    row = trainer_of(model, folder).train(grid(rows, temperature=1.0))
    assert row["policy/mismatch_max"] > 0.1
    assert row["policy/mismatch_log_ratio"] == pytest.approx(gaps.mean(), abs=1e-4)
    assert row["policy/mismatch_mean"] == pytest.approx(np.abs(gaps).mean(), abs=1e-4)


def test_mismatch_is_measured_before_the_first_of_several_updates(model: PreTrainedModel, folder: Path) -> None:
    """Later mini-batches meet weights that sampled nothing."""
    row = trainer_of(model, folder).train(grid(samples(model, folder, temperature=1.0), parts=2))
    assert 0 < row["policy/mismatch_tokens"] < row["policy/loss_tokens"] == 8
    assert row["policy/mismatch_max"] < 1e-4


def test_mismatch_is_measured_on_tokens_of_the_trained_version_only(model: PreTrainedModel, folder: Path) -> None:
    rows = samples(model, folder, temperature=1.0, version=3)
    rows[0].branch.version_spans = [VersionSpan(2, 4, 4), VersionSpan(5, 6, 3)]
    assert trainer_of(model, folder).train(grid(rows))["policy/mismatch_tokens"] == 2


def test_one_update_per_mini_batch(model: PreTrainedModel, folder: Path) -> None:
    rows = samples(model, folder, temperature=1.0)
    trainer = trainer_of(model, folder)
    rows[1].group_id = "g1"
    trainer.train(grid(rows, parts=2))
    assert trainer.optimizer.num_updates == 2


def test_a_step_moves_the_weights_and_a_control_run_does_not(model: PreTrainedModel, folder: Path) -> None:
    before, rows = weights(model), samples(model, folder, temperature=1.0)
    trainer_of(model, folder, optim={"lr": 0.0}).train(grid(rows))
    assert changed(before, model) == 0
    row = trainer_of(model, folder).train(grid(rows))
    assert changed(before, model) == len(before) and row["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "still"),
    [
        ({}, set()),
        ({"freeze": ["attention", "embed_tokens"]}, {"attention", "embeddings"}),
        ({"freeze": ["mlp"]}, {"mlp"}),
        ({"optim": {"lr": 0.0}}, {"attention", "mlp", "embeddings", "norms"}),
    ],
)
def test_the_row_says_which_parts_moved_and_which_did_not(
    settings: dict, still: set[str], model: PreTrainedModel, folder: Path
) -> None:
    rows = samples(model, folder, temperature=1.0)
    freeze(model, settings.get("freeze", []), role="policy")
    row = trainer_of(model, folder, **settings).train(grid(rows))
    moved = {name.removeprefix("policy/moved/"): value for name, value in row.items() if "/moved/" in name}
    assert moved.keys() == {"attention", "mlp", "embeddings", "norms"}, "the output head is the embedding"
    assert {part for part, how_far in moved.items() if how_far == 0.0} == still
    assert moved.pop("norms") in (0.0, 1.0), "gemma's begin at zero"
    assert all(1e-5 < how_far < 0.1 for part, how_far in moved.items() if part not in still)


def test_advantages_of_zero_give_a_gradient_of_zero_and_nothing_non_finite(
    model: PreTrainedModel, folder: Path
) -> None:
    rows = samples(model, folder, temperature=1.0)
    for sample in rows:
        sample.advantages = np.zeros(sample.num_tokens)
    before = weights(model)
    row = trainer_of(model, folder).train(grid(rows))
    assert row["policy/grad_norm"] == 0.0 and row["policy/nonfinite"] == 0 and changed(before, model) == 0


def test_a_batch_without_a_loss_token_takes_no_step(model: PreTrainedModel, folder: Path) -> None:
    rows = samples(model, folder, temperature=1.0)
    for sample in rows:
        sample.policy_loss_mask = np.zeros(sample.num_tokens, dtype=bool)
    trainer = trainer_of(model, folder)
    row = trainer.train(grid(rows))
    assert row["policy/empty_batch"] == 1 and trainer.optimizer.num_updates == 0


def test_an_unknown_loss_stops_training_and_names_those_there_are(model: PreTrainedModel, folder: Path) -> None:
    before = weights(model)
    with pytest.raises(ContractError, match=r"unknown policy loss 'reinforce'; known: dis, ppo_clip"):
        trainer_of(model, folder).train(grid(samples(model, folder, temperature=1.0), loss_name="reinforce"))
    assert changed(before, model) == 0


def test_after_a_step_the_next_version_is_there_before_the_board_says_so(model: PreTrainedModel, folder: Path) -> None:
    board = StatusBoard("policy")
    trainer_of(model, folder, board).after_step(4)
    published = board.snapshot().published
    assert published["version"] == 5 and verify_snapshot(Path(published["path"])) == 5
    assert Path(published["path"]) == folder / "weights" / "v000005"
