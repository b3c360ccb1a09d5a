"""Bodies of scoring requests: read branch by branch, exactly what a whole-body parser of JSON would read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from value_service.requests import JSON, Limits, Parsed, RequestRefused, parse

LIMITS = Limits(bytes=10**6, branches=4, branch_tokens=5, tokens=12, vocab_size=100)


def read(body: bytes, limits: Limits = LIMITS) -> Parsed:
    return parse(body, JSON, limits)


def branches_of(parsed: Parsed) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(parsed.batch.token_ids, np.cumsum(parsed.batch.lengths)[:-1])]


def reference(body: bytes) -> list[list[int]] | None:
    """What the standard library reads, held against the rules one by one; None where it must be refused."""
    try:
        content = json.loads(body, parse_constant=lambda name: 1 / 0)
    except (ValueError, RecursionError, ZeroDivisionError):
        return None
    if not isinstance(content, dict) or len(content) != 1:
        return None
    ((name, value),) = content.items()
    if name not in ("batched_token_ids", "token_ids") or not isinstance(value, list):
        return None
    branches = [value] if name == "token_ids" else value
    if not 1 <= len(branches) <= 4 or not all(
        isinstance(branch, list) and 1 <= len(branch) <= 5 for branch in branches
    ):
        return None
    ids = [each for branch in branches for each in branch]
    return branches if len(ids) <= 12 and all(type(each) is int and 0 <= each < 100 for each in ids) else None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 120) | st.floats(0, 5) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=8,
)


@settings(max_examples=400)
@given(
    st.sampled_from(["batched_token_ids", "token_ids"]),
    JSON_VALUES | st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=5),
    st.sampled_from([None, 1]),
    st.data(),
)
def test_it_takes_what_a_whole_body_parser_takes_and_reads_the_same(name, value, indent, data) -> None:
    body = bytearray(json.dumps({name: value}, indent=indent).encode())
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(body)))
        body[position : position + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(list('[],{} 1."-:e\n'))
        ).encode()
    expected = reference(bytes(body))
    try:
        read_ = branches_of(read(bytes(body)))
    except RequestRefused as error:
        assert error.status in (400, 422) and len(error.reason) < 400 and "\n" not in error.reason
        read_ = None
    assert read_ == expected, bytes(body)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"batched_token_ids": [[1], []]}', 422, "batched_token_ids[1]: empty branch"),
        (b'{"batched_token_ids": []}', 422, "no branch"),
        (
            b'{"batched_token_ids": [[1, 2, 3, 4, 5, 6]]}',
            422,
            "batched_token_ids[0]: 6 tokens, value.model.seq_len is 5",
        ),
        (b'{"batched_token_ids": [[1], [1], [1], [1], [1]]}', 422, "more than 4 branches"),
        (b'{"batched_token_ids": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3]]}', 422, "more than 12 tokens"),
        (b'{"batched_token_ids": [[1], [100]]}', 422, "batched_token_ids[1]: a token id outside the vocabulary of 100"),
        (b'{"token_ids": [1, true]}', 422, "token_ids: Expected `int`, got `bool`"),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", 422, "token_ids: too long"),
        (b'{"token_ids": [' + b"9" * 200 + b"]}", 422, "token_ids"),
        (b'{"token_ids": [NaN]}', 400, "not valid JSON"),
        (b'{"token_ids": [1], "batched_token_ids": [[1]]}', 422, "exactly one"),
        (b'{"token_ids": [1], "secret": 5}', 422, "body: an unknown field"),
        (b'{"secret": 5}', 422, "body: an unknown field"),
        (b"{}", 422, "exactly one"),
        (b"", 400, "not valid JSON"),
        (b"[" * 100_000, 422, "body"),
        (b'{"token_ids": ' + b"[" * 100_000, 422, "body"),
        (b'{"token_ids": [1, 2', 400, "not valid JSON"),
        (b'{"token_ids": [1]} x', 400, "not valid JSON"),
        (b" " * 300_000 + b'{"token_ids": [1]}', 400, "not JSON with exactly one"),
        (b"\xff\xfe", 400, "not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_without_what_was_sent(body: bytes, status: int, reason: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read(body)
    assert refused.value.status == status and reason in refused.value.reason
    assert "secret" not in refused.value.reason and "999" not in refused.value.reason
