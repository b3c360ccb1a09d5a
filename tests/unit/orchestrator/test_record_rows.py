"""Rollouts as rows for pretraining: returns, cuts, suffixes, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.record_cuts import Cut, cuts_of
from orchestrator.record_rows import RowsRecorder, Wanted, row_of
from services.config.context import RunContext
from services.config.exported import tokenizer_sha256
from services.config.schema import Config
from services.inference.client import Generation
from services.wire.rollouts import Group
from services.wire.samples import VersionSpan
from services.wire.value_rows import RowsManifest, decode_row, read_manifest
from tests.samples import make_sample


def manifest(gamma: float) -> RowsManifest:
    return RowsManifest(files={}, tokenizer_sha256="0", gamma=gamma, reward_range=[-1.0, 2.0])


def read_back(row: Any, gamma: float) -> Any:
    import msgspec

    return decode_row(msgspec.json.encode(row), manifest(gamma), vocab_size=300, max_tokens=64)


def test_a_rollouts_return_is_its_outcome_discounted_by_action_tokens() -> None:
    """Three actions, outcome 0.8, gamma 0.5: 0.2, 0.4, 0.8."""
    sample = make_sample([1, 0, 1, 1], values=[0.0] * 4, trace_id="7/0", prompt=2, reward=0.8)
    row = row_of(sample, name="7/0", policy_id="sft", gamma=0.5)
    assert (row.outcome, row.returns, row.suffix_of) == (0.8, None, None)
    assert read_back(row, 0.5).returns.tolist() == [0, 0, pytest.approx(0.2), 0, 0.4, 0.8]


def test_rewards_of_single_turns_are_part_of_every_return_before_them() -> None:
    """0.5 on the first action, outcome 0.8 on the last of three, gamma 0.5: 0.5 + 0.2, 0.4, 0.8."""
    sample = make_sample([1, 0, 1, 1], values=[0.0] * 4, trace_id="7/0", prompt=2, reward=0.8)
    sample.branch.step_rewards = np.array([0, 0, 0.5, 0, 0, 0])
    row = row_of(sample, name="7/0", policy_id="sft", gamma=0.5)
    assert row.outcome is None
    assert read_back(row, 0.5).returns.tolist() == [0, 0, pytest.approx(0.7), 0, 0.4, 0.8]


def test_a_suffix_says_where_it_begins_and_what_of_its_prefix_was_sampled() -> None:
    """Prompt 2, turn 2, observation 1: the cut is at 5; then an action of two tokens."""
    cut = Cut("7/0@5", SimpleNamespace(), np.arange(5), np.array([0, 0, 1, 1, 0], dtype=bool))  # pyright: ignore
    sample = make_sample([1, 1], values=[0.0] * 2, trace_id="t", prompt=5, reward=1.0)
    row = row_of(sample, name="7/0@5/1", policy_id="sft", gamma=1.0, cut=cut)
    assert row.action_mask == [0, 0, 1, 1, 0, 1, 1]
    assert (row.prefix_tokens, row.suffix_of, row.id) == (5, "7/0@5", "7/0@5/1")
    assert read_back(row, 1.0).action_mask.tolist() == [False] * 5 + [True] * 2


def test_cuts_are_turn_boundaries_drawn_by_the_seed() -> None:
    """Turns at 2, 4 and 6; the first is the beginning of the episode, and no cut."""
    samples = [make_sample([1, 0, 1, 0, 1], values=[0.0] * 5, trace_id=f"3/{n}", prompt=2) for n in range(40)]
    traces = [SimpleNamespace(trace_id=s.trace_id, branches=[s.branch]) for s in samples]
    task: Any = SimpleNamespace(group=3)
    group: Any = Group(traces, samples)  # pyright: ignore
    cuts = cuts_of(group, task, seed=1)
    assert {len(cut.token_ids) for cut in cuts} == {4, 6}
    assert [cut.name for cut in cuts] == [cut.name for cut in cuts_of(group, task, seed=1)]
    assert [cut.name for cut in cuts] != [cut.name for cut in cuts_of(group, task, seed=2)]
    single = make_sample([1, 1], values=[0.0] * 2, trace_id="4/0", prompt=2)
    trace = SimpleNamespace(trace_id="4/0", branches=[single.branch])
    assert cuts_of(Group([trace], [single]), task, seed=1) == []  # pyright: ignore


class Guesser:
    """An engine that guesses a number by the request's seed."""

    def __init__(self, encode: Any, eos: int, *, fails: int = 0) -> None:
        self._encode, self._eos, self._fails = encode, eos, fails

    async def generate(self, token_ids: list[int], *, seed: int, **_: Any) -> Generation:
        if self._fails:
            self._fails -= 1
            from services.wire.errors import DeadlineExceeded

            raise DeadlineExceeded("a token", 1.0)
        ids = [*self._encode(str(seed % 8)), self._eos]
        return Generation(ids, [-1.0] * len(ids), [VersionSpan(0, len(ids), 0)], "stop")


def recorder(tmp_path: Path, model: Path, wanted: Wanted, *, fails: int = 0, **algorithm: Any) -> RowsRecorder:
    config = Config.model_validate(
        {
            "seed": 4,
            "model": {"path": str(model)},
            "algorithm": {"type": "sao"} | algorithm,
            "env": [{"type": "guess", "max_turns": 4, "max_turn_tokens": 6, "max_trace_tokens": 120}],
            "value": {},
        }
    )
    url = "http://127.0.0.1:1"
    context = RunContext(
        run_id="r",
        epoch=1,
        dir=str(tmp_path),
        model_dir=str(model),
        inference_urls=[],
        policy_url=url,
        orchestrator_url=url,
        policy_grid_url=url,
    )
    from orchestrator.tokenizer import Tokenizer

    tokenizer = Tokenizer(model)
    engine: Any = Guesser(tokenizer.encode, tokenizer.eos_token_id, fails=fails)
    return RowsRecorder(config, context, wanted, [engine])


async def test_a_recording_with_suffixes_is_what_a_reader_takes(tmp_path: Path, tiny_model: Path) -> None:
    folder = await recorder(tmp_path, tiny_model, Wanted(40, 3, "seeded"), fails=2).run()
    path = folder / "rows.jsonl"
    found, facts = read_manifest(path)
    assert (found.gamma, found.reward_range, found.truncation) == (1.0, [0.0, 1.0], "terminal")
    assert found.tokenizer_sha256 == tokenizer_sha256(tiny_model)
    lines = path.read_bytes().splitlines()
    checked = [decode_row(line, found, vocab_size=300, max_tokens=120) for line in lines]
    assert facts.rows == len(checked)
    whole = [c.row for c in checked if c.row.suffix_of is None]
    assert len(whole) == 40 and {row.policy_id for row in whole} == {"seeded"}
    by_id = {row.id: row for row in whole}
    assert len(by_id) == 40
    suffixes = [c.row for c in checked if c.row.suffix_of is not None]
    names = {row.suffix_of for row in suffixes}
    assert len(suffixes) == 3 * len(names) and len(names) > 20
    for row in suffixes:
        base = by_id[str(row.suffix_of).partition("@")[0]]
        assert row.prefix_tokens is not None and row.prompt_id == base.prompt_id
        assert row.token_ids[: row.prefix_tokens] == base.token_ids[: row.prefix_tokens]
        assert row.action_mask[: row.prefix_tokens] == base.action_mask[: row.prefix_tokens]
        assert row.prompt_id.startswith("guess:guess/")
    assert {row.outcome for row in suffixes} == {0.0, 1.0}
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["is_finished"] and progress["done"] == progress["total"] == 40 + 3 * len(names)


async def test_dropped_rollouts_are_counted_and_replaced(tmp_path: Path, tiny_model: Path) -> None:
    own = recorder(tmp_path, tiny_model, Wanted(20, 0, "seeded"), fails=3)
    await own.run()
    assert own._told_drops() == "3 deadline"
    assert len((tmp_path / "rows" / "rows.jsonl").read_bytes().splitlines()) == 20


async def test_where_cut_traces_bootstrap_they_are_left_out(tmp_path: Path, tiny_model: Path) -> None:
    own = recorder(tmp_path, tiny_model, Wanted(40, 0, "seeded"), truncation="bootstrap")
    folder = await own.run()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_bytes().splitlines()]
    assert {row["stop_reason"] for row in rows} == {"terminated"}
    assert own._told_drops() == f"{40 - len(rows)} truncated"
    assert read_manifest(folder / "rows.jsonl")[0].truncation == "bootstrap"
