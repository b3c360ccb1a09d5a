"""The memory estimate against what torch holds: parameters, gradients and moments exactly, activations nearly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from services.config.train import OptimConfig, PolicyConfig, ValueConfig
from services.model import logprobs
from services.model.freeze import freeze
from services.model.head import Critic
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_hidden
from services.model.lora import add_lora
from services.model.shard import checkpoint_activations
from services.packing import memory
from services.packing.memory import MemoryEstimate, activation_bytes, estimate_memory
from services.packing.shapes import ModelShapes, model_shapes
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks

F32 = 4
KEPT_FACTOR = 1.25
"""By so much at most the estimate of what is kept for the backward pass is off, either way."""
BACKWARD_FACTOR = 1.5
"""With checkpointing a layer's gradients in flight are in the estimate, and not in what is measured here."""
NUM_LAYERS, NUM_TOKENS = 4, 256
KINDS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def folder_of(folder: Path, kind: str, **changes: Any) -> Path:
    shape = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": NUM_LAYERS}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
    name, own = KINDS[kind]
    getattr(transformers, name)(**shape | own | changes).save_pretrained(folder)
    return folder


def shapes_of(folder: Path) -> ModelShapes:
    shapes = model_shapes(folder)
    assert shapes is not None
    return shapes


def policy(**keys: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(keys)


def value(**keys: Any) -> ValueConfig:
    return ValueConfig.model_validate(keys)


def assert_holds(estimate: MemoryEstimate, model: nn.Module) -> None:
    """Parameters, gradients and moments of a model on one rank, to the byte."""
    optimizer = Optimizer(model, OptimConfig(lr=0.1), Ranks(), warmup_updates=0)
    state = optimizer.state_dict()["moments"].values()
    assert estimate.parameters == F32 * sum(p.numel() for p in model.parameters())
    assert estimate.gradients == F32 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert estimate.moments == F32 * sum(entry[key].numel() for entry in state for key in ("exp_avg", "exp_avg_sq"))


# ---- what is counted


@each_kind
def test_parameters_gradients_and_moments_of_a_policy_are_exact(kind: str, tmp_path: Path) -> None:
    model = load_causal_lm(folder_of(tmp_path, kind), init="random")
    assert_holds(estimate_memory(shapes_of(tmp_path), policy(), num_ranks=1), model)


@each_kind
@pytest.mark.parametrize(
    ("loss", "num_outputs"), [({"type": "mse"}, 1), ({"type": "hl_gauss", "bins": 11, "pad": 2}, 15)]
)
def test_those_of_a_critic_have_a_value_head_and_no_output_head(
    kind: str, loss: dict[str, Any], num_outputs: int, tmp_path: Path
) -> None:
    model = load_causal_lm(folder_of(tmp_path, kind), init="random")
    points = None if num_outputs == 1 else torch.linspace(0, 1, num_outputs)
    critic = Critic(model, head_init_std=0.0, seed=0, points=points)
    assert_holds(estimate_memory(shapes_of(tmp_path), value(loss=loss), num_ranks=1), critic)


@each_kind
@pytest.mark.parametrize("names", [["attention"], ["mlp", "layers.0"], ["embed_tokens"]])
def test_frozen_parts_have_neither_gradients_nor_moments(kind: str, names: list[str], tmp_path: Path) -> None:
    model = load_causal_lm(folder_of(tmp_path, kind), init="random")
    freeze(model, names, role="policy")
    estimate = estimate_memory(shapes_of(tmp_path), policy(freeze=names), num_ranks=1)
    assert_holds(estimate, model)
    assert estimate.gradients < estimate.parameters


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", ["all-linear"]),
        ("llama", ["q_proj", "mlp"]),
        ("qwen3-moe", ["all-linear"]),
        ("qwen3-moe", ["attention", "experts"]),
    ],
)
def test_of_an_adapted_model_the_adapters_alone_train(kind: str, targets: list[str], tmp_path: Path) -> None:
    config = policy(lora={"rank": 4, "targets": targets})
    model = load_causal_lm(folder_of(tmp_path, kind), init="random")
    assert config.lora is not None
    add_lora(model, config.lora, frozen=["layers.1"], role="policy", seed=0)
    config = config.model_copy(update={"freeze": ["layers.1"]})
    assert_holds(estimate_memory(shapes_of(tmp_path), config, num_ranks=1), model)


@each_kind
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), (3, 1), (4, 2), (8, 8)])
def test_shards_are_the_rows_of_the_fullest_rank(kind: str, num_ranks: int, ep: int, tmp_path: Path) -> None:
    """torch.chunk is how FSDP cuts; experts are first divided, then cut over the ranks that hold the same ones."""
    model = load_causal_lm(folder_of(tmp_path, kind), init="random")
    expected = 0
    for name, parameter in model.named_parameters():
        share, sharing = parameter, num_ranks
        if ".experts." in name:
            share, sharing = parameter.chunk(ep)[0], num_ranks // ep
        expected += F32 * share.chunk(sharing)[0].numel()
    estimate = estimate_memory(shapes_of(tmp_path), policy(model={"ep": ep}), num_ranks=num_ranks)
    assert estimate.parameters == estimate.gradients == expected and estimate.moments == 2 * expected


def test_offloaded_moments_are_in_host_memory_and_not_in_the_total(tmp_path: Path) -> None:
    shapes = shapes_of(folder_of(tmp_path, "llama"))
    plain, offloaded = (estimate_memory(shapes, policy(optim={"offload": o}), num_ranks=2) for o in (False, True))
    assert (offloaded.moments, offloaded.host_moments) == (0, plain.moments) and plain.host_moments == 0
    assert plain.total - offloaded.total == plain.moments > 0


def test_a_kl_penalty_keeps_a_second_policy_unless_the_base_of_adapters_is_one(tmp_path: Path) -> None:
    shapes = shapes_of(folder_of(tmp_path, "llama"))
    with_kl = estimate_memory(shapes, policy(kl={"coef": 0.1}), num_ranks=2)
    assert with_kl.reference == with_kl.parameters > 0
    assert estimate_memory(shapes, policy(kl={"coef": 0.1}, lora={}), num_ranks=2).reference == 0
    assert estimate_memory(shapes, policy(), num_ranks=2).reference == 0


def test_what_is_whole_at_a_time_by_hand(tmp_path: Path) -> None:
    """bf16 over two ranks: the root and its gradient, two layers, one layer's gradient and its f32 copy for the sum."""
    model = load_causal_lm(folder_of(tmp_path, "llama"), init="random")
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - NUM_LAYERS * layer
    shapes = shapes_of(tmp_path)
    estimate = estimate_memory(shapes, policy(model={"dtype": "bfloat16"}), num_ranks=2)
    assert estimate.gathered == 2 * 2 * root + 2 * 2 * layer + (2 + 4) * layer
    assert estimate_memory(shapes, policy(), num_ranks=1).gathered == 0, "one rank in f32 is not sharded"
    assert estimate_memory(shapes, policy(model={"dtype": "bfloat16"}), num_ranks=1).gathered == estimate.gathered
    frozen = policy(model={"dtype": "bfloat16"}, freeze=["layers", "embed_tokens", "norm"])
    assert estimate_memory(shapes, frozen, num_ranks=2).gathered == 2 * root + 2 * 2 * layer


def test_the_total_is_the_sum_of_what_is_on_the_device(tmp_path: Path) -> None:
    estimate = MemoryEstimate(1, 20, 300, 4000, 50_000, 600_000, 7_000_000, 80_000_000)
    assert estimate.total == 7_654_321
    json = estimate.to_json()
    assert json["total_bytes"] == 7_654_321 and json["host_moments_bytes"] == 80_000_000 and len(json) == 9


# ---- what is estimated


def saved_bytes(model: nn.Module, compute: Callable[[], torch.Tensor]) -> int:
    """Storages that autograd keeps, each once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in kept.values())


def within(factor: float, one: float, other: float) -> bool:
    return 1 / factor <= one / other <= factor


@each_kind
@pytest.mark.parametrize(("dtype", "compute_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_activations_are_close_to_what_autograd_keeps(
    kind: str, dtype: str, compute_bytes: int, tmp_path: Path
) -> None:
    """All layers kept; and with checkpointing their inputs, and one layer computed again."""
    model = load_causal_lm(folder_of(tmp_path, kind), init="random", dtype=dtype)
    token_ids, layout = torch.arange(NUM_TOKENS) % 67, PackedLayout.of([NUM_TOKENS])
    found = {}
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(model)
        measured = saved_bytes(model, lambda: packed_hidden(model.base_model, token_ids, layout))
        kept, again = activation_bytes(
            shapes_of(tmp_path), tokens=NUM_TOKENS, compute_bytes=compute_bytes, checkpointing=checkpointing
        )
        assert within(KEPT_FACTOR, kept, measured), (kept, measured)
        found[checkpointing] = measured, kept + again
    layer = found[False][0] / NUM_LAYERS
    assert within(BACKWARD_FACTOR, found[True][1], found[True][0] + layer)
    assert within(BACKWARD_FACTOR, found[False][1], found[False][0])
    assert found[True][1] < found[False][1]


def test_capped_scores_are_kept_for_every_pair(tmp_path: Path) -> None:
    settings = {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_size": 64, "num_hidden_layers": 2}
    settings |= {"vocab_size": 67, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.Gemma2Config(**settings).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, init="random")
    for num_tokens in (64, 512):
        row = torch.arange(num_tokens) % 67, PackedLayout.of([num_tokens])
        measured = saved_bytes(model, lambda row=row: packed_hidden(model.base_model, *row))
        kept, _ = activation_bytes(shapes_of(tmp_path), tokens=num_tokens, compute_bytes=4, checkpointing=False)
        assert within(KEPT_FACTOR, kept, measured), (num_tokens, kept, measured)


def test_context_ranks_share_a_bin(tmp_path: Path) -> None:
    shapes = shapes_of(folder_of(tmp_path, "llama"))
    whole, half = (estimate_memory(shapes, policy(model={"seq_len": 512, "cp": cp}), num_ranks=4) for cp in (1, 2))
    assert half.activations * 2 == whole.activations > 0
    assert half.parameters == whole.parameters, "parameters are cut over all ranks either way"


def test_logits_come_in_chunks_of_the_size_that_the_trainer_takes(tmp_path: Path) -> None:
    """A vocabulary of 150,000 and 16,384 tokens: 2^26 elements at a time, not 2.5 billion."""
    assert memory.CHUNK_ELEMENTS == logprobs.CHUNK_ELEMENTS
    shapes = shapes_of(folder_of(tmp_path, "llama", vocab_size=150_000))
    long = {"seq_len": 16_384, "activation_checkpointing": True, "dtype": "bfloat16"}
    assert estimate_memory(shapes, policy(model=long), num_ranks=1).workspace == 2**26 * (4 * 4 + 2)
    critic = estimate_memory(shapes, value(model=long), num_ranks=1)
    assert critic.workspace < 2**26 * 4, "a critic has no logits"
