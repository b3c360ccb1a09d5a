"""Pretraining in one process: it learns, goes on bit by bit, measures the critic, ends with a folder to start from."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config.context import RunContext
from services.config.corpus import pretraining_config
from services.config.exported import PROMPTS_FILE, CriticFacts, read_facts, tokenizer_sha256
from services.config.resolve import resolve
from services.config.schema import Config, to_toml
from services.model.layout import PackedLayout
from services.model.mesh import Mesh
from services.runtime.commits import Commits
from services.training.assemble import resume
from services.training.board import StatusBoard
from services.training.export_run import read_role_state
from services.training.parts import Part
from services.training.ranks import Ranks
from services.wire.errors import ConfigError
from services.wire.value_rows import name_hash
from tests.corpora import learnable, write_corpus
from value_service.build import build_critic
from value_service.pretrain import Pretraining, corpus_of, shared_index
from value_service.pretrain_export import export_pretrained
from value_service.updater import Updater

TOML = """
seed = 5
[model]
path = "MODEL"
[algorithm]
type = "sao"
[[env]]
type = "add"
max_turn_tokens = 8
max_trace_tokens = 32
[value.model]
seq_len = 64
[value.optim]
lr = 3e-3
[value.pretrain]
files = ["FILE"]
batch_size = 16
epochs = 2
held_out_fraction = 0.3
eval_interval_updates = 4
[checkpoint]
interval_steps = 3
keep_last = 50
[inference]
engine = "local"
"""


@dataclass
class Corpus:
    """A file and the model that reads it."""

    file: Path
    model: Path

    def config(self, folder: Path, **settings: Any) -> Config:
        text = TOML.replace("MODEL", str(self.model)).replace("FILE", str(self.file))
        (folder / "config.toml").write_text(text)
        pairs = [(key.replace("__", "."), str(value)) for key, value in settings.items()]
        return pretraining_config(resolve([folder / "config.toml"], pairs).config)


@pytest.fixture
def corpus(tmp_path: Path, tiny_model: Path) -> Corpus:
    """Three rows of each of 26 prompts, of two policies, with a weak hint in each answer."""
    file = write_corpus(tmp_path / "corpus", learnable(26, 3), tokenizer_sha256=tokenizer_sha256(tiny_model))
    return Corpus(file, tiny_model)


@dataclass
class Started:
    """A pretraining run in this process."""

    pretraining: Pretraining
    part: Part
    index: Any

    def run(self, *, stop: bool = False) -> bool:
        event = threading.Event()
        if stop:
            event.set()
        return self.pretraining.run(event)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.part.model.named_parameters()}


def start(config: Config, run_dir: Path, *, commit: Path | None = None) -> Started:
    """As `value_service.pretrain.run` does, without a process group."""
    run_dir.mkdir(exist_ok=True)
    url = "http://127.0.0.1:1"
    context = RunContext(
        run_id="run",
        epoch=1 if commit is None else 2,
        dir=str(run_dir),
        model_dir=config.model.path,
        inference_urls=[],
        policy_url=url,
        orchestrator_url=url,
        policy_grid_url=url,
        commit_dir=None if commit is None else str(commit),
    )
    (run_dir / "config.resolved.toml").write_text(to_toml(config))
    (run_dir / "run.json").write_text(json.dumps(context.model_dump(mode="json")))
    ranks, mesh = Ranks(), Mesh()
    backbone, critic = build_critic(config, context, mesh)
    assert config.value is not None
    updater = Updater(critic, ranks, mesh, config.value)
    part = Part("critic", critic, updater.optimizer, mesh, ranks)
    resume(part, StatusBoard("critic"), context, seed=config.seed)
    vocab_size = backbone.model.config.vocab_size
    index = shared_index(config, ranks, vocab_size=vocab_size)
    return Started(Pretraining(config, context, part, updater, index, vocab_size=vocab_size), part, index)


def rows_of(run_dir: Path, stream: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows if row["stream"] == stream]


def test_a_run_that_is_stopped_in_the_middle_of_an_epoch_goes_on_bit_by_bit(corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path)
    whole = start(config, tmp_path / "whole")
    assert whole.run()
    num_updates = whole.pretraining.num_done
    assert num_updates == whole.pretraining.batches.num_updates >= 6

    cut = tmp_path / "cut"
    first = start(config, cut)
    assert not first.run(stop=True)  # after the first update
    assert Commits(cut / "checkpoints").steps() == [1]
    with (cut / "metrics.jsonl").open("ab") as file:
        file.write(b'{"stream": "pretrain", "step": 1, "ran": "ahead"}\n')
    second = start(config, cut, commit=cut / "checkpoints" / "step_000001")
    assert second.pretraining.num_done == 1
    assert second.run()

    for name, weight in whole.weights.items():
        assert torch.equal(weight, second.weights[name]), name
    for stream in ("pretrain", "held_out"):
        assert rows_of(tmp_path / "whole", stream) == rows_of(cut, stream)
    assert [row["step"] for row in rows_of(cut, "pretrain")] == list(range(num_updates))
    files = [
        read_role_state(folder / "checkpoints" / f"step_{num_updates:06d}" / "critic")
        for folder in (tmp_path / "whole", cut)
    ]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_commits_come_at_their_interval_and_at_the_end(corpus: Corpus, tmp_path: Path) -> None:
    run = start(corpus.config(tmp_path), tmp_path / "run")
    assert run.run()
    done = run.pretraining.num_done
    assert Commits(tmp_path / "run" / "checkpoints").steps() == sorted({done, *range(3, done + 1, 3)}, reverse=True)


@pytest.mark.parametrize("roles", [("data",), ("policy", "orchestrator", "data"), ("critic",)])
def test_only_a_pretraining_run_commits_a_position_in_files(roles: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a commit has policy"):
        Commits(tmp_path).commit(1, roles, run_id="r", epoch=1, identity={})


def test_a_position_in_other_rows_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    config, run_dir = corpus.config(tmp_path), tmp_path / "run"
    start(config, run_dir).run(stop=True)
    commit = run_dir / "checkpoints" / "step_000001"
    other = corpus.config(tmp_path, value__pretrain__batch_size=8)
    with pytest.raises(ConfigError, match=r"batch_size is 8, in .* it was 16"):
        start(other, run_dir, commit=commit)
    write_corpus(corpus.file.parent, learnable(26, 3, seed=1), tokenizer_sha256=tokenizer_sha256(corpus.model))
    with pytest.raises(ConfigError, match="files is"):
        start(config, run_dir, commit=commit)
    longer = corpus.config(tmp_path, value__pretrain__epochs=9)
    assert corpus_of(longer) == corpus_of(config)


def test_what_is_measured_is_what_the_critic_says_of_held_out_rows(corpus: Corpus, tmp_path: Path) -> None:
    """Against each row alone, in f64: overall, of each policy, and with every rollout counting once."""
    run = start(corpus.config(tmp_path), tmp_path / "run")
    assert run.run()
    rows = rows_of(tmp_path / "run", "held_out")
    last = {row.get("policy_id"): row for row in rows if row["step"] == run.pretraining.num_done - 1}
    assert set(last) == {None, "p0", "p1"}
    reader, critic = run.pretraining._reader, run.part.model
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"p0": [], "p1": []}
    for policy, name in enumerate(run.index.policies):
        for sample in reader.read(run.index.held_out(policy)):
            ids = torch.from_numpy(sample.branch.token_ids.astype(np.int64))
            with torch.no_grad():
                after = critic.outputs(ids, PackedLayout.of([len(ids)], torch.device("cpu")))[:, 0].double().numpy()
            on = np.flatnonzero(sample.branch.action_mask)
            assert sample.returns is not None
            pairs[name].append((sample.returns[on], after[on - 1]))
    for name, own in (*pairs.items(), (None, [pair for each in pairs.values() for pair in each])):
        y, v = (np.concatenate([pair[side] for pair in own]) for side in (0, 1))
        row = last[name]
        assert (row["rows"], row["value/loss_tokens"]) == (len(own), len(y))
        assert row["value/explained_variance"] == pytest.approx(1 - (y - v).var() / y.var(), abs=1e-4)
        means = np.array([[pair[side].mean() for pair in own] for side in (0, 1)])
        expected = 1 - (means[0] - means[1]).var() / means[0].var()
        assert row["value/explained_variance_by_trace"] == pytest.approx(expected, abs=1e-4)
        assert row["value/loss"] == pytest.approx(0.5 * np.square(y - v).mean(), rel=1e-4)
    assert run.pretraining.held_out == pytest.approx(last[None]["value/explained_variance"], abs=1e-8)


def test_measuring_changes_nothing(corpus: Corpus, tmp_path: Path) -> None:
    often = start(corpus.config(tmp_path, value__pretrain__eval_interval_updates=1), tmp_path / "often")
    once = start(corpus.config(tmp_path, value__pretrain__eval_interval_updates=0), tmp_path / "once")
    assert often.run() and once.run()
    assert len({row["step"] for row in rows_of(tmp_path / "once", "held_out")}) == 1
    assert len({row["step"] for row in rows_of(tmp_path / "often", "held_out")}) == often.pretraining.num_done
    for name, weight in once.weights.items():
        assert torch.equal(weight, often.weights[name]), name


def test_it_learns_what_the_answers_tell_on_prompts_it_has_not_seen(corpus: Corpus, tmp_path: Path) -> None:
    """The first answer token says the outcome; a quarter of the tokens come before anybody can know."""
    write_corpus(corpus.file.parent, learnable(60, 4), tokenizer_sha256=tokenizer_sha256(corpus.model))
    run = start(corpus.config(tmp_path, value__pretrain__epochs=4), tmp_path / "run")
    assert run.run()
    rows = [row for row in rows_of(tmp_path / "run", "held_out") if "policy_id" not in row]
    assert rows[-1]["value/explained_variance"] > 0.5 > 0.3 > rows[0]["value/explained_variance"]


def test_the_exported_critic_is_one_to_start_from_and_says_what_it_has_seen(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = start(corpus.config(tmp_path), run_dir)
    assert run.run()
    step = run.pretraining.num_done
    folder = export_pretrained(run_dir, step, run.index, held_out=0.25)
    assert folder == export_pretrained(run_dir, step, run.index, held_out=0.25)  # a second end replaces the first
    facts = read_facts(folder)
    assert isinstance(facts, CriticFacts) and facts.corpus is not None
    assert (facts.corpus.rows, facts.corpus.prompts, facts.corpus.policies) == (78, 26, ["p0", "p1"])
    hashes = np.frombuffer((folder / PROMPTS_FILE).read_bytes(), dtype="<u8")
    assert hashes.tolist() == sorted(name_hash(f"add:{number}") for number in range(26))
    again = start(corpus.config(tmp_path, value__init_from=folder), tmp_path / "again")
    for name, weight in run.weights.items():
        assert torch.equal(weight, again.weights[name]), name


def test_frozen_parts_are_those_of_pretraining_and_not_of_the_run(corpus: Corpus, tmp_path: Path) -> None:
    everything = start(corpus.config(tmp_path, value__freeze='["attention"]'), tmp_path / "all")
    assert all(parameter.requires_grad for parameter in everything.part.model.parameters())
    frozen = start(corpus.config(tmp_path, value__pretrain__freeze='["attention"]'), tmp_path / "frozen")
    before = frozen.weights
    assert frozen.run()
    for name, weight in frozen.weights.items():
        assert torch.equal(weight, before[name]) == ("self_attn" in name), name
