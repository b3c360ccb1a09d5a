"""How much memory a role takes on each rank, in bytes, before anything is started.

Legend: d bytes of a number in the compute type (2 or 4), T tokens that a rank holds of a bin, H hidden size, A and K
widths of all query and all key heads, F width of the feed-forward part, V vocabulary, C positions of a chunk of logits.

Notable:
- Parameters, gradients and moments are counted, not estimated: shards are cut along the first dimension and padded to
  equal size, as FSDP does it. Frozen parameters have no gradient and no moments; a tied head is counted once.
- Sharded layers are whole only while they compute: the one at work, the next on its way, and in the backward pass the
  gradients of one, on their way into a sum. What lies outside of layers is whole from its forward to its backward.
- Activations are what transformers' layers keep for the backward pass: normalisations their input in f32 and twice the
  output, attention its operands and results, the feed-forward part four times its width.
- The optimizer's own buffers fit where the activations were. What CUDA and its libraries take is not counted.
- Measured on one H200, a 0.6 B Qwen3 in bf16 with bins of 8,192 tokens, with checkpointing and without: torch's peak is
  within 3 % of the total.

Deviations: a bin is one sequence of `seq_len` tokens, every token in the loss; experts are visited evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from services.config.parts import is_part
from services.config.train import ClassificationConfig, LoraConfig, PolicyConfig, TrainModelConfig, ValueConfig
from services.packing.shapes import OUTPUT_HEAD, ModelShapes, Parameter

F32 = 4
COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}
CHUNK_ELEMENTS = 2**26
"""C x V: the log-probabilities' own constant, which is among what needs torch."""
LOGIT_COPIES = 4
"""Logits of a chunk in f32 at once: divided by the temperature, normalised, their exponentials, their gradient."""
ROUTER = "gate"
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank; the fullest one, where shards are uneven."""

    parameters: int
    """f32 shards, frozen ones included"""
    gradients: int
    moments: int
    """of AdamW on the device; 0 with `optim.offload`"""
    reference: int
    """the shards of a KL penalty's reference policy"""
    gathered: int
    """whole layers and their gradients at the fullest moment; 0 where nothing is sharded"""
    activations: int
    """kept for the backward pass of one bin"""
    workspace: int
    """the larger of a chunk of logits and one layer in its backward pass"""
    host_moments: int
    """of AdamW in host memory"""

    @property
    def total(self) -> int:
        """On the device."""
        return sum(asdict(self).values()) - self.host_moments

    def to_json(self) -> dict[str, int]:
        """Bytes by name."""
        return {f"{name}_bytes": value for name, value in asdict(self).items()} | {"total_bytes": self.total}


def estimate_memory(model: ModelShapes, role: PolicyConfig | ValueConfig, *, num_ranks: int) -> MemoryEstimate:
    """What one rank of a role takes.

    Args:
        model: What `model_shapes` knows of it.
        role: `[policy]` or `[value]`.
        num_ranks: Ranks of the group, all axes together.
    """
    held = held_parameters(model, role)
    trained = [parameter for parameter, trains in held if trains]
    layout = role.model
    parameters = F32 * sum(_shard(parameter, layout, num_ranks) for parameter, _ in held)
    gradients = F32 * sum(_shard(parameter, layout, num_ranks) for parameter in trained)
    tokens = math.ceil(layout.seq_len / layout.cp)
    kept, again = activation_bytes(
        model, tokens=tokens, compute_bytes=COMPUTE_BYTES[layout.dtype], checkpointing=layout.activation_checkpointing
    )
    has_reference = isinstance(role, PolicyConfig) and role.kl.coef > 0 and role.lora is None
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        moments=0 if role.optim.offload else 2 * gradients,
        reference=parameters if has_reference else 0,
        gathered=_gathered(held, layout, num_ranks),
        activations=kept,
        workspace=max(again, _head_bytes(model, role, tokens)),
        host_moments=2 * gradients if role.optim.offload else 0,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


def held_parameters(model: ModelShapes, role: PolicyConfig | ValueConfig) -> list[tuple[Parameter, bool]]:
    """Every parameter of the role and whether it trains: a critic has a value head in the place of the output head."""
    is_critic = isinstance(role, ValueConfig)
    base = [p for p in model.parameters if not (is_critic and p.name == OUTPUT_HEAD)]
    frozen = {p.name for p in base if role.lora is not None or any(is_part(p.name, name) for name in role.freeze)}
    held = [(p, p.name not in frozen) for p in base]
    if role.lora is not None:
        held += [(adapter, True) for adapter in _adapters(base, role.lora, role.freeze)]
    if is_critic:
        loss = role.loss
        outputs = loss.bins + 2 * loss.pad if isinstance(loss, ClassificationConfig) else 1
        held.append((Parameter("head.weight", (outputs, model.sizes["hidden_size"])), True))
        held.append((Parameter("head.bias", (outputs,)), True))
    return held


def _adapters(base: Sequence[Parameter], lora: LoraConfig, freeze: Sequence[str]) -> Iterable[Parameter]:
    """A and B of every linear layer that the targets name, and of fused experts where a target names those."""
    for parameter in base:
        path = parameter.name.removesuffix(".weight")
        is_stack = parameter.is_expert
        if not (is_stack or (len(parameter.shape) == 2 and path.rpartition(".")[2] not in (ROUTER, "embed_tokens"))):
            continue
        is_inner = not is_stack and parameter.name != OUTPUT_HEAD
        if not any((is_inner and target == ALL_LINEAR) or is_part(path, target) for target in lora.targets):
            continue
        if any(is_part(parameter.name, name) for name in freeze):
            continue
        num_experts = parameter.shape[0] if is_stack else 1
        rows, columns = parameter.shape[-2:]
        yield Parameter(f"{path}.lora_A.default.weight", (num_experts * lora.rank, columns))
        yield Parameter(f"{path}.lora_B.default.weight", (rows, num_experts * lora.rank))


def _shard(parameter: Parameter, layout: TrainModelConfig, num_ranks: int) -> int:
    """Elements of the fullest rank: rows of the first dimension over the ranks that share them."""
    rows, sharing = _rows(parameter, layout), num_ranks
    if parameter.is_expert and "lora" not in parameter.name:
        sharing = num_ranks // layout.ep
    return math.ceil(rows / sharing) * (parameter.size // parameter.shape[0])


def _rows(parameter: Parameter, layout: TrainModelConfig) -> int:
    """First dimension of what one rank computes with: all of it, or its own experts."""
    is_divided = parameter.is_expert and "lora" not in parameter.name
    return parameter.shape[0] // layout.ep if is_divided else parameter.shape[0]


def _gathered(held: Sequence[tuple[Parameter, bool]], layout: TrainModelConfig, num_ranks: int) -> int:
    """Whole parameters and gradients at the fullest moment of a backward pass."""
    if num_ranks == 1 and layout.dtype == "float32":
        return 0
    compute = COMPUTE_BYTES[layout.dtype]
    whole: dict[int | None, int] = {}
    moving: dict[int | None, int] = {}
    for parameter, trains in held:
        size = _rows(parameter, layout) * (parameter.size // parameter.shape[0])
        whole[parameter.layer] = whole.get(parameter.layer, 0) + size
        moving[parameter.layer] = moving.get(parameter.layer, 0) + (size if trains else 0)
    root = compute * (whole.pop(None, 0) + moving.pop(None, 0))
    largest = max(whole.values(), default=0)
    return root + 2 * compute * largest + (compute + F32) * max(moving.values(), default=0)


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def activation_bytes(model: ModelShapes, *, tokens: int, compute_bytes: int, checkpointing: bool) -> tuple[int, int]:
    """What is kept for the backward pass of a packed row, up to the final hidden states.

    Args:
        model: What `model_shapes` knows of it.
        tokens: T, of the row that the rank holds.
        compute_bytes: d.
        checkpointing: Whether layers are computed again in the backward pass.

    Returns:
        Bytes kept from forward to backward, and bytes besides these while one layer is in its backward pass.
    """
    hidden = model.sizes["hidden_size"]
    layers = _layer_bytes(model, tokens, compute_bytes)
    largest = max(layers, default=0)
    # gradients on their way through one layer: of the feed-forward part's three products, and of a norm in f32
    moving = tokens * (3 * compute_bytes * _width(model) + 2 * F32 * hidden)
    final_norm = tokens * hidden * (F32 + compute_bytes)
    if checkpointing:
        return len(layers) * tokens * hidden * compute_bytes + final_norm, largest + moving
    return sum(layers) + final_norm, moving


def _layer_bytes(model: ModelShapes, tokens: int, compute_bytes: int) -> list[int]:
    """What each layer keeps of a row."""
    sizes, d = model.sizes, compute_bytes
    hidden, head_dim = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_heads"] * head_dim, sizes["num_kv_heads"] * head_dim
    # torch's fused kernel for packed half precision needs no copies around it
    attention = (2 if d == 2 else 4) * d * queries + 2 * d * keys + F32 * sizes["num_heads"]
    if model.has_softcap:  # no fused kernel: every pair's score, before the softmax and after
        attention += 2 * F32 * sizes["num_heads"] * tokens
    feed_forward = 4 * d * _width(model)
    if model.experts_per_token:
        feed_forward += 2 * d * hidden * model.experts_per_token
    norms = dict.fromkeys(range(sizes["num_layers"]), 0)
    for parameter in model.parameters:
        if parameter.layer in norms and parameter.layer is not None and len(parameter.shape) == 1:
            norms[parameter.layer] += _norm_bytes(parameter.name, hidden, queries, keys, d)
    return [tokens * (attention + feed_forward + norm) for norm in norms.values()]


def _norm_bytes(name: str, hidden: int, queries: int, keys: int, d: int) -> int:
    """Of one token; what comes out of the norms of queries and keys is turned at once, and not kept."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if "norm" not in leaf:
        return 0
    if leaf in ("q_norm", "k_norm"):
        return (F32 + d) * (queries if leaf == "q_norm" else keys)
    return (F32 + 2 * d) * hidden


def _width(model: ModelShapes) -> int:
    """F: of all experts together that one token visits."""
    return model.sizes["intermediate_size"]


def _head_bytes(model: ModelShapes, role: PolicyConfig | ValueConfig, tokens: int) -> int:
    """A chunk of logits, or a critic's hidden states and values in f32."""
    if isinstance(role, PolicyConfig):
        chunk = min(tokens * model.sizes["vocab_size"], CHUNK_ELEMENTS)
        return chunk * (LOGIT_COPIES * F32 + COMPUTE_BYTES[role.model.dtype])
    return 2 * F32 * tokens * model.sizes["hidden_size"]
