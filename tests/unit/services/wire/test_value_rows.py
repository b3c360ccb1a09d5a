"""Rows that a critic is pretrained on: what is read, and what is refused with which reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.wire.errors import ConfigError
from services.wire.samples import StopReason
from services.wire.value_rows import (
    BadRow,
    CheckedRow,
    FileFacts,
    RowsManifest,
    ValueRow,
    decode_row,
    encode_row,
    name_hash,
    read_manifest,
    write_manifest,
)
from tests.corpora import SHA, VOCABULARY, row, write_corpus


def manifest(**changes: Any) -> RowsManifest:
    plain: dict[str, Any] = {"files": {}, "tokenizer_sha256": SHA, "gamma": 1.0, "reward_range": [0.0, 1.0]}
    return RowsManifest(**(plain | changes))


def decode(line: dict[str, Any] | bytes, *, max_tokens: int = 16, **changes: Any) -> CheckedRow:
    data = line if isinstance(line, bytes) else msgspec.json.encode(line)
    return decode_row(data, manifest(**changes), vocab_size=VOCABULARY, max_tokens=max_tokens)


def test_an_outcome_is_the_return_of_every_action_token() -> None:
    checked = decode(row())
    assert checked.action_mask.tolist() == [False, False, True, True, False, True]
    assert checked.returns.tolist() == [0, 0, 1, 1, 0, 1]
    assert checked.token_ids.dtype == np.uint32
    assert checked.first_action == 2


def test_gamma_counts_action_tokens_up_to_the_last_one() -> None:
    """Three action tokens: 0.5^2, 0.5^1, 0.5^0 of an outcome of 0.8; the observation costs nothing."""
    assert decode(row(**{"return": 0.8}), gamma=0.5).returns.tolist() == [0, 0, 0.2, 0.4, 0, 0.8]


def test_returns_of_single_tokens_are_taken_on_action_tokens_only() -> None:
    line = row(**{"return": None}, returns=[9.0, 9.0, 0.25, 0.5, 9.0, 1.0])
    assert decode(line).returns.tolist() == [0, 0, 0.25, 0.5, 0, 1.0]


def test_a_suffix_has_its_prefix_masked() -> None:
    checked = decode(row(prefix_tokens=5, suffix_of="r0@5"))
    assert checked.action_mask.tolist() == [False] * 5 + [True]
    assert checked.returns.tolist() == [0, 0, 0, 0, 0, 1.0]
    assert checked.first_action == 5


def test_gamma_of_a_suffix_counts_the_suffix() -> None:
    line = row(prefix_tokens=3, suffix_of="p")
    assert decode(line, gamma=0.5).returns.tolist() == [0, 0, 0, 0.5, 0, 1.0]


BAD: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "mask too short": (row(action_mask=[0, 1]), "action_mask has 2 entries for 6 tokens"),
    "returns too long": (row(**{"return": None}, returns=[0.0] * 7), "returns has 7 entries for 6 tokens"),
    "no tokens": (row(token_ids=[], action_mask=[]), "token_ids is empty"),
    "too long": (row(token_ids=[5] * 17, action_mask=[0] + [1] * 16), "17 tokens, and value.model.seq_len is 16"),
    "id beyond": (row(token_ids=[5, 6, 7, 8, 9, VOCABULARY]), f"token id {VOCABULARY} is outside of the vocabulary"),
    "id below": (row(token_ids=[5, 6, -7, 8, 9, 10]), "token id -7 is outside"),
    "first is an action": (row(action_mask=[1, 0, 1, 1, 0, 1]), "action_mask[0] is true"),
    "no action": (row(action_mask=[0] * 6), "no action token"),
    "no action after the prefix": (
        row(action_mask=[0, 0, 1, 1, 0, 0], prefix_tokens=4, suffix_of="p"),
        "prefix_tokens is 4, and no action token stands there",
    ),
    "prefix is all": (row(prefix_tokens=6, suffix_of="p"), "prefix_tokens is 6"),
    "half a suffix": (row(prefix_tokens=5), "prefix_tokens and suffix_of go together"),
    "no return": (row(**{"return": None}), "give either return or returns"),
    "both returns": (row(returns=[0.0] * 6), "give either return or returns"),
    "return beyond": (row(**{"return": 1.5}), "return 1.5 lies outside of the manifest's [0, 1]"),
    "return below": (row(**{"return": -0.5}), "return -0.5 lies outside"),
    "aborted": (row(stop_reason="aborted"), "an aborted rollout has no return"),
    "unknown stop": (row(stop_reason="tired"), "Invalid enum value 'tired'"),
    "unknown field": (row(reward=1.0), "unknown field `reward`"),
    "missing field": (row(policy_id=None), "missing required field `policy_id`"),
    "mask of other numbers": (row(action_mask=[0, 0, 2, 1, 0, 1]), "Invalid enum value 2"),
    "NaN": (msgspec.json.encode(row()).replace(b"1.0", b"NaN"), "a number that is not finite"),
    "too large a number": (msgspec.json.encode(row()).replace(b"1.0", b"1e999"), "out of range"),
    "no JSON": (b"{", "truncated"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_with_its_reason(name: str) -> None:
    line, reason = BAD[name]
    with pytest.raises(BadRow) as error:
        decode(line)
    assert reason in str(error.value)


def test_with_gamma_below_one_returns_may_lie_between_the_range_and_zero() -> None:
    assert decode(row(), gamma=0.5, reward_range=[0.9, 1.0]).returns[2] == 0.25
    with pytest.raises(BadRow, match="outside"):
        decode(row(**{"return": 0.5}), gamma=1.0, reward_range=[0.9, 1.0])


def test_a_row_comes_back_as_it_was_written() -> None:
    plain = ValueRow(
        id="1/0",
        prompt_id="add:1",
        policy_id="a",
        token_ids=[1, 2],
        action_mask=[0, 1],
        outcome=0.5,
        stop_reason=StopReason.TERMINATED,
    )
    line = encode_row(plain)
    assert b'"return":0.5' in line and b"suffix_of" not in line and line.endswith(b"\n")
    assert decode(line).row == plain


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, [row()], gamma=0.5, truncation="bootstrap")
    found, facts = read_manifest(path)
    assert (found.gamma, found.truncation, found.reward_range, facts.rows) == (0.5, "bootstrap", [0.0, 1.0], 1)


def test_manifests_that_are_missing_foreign_or_wrong_are_refused(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, [row()])
    with pytest.raises(ConfigError, match="does not name it"):
        read_manifest(path.with_name("other.jsonl"))
    beside = path.with_name("manifest.json")
    for before, after, reason in (
        ('"schema": 1', '"schema": 2', "schema"),
        ('"gamma": 1.0', '"gamma": 1.5', "gamma 1.5"),
        ('"monte_carlo"', '"td"', "objective"),
    ):
        text = beside.read_text()
        assert before in text
        beside.write_text(text.replace(before, after))
        with pytest.raises(ConfigError, match=reason):
            read_manifest(path)
        beside.write_text(text)
    beside.unlink()
    with pytest.raises(ConfigError, match=r"no manifest\.json beside it"):
        read_manifest(path)


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward_range"):
        write_manifest(tmp_path, manifest(files={"a": FileFacts(SHA, 1)}, reward_range=[1.0, 0.0]))


def test_the_hash_of_a_name_is_the_same_in_every_process() -> None:
    """The first 8 bytes of sha256("add:add/3+4"), little-endian."""
    import hashlib

    assert name_hash("add:add/3+4") == int(hashlib.sha256(b"add:add/3+4").digest()[7::-1].hex(), 16)
