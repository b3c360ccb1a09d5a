"""cp and ep against the GPUs of a role and against what the model offers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config.layout import layout_problems
from services.config.train import TrainModelConfig

GPUS = ("deployment", "num_value_gpus")


def problems(path: str, num_gpus: int, **layout: int) -> list[str]:
    section = TrainModelConfig.model_validate(layout)
    return [f"{'.'.join(key)}: {what}" for key, what, _, _ in layout_problems("value", section, num_gpus, GPUS, path)]


def folder(tmp_path: Path, **config: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(("num_gpus", "layout"), [(4, {"cp": 2}), (4, {"cp": 4}), (1, {}), (6, {"cp": 2})])
def test_what_divides_is_accepted(num_gpus: int, layout: dict) -> None:
    assert problems("tiny:add", num_gpus, **layout) == []


def test_a_context_degree_that_does_not_divide_the_gpus_or_the_heads_is_told_for_each() -> None:
    assert problems("tiny:add", 4, cp=3) == [
        "value.model.cp: 3 does not divide deployment.num_value_gpus = 4",
        "value.model.cp: 3 ranks cannot share the model's 4 attention heads",
    ]


def test_experts_must_be_there_and_divide(tmp_path: Path) -> None:
    assert problems("tiny:add", 2, ep=2) == ["value.model.ep: the model has no mixture of experts to divide"]
    mixture = folder(tmp_path, num_attention_heads=8, num_experts=6)
    assert problems(mixture, 4, ep=4) == ["value.model.ep: 4 does not divide the model's 6 experts"]
    assert problems(mixture, 4, ep=2) == []


def test_heads_and_experts_of_a_nested_text_config_count(tmp_path: Path) -> None:
    mixture = folder(tmp_path, text_config={"num_attention_heads": 3, "num_local_experts": 4})
    assert problems(mixture, 2, cp=2, ep=2) == ["value.model.cp: 2 ranks cannot share the model's 3 attention heads"]


def test_a_model_that_says_nothing_is_judged_when_it_is_built(tmp_path: Path) -> None:
    assert problems(str(tmp_path), 4, cp=2, ep=2) == []
