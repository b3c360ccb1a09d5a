"""From a commit on disk to a folder: what was trained is what comes out, and a damaged commit is not exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.model.backbone import what_trains
from services.model.load import load_causal_lm
from services.model.snapshot import save_snapshot
from services.training.export_run import export_commit, export_snapshot, read_role_state
from services.wire.errors import CommitError, ConfigError, ContractError, DamagedCommit
from tests.architectures import build
from tests.exports import base_of, bytes_of, commit, critic_of, make_run, state_of, write_critic

NAMES = ["llama", "qwen3-moe", "gemma3"]


@pytest.mark.parametrize("name", NAMES)
def test_both_roles_of_a_commit_come_out_as_they_went_in(tmp_path: Path, name: str) -> None:
    base, run_dir = base_of(tmp_path / "base", name), tmp_path / "run"
    make_run(run_dir, base)
    policy, critic = build(tmp_path / "trained", name, seed=5), critic_of(base)
    commit(run_dir, 12, policy=policy, critic=critic)
    state = read_role_state(run_dir / "checkpoints" / "step_000012" / "critic")
    assert set(state) == set(state_of(critic)) and "head.points" in state
    assert all(torch.equal(tensor, state[key]) for key, tensor in state_of(critic).items())
    out = export_commit(run_dir, "policy", 12, tmp_path / "policy")
    assert all(torch.equal(t, load_causal_lm(out).state_dict()[key]) for key, t in policy.state_dict().items())
    export_commit(run_dir, "critic", 12, tmp_path / "critic")
    expected = bytes_of(write_critic(critic, base, tmp_path / "expected"))
    expected = {key: data.replace(b"step_000012/policy", b"step_000012/critic") for key, data in expected.items()}
    assert bytes_of(tmp_path / "critic") == expected


def test_a_run_that_started_from_a_critic_exports_that_architecture(tmp_path: Path) -> None:
    """Scenario: `value.init_from` has another rope theta than `model.path`. Result: the critic keeps its own."""
    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    critic = critic_of(base)
    folder = write_critic(critic, base, tmp_path / "first")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    make_run(run_dir, base, ("value.init_from", str(folder)))
    commit(run_dir, 3, policy=load_causal_lm(base), critic=critic)
    out = export_commit(run_dir, "critic", 3, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 0.25


def test_adapters_of_a_commit_are_added_in(tmp_path: Path) -> None:
    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    config = make_run(run_dir, base, ("policy.lora.rank", "2"), ("value.lora.rank", "2"), ("value.freeze", '["mlp"]'))
    assert config.value is not None
    policy, backbone = load_causal_lm(base), load_causal_lm(base)
    what_trains(config.policy, role="policy", seed=config.seed)(policy)
    what_trains(config.value, role="value", seed=config.seed)(backbone)
    critic = critic_of(base)
    critic.backbone = backbone.base_model
    with torch.no_grad():
        for model in (policy, critic):
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.fill_(0.05)
    commit(run_dir, 1, policy=policy, critic=critic)
    change = 16.0 * 2 * 0.05 * 0.05  # alpha / rank, over rank, B, A
    out = export_commit(run_dir, "policy", 1, tmp_path / "policy")
    before, after = load_causal_lm(base).state_dict(), load_causal_lm(out).state_dict()
    for name in before:
        expected = before[name] + (change if "proj" in name else 0)
        torch.testing.assert_close(after[name], expected, msg=name)
    out = export_commit(run_dir, "critic", 1, tmp_path / "critic")
    after = load_causal_lm(out, needs_output=False).state_dict()
    for name in before:
        if name != "lm_head.weight":
            expected = before[name] + (change if "self_attn" in name and "proj" in name else 0)
            torch.testing.assert_close(after[name], expected, msg=name)


def test_a_damaged_commit_is_not_exported(tmp_path: Path) -> None:
    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    make_run(run_dir, base)
    commit(run_dir, 12, policy=load_causal_lm(base), critic=critic_of(base))
    file = next((run_dir / "checkpoints" / "step_000012" / "critic").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCommit, match=file.name):
        export_commit(run_dir, "critic", 12, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_commit(run_dir, "policy", 12, tmp_path / "out")
    with pytest.raises(CommitError, match="step_000013"):
        export_commit(run_dir, "policy", 13, tmp_path / "other")


def test_another_head_than_the_configuration_s_is_refused(tmp_path: Path) -> None:
    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    make_run(run_dir, base, ("value.loss", '{type = "mse"}'))
    commit(run_dir, 1, policy=load_causal_lm(base), critic=critic_of(base))
    with pytest.raises(ContractError, match="a head for scalar"):
        export_commit(run_dir, "critic", 1, tmp_path / "out")


def test_a_run_whose_model_is_gone_says_so(tmp_path: Path) -> None:
    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    make_run(run_dir, base)
    commit(run_dir, 1, policy=load_causal_lm(base), critic=critic_of(base))
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"model\.path: .*base is gone"):
        export_commit(run_dir, "policy", 1, tmp_path / "out")


def test_a_snapshot_comes_out_without_its_manifest(tmp_path: Path) -> None:
    base, run_dir = base_of(tmp_path / "base", "llama"), tmp_path / "run"
    make_run(run_dir, base)
    snapshot = save_snapshot(build(tmp_path / "trained", "llama", seed=5), run_dir / "weights", 7, tokenizer_from=base)
    out = export_snapshot(run_dir, 7, tmp_path / "out")
    assert not (out / "manifest.json").exists() and (out / "generation_config.json").is_file()
    assert (out / "model.safetensors").read_bytes() == (snapshot / "model.safetensors").read_bytes()
    assert json.loads((out / "counterpoint.json").read_text())["source"] == "weights/v000007"
    (snapshot / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ContractError, match="differs from its manifest"):
        export_snapshot(run_dir, 7, tmp_path / "again")
