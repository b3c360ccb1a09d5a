"""`[policy.packing]` and `[value.packing]`: from the TOML to the plan of a grid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.config.resolve import resolve
from services.packing.cost import cost_of_role
from services.packing.grid import build_grid
from services.wire.errors import ConfigError
from tests.samples import make_sample

ROOT = Path(__file__).parents[4]
DEMO, MODEL = ROOT / "configs" / "demo" / "sao.toml", ROOT / "configs" / "demo" / "dummy-model"
HEADER = {"run_id": "run", "epoch": 0, "step": 0, "policy_version": 0, "temperature": 1.0}


def grid_of(lengths, **kwargs):
    samples = [make_sample([1] * (n - 1), trace_id=f"t{n}") for n in lengths]
    for sample in samples:
        sample.advantages = sample.returns = sample.values = sample.branch.action_mask.astype(float)
    return build_grid(samples, stream="critic", loss_name="mse", loss_constants={}, **HEADER, **kwargs)


def test_roles_balance_by_tokens_unless_told_otherwise():
    config = resolve([DEMO]).config
    assert config.value is not None
    for packing in (config.policy.packing, config.value.packing):
        assert (packing.balance, packing.max_samples) == ("tokens", None)


def test_each_role_has_its_own_choice():
    overrides = [("value.packing.balance", "flops"), ("value.packing.max_samples", "3")]
    config = resolve([DEMO], overrides).config
    assert config.value is not None and config.policy.packing.balance == "tokens"
    assert (config.value.packing.balance, config.value.packing.max_samples) == ("flops", 3)
    assert cost_of_role(config.value.packing, MODEL, has_vocabulary=False) is not None


def test_a_model_that_does_not_say_its_sizes_cannot_be_balanced_by_flops(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": None}))
    model = ("model.path", f"dummy:{folder}")
    assert resolve([DEMO], [model]).config.policy.packing.balance == "tokens"
    with pytest.raises(ConfigError, match=r"policy\.packing\.balance: .*does not say num_attention_heads; fix: give"):
        resolve([DEMO], [model, ("policy.packing.balance", "flops")])


def test_a_grid_is_balanced_by_the_cost_it_is_given():
    """Two ranks, 10 and 6 times 2 tokens; by its square the long sample outweighs all others."""
    lengths = [10, 2, 2, 2, 2, 2, 2]
    by_tokens = grid_of(lengths, seq_len=32, num_data_ranks=2)
    by_square = grid_of(lengths, seq_len=32, num_data_ranks=2, cost=lambda length: length * length)
    assert sorted(len(item.arrays["lengths"]) for item in by_tokens) in ([1, 6], [2, 5])
    assert [item.arrays["lengths"].tolist() for item in by_square] == [[10], [2] * 6]


def test_a_grid_keeps_the_limit_on_samples():
    items = grid_of([2] * 9, seq_len=32, num_data_ranks=2, max_samples=2)
    assert [sorted(item.arrays["sample_counts"].tolist()) for item in items] == [[1, 2, 2], [1, 1, 2]]
