"""Scoring as MessagePack: golden bytes, and nothing but whole arrays that fit each other."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.wire.errors import CodecError, ScoreContractError
from services.wire.scoring import (
    ScoredBatch,
    TokenBatch,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

SCORED = ScoredBatch(
    np.array([2, 1], dtype="<u4"), np.array([0, 0.5, 0], dtype="<f4"), np.array([1, -2], dtype="<f4"), 3
)


def test_a_request_has_these_bytes() -> None:
    """A map of two; bin 8 of 8 bytes: 2, 1; bin 8 of 12 bytes: 7, 8, 256."""
    expected = b"\x82\xa7lengths\xc4\x08\x02\0\0\0\x01\0\0\0\xa9token_ids\xc4\x0c\x07\0\0\0\x08\0\0\0\0\x01\0\0"
    assert encode_request(TokenBatch.of([[7, 8], [256]])) == expected


def test_a_reply_has_these_bytes() -> None:
    expected = (
        b"\x84\xa7lengths\xc4\x08\x02\0\0\0\x01\0\0\0\xa6values\xc4\x0c\0\0\0\0\0\0\0\x3f\0\0\0\0"
        b"\xb0bootstrap_values\xc4\x08\0\0\x80\x3f\0\0\0\xc0\xabcritic_step\x03"
    )
    assert encode_reply(SCORED) == expected
    reply = decode_reply(expected).to_reply()
    assert (reply.values, reply.bootstrap_values, reply.critic_step) == ([[0.0, 0.5], [0.0]], [1.0, -2.0], 3)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=5))
def test_what_is_encoded_comes_back(branches: list[list[int]]) -> None:
    batch = decode_request(encode_request(TokenBatch.of(branches)))
    cuts = np.cumsum(batch.lengths)[:-1]
    assert [ids.tolist() for ids in np.split(batch.token_ids, cuts)][: len(branches)] == branches


@pytest.mark.parametrize("branch", [[-1], [2**32], [1.5], [True], ["7"], [[1]]])
def test_what_is_no_token_id_is_refused_by_its_branch(branch: list) -> None:
    with pytest.raises(ScoreContractError, match="branch 1: token ids"):
        TokenBatch.of([[1, 2], branch])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"lengths": b"\1\0\0", "token_ids": b""}, "lengths: 3 bytes"),
        ({"lengths": b"\1\0\0\0", "token_ids": b""}, "lengths: they sum to 1, but token_ids holds 0"),
        ({"lengths": b"\xff" * 400, "token_ids": b"\1\0\0\0"}, "they sum to 429496729500"),
        ({"lengths": "abcd", "token_ids": b""}, r"lengths"),
        ({"lengths": b""}, "token_ids"),
        ({"lengths": b"", "token_ids": b"", "secret": 1}, "^body: an unknown field$"),
        ([1], "Expected `object`"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_in_words_of_ours(content: object, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_request(msgspec.msgpack.encode(content))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_codec_error(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            decode(data)
        except CodecError as error:
            assert len(str(error)) < 300
