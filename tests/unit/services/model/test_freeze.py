"""What `freeze` names in real architectures, that frozen parameters never move, and the updates of the head alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from services.config.parts import is_part
from services.config.train import OptimConfig
from services.model.freeze import freeze, is_head
from services.model.head import Critic
from services.model.layout import PackedLayout
from services.model.load import packed_logits
from services.training.optimizer import HeadOnly, Optimizer
from services.training.ranks import Ranks
from services.wire.errors import ConfigError
from services.wire.grids import MicroBatch
from tests.architectures import build, sequences

ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
HEADS = ["lm_head.weight", "model.embed_tokens.weight"]
MICRO_BATCH = MicroBatch(lengths=np.array([7], dtype="<u4"), arrays={}, spans=[])


def layers(names: list[str], *indices: int) -> set[str]:
    return {f"model.layers.{index}.{name}" for index in indices or (0, 1) for name in names}


def moved(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    return {name for name, tensor in model.named_parameters() if not torch.equal(before[name], tensor)}


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def logprob_loss(model: PreTrainedModel) -> torch.Tensor:
    (ids,) = sequences(7)
    logits = packed_logits(model, ids, PackedLayout.of([7]), torch.arange(7))
    return -logits.log_softmax(-1)[torch.arange(6), ids[1:]].sum()


# ---- names


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "attention", True),
        ("h.0.attn.c_attn.weight", "attention", True),
        ("layers.3.linear_attn.conv1d.weight", "attention", True),
        ("layers.3.cross_attn.q.weight", "attention", True),
        ("model.layers.0.post_attention_layernorm.weight", "attention", False),
        ("model.layers.0.self_attn.q_proj.weight", "attn", False),
        ("model.layers.0.self_attn.q_proj.weight", "layers.0", True),
        ("model.layers.10.self_attn.q_proj.weight", "layers.1", False),
        ("model.layers.0.self_attn.q_proj.weight", "layers.self_attn", False),
        ("model.layers.0.self_attn.q_proj.weight", "layers.0.attention.q_proj", True),
        ("model.norm.weight", "model.norm.weight.more", False),
        ("model.layers.0.mlp.gate_proj.weight", "mlp", True),
        ("model.layers.0.mlp.gate_proj.weight", "gate", False),
    ],
)
def test_a_name_means_whole_components_in_a_row(path: str, name: str, expected: bool) -> None:
    assert is_part(path, name) is expected


@pytest.mark.parametrize(
    ("architecture", "names", "expected"),
    [
        ("llama", ["attention"], layers(ATTENTION)),
        ("llama", ["mlp", "embed_tokens"], layers(DENSE) | {"model.embed_tokens.weight"}),
        ("qwen3-moe", ["attention"], layers(ATTENTION + QK_NORMS)),
        ("qwen3-moe", ["experts"], layers(EXPERTS)),
        ("qwen3-moe", ["mlp"], layers([*EXPERTS, "mlp.gate.weight"])),
        ("qwen3-moe", ["mlp.gate"], layers(["mlp.gate.weight"])),
        ("gemma2", ["attention"], layers(ATTENTION)),
        ("gemma3", ["self_attn", "layers.1.mlp"], layers(ATTENTION + QK_NORMS) | layers(DENSE, 1)),
        ("llama", [], set()),
    ],
)
def test_what_a_name_freezes(tmp_path: Path, architecture: str, names: list[str], expected: set[str]) -> None:
    model = build(tmp_path, architecture)
    frozen = freeze(model, names, role="value")
    assert set(frozen) == expected
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == expected
    assert not any("layernorm" in name for name in frozen)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_tied_tensor_is_frozen_by_either_name(tmp_path: Path, name: str) -> None:
    tied = build(tmp_path, "gemma3")
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight  # pyright: ignore
    assert sorted(freeze(tied, [name], role="policy")) == HEADS


def test_an_untied_head_is_frozen_by_its_own_name_alone(tmp_path: Path) -> None:
    assert freeze(build(tmp_path, "llama"), ["lm_head"], role="policy") == ["lm_head.weight"]


def test_every_name_that_matches_nothing_is_an_error_that_tells_the_parts(tmp_path: Path) -> None:
    model = build(tmp_path, "llama")
    with pytest.raises(ConfigError) as caught:
        freeze(model, ["attentoin", "mlp", "layers.2", "gate"], role="value")
    first, second, third = caught.value.problems
    assert first == (
        'value.freeze: "attentoin" matches no parameter of LlamaForCausalLM; its parts are: attention, model, '
        "embed_tokens, layers, self_attn, q_proj, k_proj, v_proj, o_proj, mlp, gate_proj, up_proj, down_proj, "
        "input_layernorm, post_attention_layernorm, norm, lm_head"
    )
    assert '"layers.2"' in second and '"gate"' in third
    assert all(p.requires_grad for p in model.parameters()), "an error freezes nothing"


def test_a_policy_must_have_something_to_train_and_a_critic_has_its_head(tmp_path: Path) -> None:
    everything = ["model", "lm_head"]
    with pytest.raises(ConfigError, match=r"policy\.freeze: nothing is left to train"):
        freeze(build(tmp_path, "llama"), everything, role="policy")
    critic = Critic(build(tmp_path, "llama"), head_init_std=0.1, seed=0)
    freeze(critic.backbone, ["layers", "embed_tokens", "norm"], role="value")
    assert [name for name, p in critic.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


# ---- training


@pytest.mark.parametrize(
    ("architecture", "names"), [("llama", ["attention"]), ("qwen3-moe", ["experts", "norm"]), ("gemma3", ["lm_head"])]
)
def test_after_steps_with_weight_decay_what_is_frozen_is_bit_equal_and_all_else_moved(
    tmp_path: Path, architecture: str, names: list[str]
) -> None:
    model = build(tmp_path, architecture)
    frozen = set(freeze(model, names, role="policy"))
    before = copies(model)
    config = OptimConfig(lr=0.01, weight_decay=0.5, max_grad_norm=1e9)
    optimizer = Optimizer(model, config, Ranks(), warmup_updates=0)
    for _ in range(3):
        result = optimizer.update([MICRO_BATCH], lambda _: (logprob_loss(model), {}))
        assert result.applied
    assert moved(before, model) == set(before) - frozen
    assert all(p.grad is None for name, p in model.named_parameters() if name in frozen)


def test_the_gradient_norm_counts_only_what_trains(tmp_path: Path) -> None:
    """The norm told is that of an unfrozen model's gradients without the frozen ones."""
    model, free = build(tmp_path, "llama"), build(tmp_path, "llama")
    frozen = set(freeze(model, ["attention", "embed_tokens"], role="policy"))
    logprob_loss(free).backward()
    squares = {n: float(p.grad.double().square().sum()) for n, p in free.named_parameters() if p.grad is not None}
    config = OptimConfig(lr=0.01)
    result = Optimizer(model, config, Ranks(), warmup_updates=0).update(
        [MICRO_BATCH], lambda _: (logprob_loss(model), {})
    )
    expected = sum(square for name, square in squares.items() if name not in frozen) ** 0.5
    assert result.grad_norm == pytest.approx(expected, rel=1e-6)
    assert expected < 0.99 * sum(squares.values()) ** 0.5


def test_head_only_updates_leave_the_backbone_and_its_adam_state_as_if_they_had_not_been(tmp_path: Path) -> None:
    """Scenario: two updates of the head, two of everything. Result: as two optimizers, the backbone's begun late."""
    (ids,), layout = sequences(7), PackedLayout.of([7])

    def critic() -> Critic:
        return Critic(build(tmp_path, "llama"), head_init_std=0.1, seed=0)

    def loss_of(critic: Critic) -> torch.Tensor:
        return (critic(ids, layout) - 1.0).square().sum()

    ours, reference = critic(), critic()
    assert {name for name, _ in ours.named_parameters() if is_head(name)} == {"head.weight", "head.bias"}
    config = OptimConfig(lr=0.01, weight_decay=0.1, max_grad_norm=1e9)
    optimizer = Optimizer(ours, config, Ranks(), warmup_updates=0, head_only=HeadOnly(2, is_head))
    start = copies(ours)
    for update in range(2):
        result = optimizer.update([MICRO_BATCH], lambda _: (loss_of(ours), {}))
        assert moved(start, ours) == {"head.weight", "head.bias"}, update
        norms = [p.grad.double().norm() for p in ours.head.parameters() if p.grad is not None]
        assert result.grad_norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-6)

    settings = {"lr": 0.01, "betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": 0.1}
    head_adam = torch.optim.AdamW(reference.head.parameters(), **settings)
    backbone_adam = torch.optim.AdamW(reference.backbone.parameters(), **settings)
    for update in range(4):
        reference.zero_grad()
        loss_of(reference).backward()
        head_adam.step()
        if update >= 2:
            optimizer.update([MICRO_BATCH], lambda _: (loss_of(ours), {}))
            backbone_adam.step()
    for (name, one), two in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=2e-6), name
    assert len(moved(start, ours)) == len(start)
