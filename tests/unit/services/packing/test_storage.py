"""Bytes of commits and snapshots, counted by hand on a model of three tensors."""

from __future__ import annotations

from services.config.train import PolicyConfig, ValueConfig
from services.packing.shapes import ModelShapes, Parameter
from services.packing.storage import commit_bytes, snapshot_bytes

EMBEDDING, WEIGHT, HEAD = 6 * 4, 4 * 4, 6 * 4
MODEL = ModelShapes(
    parameters=(
        Parameter("model.embed_tokens.weight", (6, 4)),
        Parameter("model.layers.0.self_attn.q_proj.weight", (4, 4)),
        Parameter("lm_head.weight", (6, 4)),
    ),
    sizes={"hidden_size": 4},
)


def test_a_commit_has_twelve_bytes_for_what_trains_and_four_for_what_is_frozen() -> None:
    whole = EMBEDDING + WEIGHT + HEAD
    assert commit_bytes(MODEL, PolicyConfig()) == 12 * whole
    frozen = PolicyConfig(freeze=["attention"])
    assert commit_bytes(MODEL, frozen) == 12 * (EMBEDDING + HEAD) + 4 * WEIGHT


def test_a_critic_has_a_value_head_in_the_place_of_the_output_head() -> None:
    assert commit_bytes(MODEL, ValueConfig()) == 12 * (EMBEDDING + WEIGHT + 4 + 1)


def test_an_adapter_trains_alone_and_is_merged_into_snapshots_unless_it_is_published_alone() -> None:
    """Rank 2 on the 4 x 4 layer: A is 2 x 4, B is 4 x 2."""
    lora = {"rank": 2, "targets": ["q_proj"]}
    merged = PolicyConfig.model_validate({"lora": lora})
    alone = PolicyConfig.model_validate({"lora": lora | {"publish": "adapter"}})
    whole, adapter = EMBEDDING + WEIGHT + HEAD, 2 * 4 + 4 * 2
    assert commit_bytes(MODEL, merged) == 4 * whole + 12 * adapter
    assert snapshot_bytes(MODEL, merged) == 4 * whole
    assert snapshot_bytes(MODEL, alone) == 4 * adapter
    assert snapshot_bytes(MODEL, PolicyConfig()) == 4 * whole
