"""Exports: what transformers reads is what was trained, and nothing is left to chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification

from services.config.exported import tokenizer_sha256
from services.config.model_path import model_problem
from services.config.train import LoraConfig, PolicyConfig, PolicyLoraConfig, ValueConfig
from services.model.backbone import what_trains
from services.model.export import export_critic, export_policy
from services.model.head import Critic
from services.model.layout import PackedLayout
from services.model.load import load_causal_lm, packed_logits
from services.model.lora import is_adapter_name
from services.wire.errors import CannotWrite, ConfigError, ContractError
from tests.architectures import PACKABLE, build
from tests.exports import FACTS, IDS, POINTS, SUPPORT, base_of, bytes_of, critic_of, our_values, state_of, write_critic

WITH_A_CLASS = ["llama", "qwen2", "qwen3", "qwen3-moe", "gemma2", "mistral"]
WITHOUT = ["gemma3", "granite"]


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return packed_logits(model, IDS, PackedLayout.of([9]), torch.arange(9))  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------------------------------
# The policy


@pytest.mark.parametrize("name", PACKABLE)
def test_an_exported_policy_is_the_trained_one_for_us_and_for_transformers(tmp_path: Path, name: str) -> None:
    base = base_of(tmp_path / "base", name)
    model = build(tmp_path / "trained", name, seed=5)
    out = export_policy(state_of(model), base, tmp_path / "out", **FACTS)
    ours = load_causal_lm(out)
    assert all(torch.equal(tensor, ours.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(logits_of(ours), logits_of(model))
    theirs, info = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS[None]).logits[0], logits_of(model), atol=2e-6, rtol=2e-5)


def test_an_exported_policy_can_be_a_model_path(tmp_path: Path) -> None:
    """Scenario: export, then look at the folder as the resolver does. Result: nothing is missing, nothing is lost."""
    base = base_of(tmp_path / "base", "qwen3-moe")
    out = export_policy(state_of(load_causal_lm(base)), base, tmp_path / "new" / "out", **FACTS)
    assert model_problem(str(out)) is None
    assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert tokenizer_sha256(out) == tokenizer_sha256(base)
    facts = json.loads((out / "counterpoint.json").read_text())
    assert (facts["role"], facts["run"], facts["source"]) == ("policy", "demo", FACTS["source"])
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_adapters_are_added_in(tmp_path: Path) -> None:
    """Against W + (alpha / r) B A by hand, on the one layer kind that is adapted."""
    base = base_of(tmp_path / "base", "llama")
    section = PolicyConfig(lora=PolicyLoraConfig(rank=2, alpha=6.0, targets=["q_proj"]), freeze=["layers.0"])
    prepare = what_trains(section, role="policy", seed=0)
    model = load_causal_lm(base)
    prepare(model)
    state = state_of(model)
    for name in state:
        if is_adapter_name(name):
            state[name] = torch.full_like(state[name], 0.01)
    out = export_policy(state, base, tmp_path / "out", prepare=prepare, **FACTS)
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert set(before) == set(after) and changed == {"model.layers.1.self_attn.q_proj.weight"}
    (name,) = changed
    torch.testing.assert_close(after[name] - before[name], torch.full_like(after[name], 3 * 2 * 0.01 * 0.01))
    with pytest.raises(ContractError, match="nothing says which"):
        export_policy(state, base, tmp_path / "again", **FACTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": None}, r"lacks model.norm.weight \(1 such\)"),
        ({"model.more.weight": torch.ones(2)}, r"has the unknown model.more.weight"),
        ({"model.norm.weight": torch.ones(3)}, r"has model.norm.weight \[3\], not \[32\]"),
    ],
)
def test_a_state_of_another_architecture_is_refused_and_leaves_nothing(
    tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    base = base_of(tmp_path / "base", "llama")
    state = {name: t for name, t in (state_of(load_causal_lm(base)) | change).items() if t is not None}
    with pytest.raises(ContractError, match=said):
        export_policy(state, base, tmp_path / "out", **FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_target_in_use_is_left_as_it_is(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    before = bytes_of(base)
    with pytest.raises(CannotWrite, match="base"):
        export_policy(state_of(load_causal_lm(base)), base, base, **FACTS)
    assert bytes_of(base) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(CannotWrite, match="cannot write"):
        export_policy(state_of(load_causal_lm(base)), base, tmp_path / "file" / "out", **FACTS)


# ---------------------------------------------------------------------------------------------------------------------
# The critic


@pytest.mark.parametrize("points", [None, POINTS], ids=["scalar", "classes"])
@pytest.mark.parametrize("name", WITH_A_CLASS)
def test_transformers_computes_our_values_one_position_earlier(
    tmp_path: Path, name: str, points: list[float] | None
) -> None:
    """C04. Its output at t is the value after token t: ours before token t + 1, the last one the bootstrap value."""
    base = base_of(tmp_path / "base", name)
    critic = critic_of(base, points=points)
    out = write_critic(critic, base, tmp_path / "out")
    model, info = AutoModelForTokenClassification.from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32 and model.dropout.p == 0
    assert torch.equal(model.score.weight, critic.head.weight) and torch.equal(model.score.bias, critic.head.bias)
    facts = model.config.counterpoint
    assert facts == json.loads((out / "counterpoint.json").read_text())
    assert (facts["values"], facts["gamma"]) == ("value at t = state after token t", 0.9)
    with torch.no_grad():
        logits = model(IDS[None]).logits[0]
    if points is None:
        assert facts["support"] == "scalar" and facts["points"] is None
        values = logits[:, 0]
    else:
        assert facts["support"] == {"low": -1, "high": 1, "num_bins": 5, "pad_bins": 1}
        values = (logits.double().softmax(-1) @ torch.tensor(facts["points"]).double()).float()
    ours = our_values(critic)
    assert ours[1:].std() > 0.01
    torch.testing.assert_close(values, ours[1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", WITHOUT)
def test_without_such_a_class_backbone_and_head_lie_beside_each_other(tmp_path: Path, name: str) -> None:
    base = base_of(tmp_path / "base", name)
    critic = critic_of(base)
    out = write_critic(critic, base, tmp_path / "out")
    assert json.loads((out / "counterpoint.json").read_text())["form"] == "backbone_and_head"
    model, info = AutoModel.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    head = load_file(out / "value_head.safetensors")
    with torch.no_grad():
        logits = model(IDS[None]).last_hidden_state[0] @ head["weight"].T + head["bias"]
    values = logits.softmax(-1) @ head["points"]
    torch.testing.assert_close(values, our_values(critic)[1:], atol=1e-6, rtol=0)


def test_a_critic_s_adapters_are_added_in(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    prepare = what_trains(ValueConfig(lora=LoraConfig(rank=2, alpha=6.0)), role="value", seed=0)
    model = load_causal_lm(base)
    prepare(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_name(name):
                parameter.fill_(0.03)
    critic = Critic(model, head_init_std=0.1, seed=3)
    out = export_critic(state_of(critic), base, tmp_path / "out", support="scalar", gamma=1.0, prepare=prepare, **FACTS)
    theirs = AutoModelForTokenClassification.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        values = theirs(IDS[None]).logits[0, :, 0]
    ours = our_values(critic)
    assert not torch.allclose(ours, our_values(Critic(load_causal_lm(base), head_init_std=0.1, seed=3)), atol=1e-3)
    torch.testing.assert_close(values, ours[1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head.weight": None}, "the value head is"),
        ({"head.weight": torch.ones(1, 32), "head.bias": torch.ones(1)}, "the value head is"),
        ({"head.points": torch.linspace(0, 1, 7)}, "has points on .* and not 5 bins"),
        ({"backbone.norm.weight": None}, "LlamaModel lacks norm.weight"),
        ({"lm_head.weight": torch.ones(2)}, "has the unknown lm_head.weight"),
    ],
)
def test_a_critic_without_its_own_head_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    base = base_of(tmp_path / "base", "llama")
    state = {name: t for name, t in (state_of(critic_of(base)) | change).items() if t is not None}
    with pytest.raises(ContractError, match=said):
        export_critic(state, base, tmp_path / "out", support=SUPPORT, gamma=1.0, **FACTS)
    assert not (tmp_path / "out").exists()


def test_a_critic_cannot_be_loaded_as_a_policy(tmp_path: Path) -> None:
    """Its output head would be random numbers: transformers makes what a folder lacks."""
    base = base_of(tmp_path / "base", "llama")
    out = write_critic(critic_of(base), base, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"lacks lm_head.weight \(1 such\) of LlamaForCausalLM"):
        load_causal_lm(out)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model.layers.0.mlp.up_proj.weight \(1 such\)"):
        load_causal_lm(base, needs_output=False)
