"""docs/pretraining.md: its configuration resolves, its rows are read, its fields and reasons are the source's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.config.corpus import manifests_of, pretraining_config
from services.config.resolve import resolve
from services.wire.value_rows import ValueRow
from value_service.pretrain_data import RowReader, build_index

PAGE = Path(__file__).parents[2] / "docs" / "pretraining.md"


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    return found


def test_the_rows_of_the_page_are_what_its_configuration_pretrains_on(tmp_path, monkeypatch, tiny_model) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python"), str(PAGE), "exec"), {"MODEL": tiny_model})
    (tmp_path / "config.toml").write_text(block("toml"))
    settings = [("value.pretrain.files", '["corpus/rows.jsonl"]'), ("model.path", str(tiny_model))]
    config = pretraining_config(resolve([tmp_path / "config.toml"], settings).config)
    (manifest,) = manifests_of(config, tiny_model)
    assert manifest.reward_range == [0.0, 1.0]
    index = build_index(["corpus/rows.jsonl"], seed=1, held_out_fraction=0.3, vocab_size=261, max_tokens=32)
    samples = RowReader(index, vocab_size=261, max_tokens=32).read(range(40))
    assert len(samples) == 40 and 0 < len(index.training) < 40
    assert [sample.returns.tolist() for sample in samples[:2] if sample.returns is not None] == [
        [0] * 6,
        [0, 0, 0, 0, 1, 1],
    ]


def test_the_page_names_every_field_of_a_row() -> None:
    listed = {
        name for row in re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.M) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {"return" if name == "outcome" else name for name in ValueRow.__struct_fields__}


@pytest.mark.parametrize("directory", ["runs/config-record", "runs/config-pretrain"])
def test_the_directories_of_the_page_are_those_of_the_commands(directory: str, tmp_path: Path) -> None:
    from services.launch import pretrain, record

    (tmp_path / "config.toml").write_text(block("toml"))
    found = {pretrain.resolve_beside([str(tmp_path / "config.toml")], [], m.SUFFIX).run.dir for m in (pretrain, record)}
    assert directory in found and directory in PAGE.read_text()
