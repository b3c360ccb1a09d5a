"""Adapters: where they go, that the base stays, and that merged, saved and reloaded they are the same model."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from services.config.train import LoraConfig, OptimConfig, PolicyLoraConfig
from services.model.freeze import freeze
from services.model.head import Critic
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_logits
from services.model.logprobs import PolicyModel
from services.model.lora import (
    adapter_files,
    adapters_of,
    add_lora,
    lora_state,
    merged_state_dict,
    without_lora,
)
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks
from services.wire.errors import ConfigError
from services.wire.grids import MicroBatch
from tests.architectures import build, sequences

LENGTHS = (5, 1, 7)
IDS, LAYOUT = torch.cat(sequences(*LENGTHS)), PackedLayout.of(LENGTHS)
MICRO_BATCH = MicroBatch(lengths=np.array(LENGTHS, dtype="<u4"), arrays={}, spans=[])
SMALL = LoraConfig(rank=2, alpha=6.0)
WITH_EXPERTS = LoraConfig(rank=2, alpha=6.0, targets=["all-linear", "experts"])
MODELS = [("llama", SMALL), ("gemma3", SMALL), ("qwen3-moe", SMALL), ("qwen3-moe", WITH_EXPERTS)]
each_model = pytest.mark.parametrize(
    ("architecture", "config"), MODELS, ids=["llama", "gemma3, tied", "mixture", "mixture, experts too"]
)


def adapted(
    model: PreTrainedModel, config: LoraConfig = SMALL, *, frozen: list[str] | None = None, seed: int = 3
) -> PreTrainedModel:
    return add_lora(model, config, frozen=frozen or [], role="policy", seed=seed)


def disturb(model: nn.Module) -> None:
    """Give every B numbers, as training would."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return packed_logits(model, IDS, LAYOUT, torch.arange(len(IDS)))


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    return -packed_logits(model, IDS, LAYOUT, torch.arange(len(IDS))).log_softmax(-1)[:, 5].sum()


def saved(folder: Path, architecture: str) -> Path:
    build(folder, architecture).save_pretrained(folder)
    return folder


def places(model: nn.Module) -> set[str]:
    return {adapter.parameter for adapter in adapters_of(model)}


# ---- where adapters go


@each_model
def test_before_the_first_update_the_model_is_the_base_exactly(
    tmp_path: Path, architecture: str, config: LoraConfig
) -> None:
    model = build(tmp_path, architecture)
    before, kind, backbone = logits_of(model), type(model), model.base_model
    assert adapted(model, config) is model
    assert type(model) is kind and model.base_model is backbone, "not wrapped"
    assert torch.equal(logits_of(model), before)


def test_all_linear_is_every_linear_layer_but_the_output_head_and_experts_are_named(tmp_path: Path) -> None:
    model = build(tmp_path, "qwen3-moe")
    attention = {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in (0, 1) for name in "qkvo"}
    assert places(adapted(model)) == attention, "its router is no linear layer, its experts are fused"
    named = adapted(build(tmp_path, "qwen3-moe"), WITH_EXPERTS)
    experts = {f"model.layers.{i}.mlp.experts.{name}_proj" for i in (0, 1) for name in ("gate_up", "down")}
    assert places(named) == attention | experts


@pytest.mark.parametrize(
    ("targets", "frozen", "expected"),
    [
        (["q_proj"], [], ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]),
        (
            ["layers.0.mlp", "k_proj"],
            ["layers.1", "up_proj"],
            [f"layers.0.{n}_proj" for n in ("mlp.gate", "mlp.down", "self_attn.k")],
        ),
        (["attention"], ["v_proj", "layers.0", "o_proj"], [f"layers.1.self_attn.{name}_proj" for name in "qk"]),
    ],
)
def test_adapters_are_where_targets_say_and_never_on_what_is_frozen(
    tmp_path: Path, targets: list[str], frozen: list[str], expected: list[str]
) -> None:
    model = adapted(build(tmp_path, "llama"), LoraConfig(rank=2, targets=targets), frozen=frozen)
    assert places(model) == {f"model.{path}.weight" for path in expected}


def test_parameters_that_freeze_returned_take_no_adapter_either(tmp_path: Path) -> None:
    critic = Critic(build(tmp_path, "qwen3-moe"), head_init_std=0.1, seed=0)
    frozen = freeze(critic.backbone, ["attention"], role="value")
    add_lora(critic.backbone, WITH_EXPERTS, frozen=frozen, role="value", seed=0)  # pyright: ignore[reportArgumentType]
    assert places(critic.backbone) == {
        f"layers.{i}.mlp.experts.{name}_proj" for i in (0, 1) for name in ("gate_up", "down")
    }


def test_a_policy_s_own_output_head_can_be_named_and_a_critic_s_cannot(tmp_path: Path) -> None:
    config = LoraConfig(rank=2, targets=["lm_head"])
    assert places(adapted(build(tmp_path, "llama"), config)) == {"lm_head.weight"}
    with pytest.raises(ConfigError, match='"lm_head" matches no linear layer'):
        add_lora(build(tmp_path, "llama"), config, frozen=[], role="value", seed=0)
    with pytest.raises(ConfigError, match="tied to the embedding"):
        adapted(build(tmp_path, "gemma3"), config)


def test_targets_that_cannot_be_met_are_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        adapted(build(tmp_path, "llama"), LoraConfig(targets=["q_prj", "q_proj", "embed_tokens"]))
    first, second = caught.value.problems
    assert first == (
        'policy.lora.targets: "q_prj" matches no linear layer of LlamaForCausalLM; parts with some are: attention, '
        "model, layers, self_attn, q_proj, k_proj, v_proj, o_proj, mlp, gate_proj, up_proj, down_proj, lm_head"
    )
    assert '"embed_tokens"' in second
    with pytest.raises(ConfigError, match=r"policy\.freeze leaves none of them"):
        adapted(build(tmp_path, "llama"), LoraConfig(targets=["q_proj"]), frozen=["attention"])


def test_fused_experts_are_refused_where_they_are_divided_or_published_as_an_adapter(tmp_path: Path) -> None:
    model = build(tmp_path, "qwen3-moe")
    with pytest.raises(ConfigError, match=r"policy\.model\.ep"):
        add_lora(model, WITH_EXPERTS, frozen=[], role="policy", seed=0, ep=2)
    alone = PolicyLoraConfig(rank=2, targets=["experts"], publish="adapter")
    with pytest.raises(ConfigError, match=r'policy\.lora\.publish: .*publish = "merged"'):
        adapted(model, alone)
    assert not adapters_of(model)


def test_the_seed_alone_decides_a_and_the_global_generator_is_left_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    one, same, other = (
        lora_state(adapted(build(tmp_path, "qwen3-moe"), WITH_EXPERTS, seed=seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before)
    for name in one:
        assert torch.equal(one[name], same[name])
        assert ("lora_B" in name) == torch.equal(one[name], other[name]) == (not one[name].any())


def test_a_model_on_meta_gets_the_same_adapters_without_numbers(tmp_path: Path) -> None:
    real = adapted(build(tmp_path, "qwen3-moe"), WITH_EXPERTS)
    meta = adapted(build(tmp_path, "qwen3-moe").to("meta"), WITH_EXPERTS)  # pyright: ignore[reportArgumentType]
    assert all(parameter.is_meta for parameter in meta.parameters())
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (real, meta)]
    assert shapes[0] == shapes[1]


# ---- training


@each_model
def test_only_adapters_train_and_the_base_is_bit_equal_after_steps_with_weight_decay(
    tmp_path: Path, architecture: str, config: LoraConfig
) -> None:
    model = build(tmp_path, architecture)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted(model, config)
    start = lora_state(model)
    optimizer = Optimizer(model, OptimConfig(lr=0.01, weight_decay=0.5), Ranks(), warmup_updates=0)
    for _ in range(2):
        assert optimizer.update([MICRO_BATCH], lambda _: (loss_of(model), {})).applied
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == set(start) == {name for name, p in model.named_parameters() if p.requires_grad}
    end = lora_state(model)
    assert all(not torch.equal(end[name], start[name]) for name in start)
    plain = {name.replace("base_layer.", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(plain[name], tensor) for name, tensor in base.items())


def test_the_gradient_of_an_adapter_is_the_chain_rule_of_the_merged_weight(tmp_path: Path) -> None:
    """dB = s dW A^T and dA = s B^T dW, with dW from a plain model at the merged weights, in f64."""
    model = build(tmp_path, "llama").double()  # pyright: ignore[reportCallIssue]
    adapted(model, LoraConfig(rank=2, alpha=6.0, targets=["layers.1.mlp.up_proj"]))
    disturb(model)
    (adapter,) = adapters_of(model)
    plain = build(tmp_path, "llama").double()  # pyright: ignore[reportCallIssue]
    a, b = (tensor.detach() for tensor in adapter.tensors(dict(model.named_parameters())))
    weight = plain.get_parameter(adapter.parameter)
    with torch.no_grad():
        weight += 3.0 * (b @ a)
    loss_of(plain).backward()
    loss_of(model).backward()
    assert weight.grad is not None
    grad_a, grad_b = (tensor.grad for tensor in adapter.tensors(dict(model.named_parameters())))
    torch.testing.assert_close(grad_b, 3.0 * weight.grad @ a.T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad_a, 3.0 * b.T @ weight.grad, rtol=1e-9, atol=1e-12)


@each_model
def test_without_its_adapters_a_trained_model_is_the_base_exactly(
    tmp_path: Path, architecture: str, config: LoraConfig
) -> None:
    model = build(tmp_path, architecture)
    before = logits_of(model)
    disturb(adapted(model, config))
    trained, trainable = logits_of(model), [p.requires_grad for p in model.parameters()]
    with without_lora(model):
        assert torch.equal(logits_of(model), before)
        assert [p.requires_grad for p in model.parameters()] == trainable
    assert torch.equal(logits_of(model), trained) and not torch.allclose(trained, before, atol=1e-2)


def test_an_error_within_gives_the_adapters_back(tmp_path: Path) -> None:
    model = adapted(build(tmp_path, "llama"))
    disturb(model)
    trained = logits_of(model)
    with pytest.raises(ZeroDivisionError), without_lora(model):
        raise ZeroDivisionError
    assert torch.equal(logits_of(model), trained)
    with pytest.raises(AssertionError, match="no other self"), without_lora(build(tmp_path, "llama")):
        pass


def test_chunked_log_probabilities_see_the_adapters_and_their_absence(tmp_path: Path) -> None:
    """Also those of the output head, which the chunked path calls by itself."""
    model = adapted(build(tmp_path, "llama"), LoraConfig(rank=2, targets=["all-linear", "lm_head"]))
    policy = PolicyModel(model)
    policy.probe()
    positions = torch.tensor([1, 2, 7, 12])

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return policy(IDS, LAYOUT, positions, temperature=1.0)[0]

    base = logprobs()
    disturb(model)
    expected = logits_of(model)[positions - 1].log_softmax(-1)[torch.arange(4), IDS[positions]]
    assert policy.is_chunked and torch.allclose(logprobs(), expected, atol=1e-6)
    with without_lora(model):
        assert torch.equal(logprobs(), base)


# ---- merged, written, read


@each_model
def test_the_merged_state_is_a_plain_model_that_says_the_same(
    tmp_path: Path, architecture: str, config: LoraConfig
) -> None:
    model = build(tmp_path, architecture)
    plain = build(tmp_path, architecture)
    disturb(adapted(model, config))
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    merged = merged_state_dict(state, model)
    assert set(merged) == set(plain.state_dict())
    plain.load_state_dict(merged)
    expected = logits_of(model)
    assert float((logits_of(plain) - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_merge_is_peft_s_own(tmp_path: Path) -> None:
    """Against an independent model merged in place by peft."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = adapted(build(tmp_path, "qwen3-moe"), WITH_EXPERTS)
    disturb(model)
    merged = merged_state_dict(model.state_dict(), model)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    for name, tensor in model.state_dict().items():
        if "lora_" not in name:
            torch.testing.assert_close(merged[name.replace("base_layer.", "")], tensor, rtol=0, atol=1e-6)


def test_the_merge_needs_the_structure_of_the_model_and_none_of_its_numbers(tmp_path: Path) -> None:
    """As under sharding, where the numbers are gathered elsewhere; sums are f32 and come out in the base's type."""
    model = adapted(build(tmp_path, "qwen3-moe"), WITH_EXPERTS)
    disturb(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = merged_state_dict(state, model)
    assert all(torch.equal(merged_state_dict(state, model.to("meta"))[name], merged[name]) for name in merged)  # pyright: ignore[reportArgumentType]
    half = {name: tensor.bfloat16() if "base_layer" in name else tensor for name, tensor in state.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    delta = merged[name] - state[name.replace(".weight", ".base_layer.weight")]
    expected = (half[name.replace(".weight", ".base_layer.weight")].float() + delta).bfloat16()
    assert torch.allclose(merged_state_dict(half, model)[name].float(), expected.float(), rtol=1e-2, atol=0)
    assert merged_state_dict(half, model)[name].dtype == torch.bfloat16


def test_a_merged_state_saves_as_a_folder_with_hub_names(tmp_path: Path) -> None:
    """transformers splits fused experts again, adapters or not."""
    base = saved(tmp_path / "base", "qwen3-moe")
    model = adapted(load_causal_lm(base), WITH_EXPERTS)
    disturb(model)
    merged = merged_state_dict(model.state_dict(), model)
    model.save_pretrained(tmp_path / "out", state_dict=dict(merged))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    again = load_causal_lm(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in merged.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
@each_model
def test_an_adapter_folder_is_one_that_peft_loads(tmp_path: Path, architecture: str, config: LoraConfig) -> None:
    from peft import PeftModel

    base = saved(tmp_path / "base", architecture)
    model = adapted(load_causal_lm(base), config)
    disturb(model)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        adapter_files(model.state_dict(), model, folder)
    written = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert written[0] == written[1] and set(written[0]) == {"adapter_model.safetensors", "adapter_config.json"}
    other = load_causal_lm(base)
    PeftModel.from_pretrained(other, str(folders[0]))  # pyright: ignore[reportArgumentType]
    assert torch.equal(logits_of(other), logits_of(model))
    settings = json.loads((folders[0] / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base) and settings["inference_mode"] is True
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (2, 6.0, 0.0)


def test_nothing_of_ours_imports_peft_with_its_module() -> None:
    """It takes seconds, and a run without adapters does without it."""
    root = Path(__file__).parents[4]
    for folder in ("services", "policy_trainer", "value_service", "orchestrator"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == "peft" for name in names), path
