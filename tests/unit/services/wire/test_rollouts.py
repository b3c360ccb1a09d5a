"""Groups of rollouts on disk: everything comes back, and nothing but a whole group is taken for one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.wire.errors import CodecError
from services.wire.heads import MAX_HEAD_BYTES, make_head, split_head
from services.wire.rollout_files import (
    START_BYTES,
    decode_entry,
    decode_file,
    decode_file_header,
    encode_file,
    file_head_bytes,
)
from services.wire.rollouts import GROUP_ARRAYS, Group, decode_group, encode_group
from services.wire.samples import StopReason, VersionSpan
from tests.groups import as_data, make_group

IDENTITY = {"run_id": "demo-1", "epoch": 2, "step": 12, "policy_version": 11}


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    scored=st.booleans(),
    text=st.text(max_size=20),
)
def test_every_group_comes_back_as_it_went(lengths: list[tuple[int, ...]], seed: int, scored: bool, text: str) -> None:
    group = make_group(lengths=tuple(lengths), seed=seed, scored=scored, name=text, prompt_id=text)
    assert as_data(decode_group(encode_group(group))) == as_data(group)


def test_a_sample_shares_its_branch_with_its_trace_as_it_did_before() -> None:
    """Only step rewards that were shaped are a copy's own."""
    group = decode_group(encode_group(make_group()))
    first, second, third = group.samples
    assert first.branch is not group.traces[0].branches[0]
    assert first.branch.token_ids is group.traces[0].branches[0].token_ids
    assert second.branch is group.traces[0].branches[1] and third.branch is group.traces[1].branches[0]
    assert encode_group(group) == encode_group(make_group())


def test_a_group_that_lost_a_trace_to_staleness_goes_too() -> None:
    whole = make_group()
    part = Group(whole.traces[1:], whole.samples[2:], whole.order)
    back = decode_group(encode_group(part))
    assert as_data(back) == as_data(part) and len(back.traces) == 1


def test_what_was_decoded_can_be_written_to_and_keeps_no_file_in_memory() -> None:
    data = bytearray(encode_group(make_group()))
    group = decode_group(data)
    data.extend(b"a resize of memory that somebody looks at is a BufferError")
    assert group.samples[0].values is not None
    group.samples[0].values[:] = 0.0


@settings(deadline=None, max_examples=200)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_group_is_refused(position: int, bit: int) -> None:
    data = bytearray(encode_group(make_group()))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CodecError):
        decode_group(data)


@settings(deadline=None, max_examples=100)
@given(size=st.integers(0, 10**6), tail=st.binary(max_size=8))
def test_any_part_of_a_group_and_anything_after_it_is_refused(size: int, tail: bytes) -> None:
    data = encode_group(make_group())
    with pytest.raises(CodecError):
        decode_group(data[: size % len(data)])
    if tail:
        with pytest.raises(CodecError):
            decode_group(data + tail)


@settings(deadline=None, max_examples=300)
@given(garbage=st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    for decode in (decode_group, decode_file):
        with pytest.raises(CodecError):
            decode(garbage)


# ---------------------------------------------------------------------------------------------------------------------
# Well-formed lies: a right digest over a wrong header or wrong arrays


def forged(change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> bytes:
    """A group's bytes after a change of header or arrays, with sizes and digest made right again."""
    data = memoryview(encode_group(make_group()))
    head, body = split_head(data)
    header = msgspec.msgpack.decode(msgspec.msgpack.decode(head, type=dict[str, msgspec.Raw])["header"])
    arrays, start = {}, 0
    for (name, dtype), size in zip(GROUP_ARRAYS.items(), header["sizes"], strict=True):
        end = start + size * np.dtype(dtype).itemsize
        arrays[name], start = np.frombuffer(body[start:end], dtype=dtype).copy(), end
    change(header, arrays)
    if header["sizes"] is not None and len(header["sizes"]) == len(GROUP_ARRAYS):
        header["sizes"] = [arrays[name].size + header.get("lie", 0) for name in GROUP_ARRAYS]
    header.pop("lie", None)
    new_body = b"".join(arrays[name].tobytes() for name in GROUP_ARRAYS)
    kind = msgspec.defstruct("Header", [(name, Any) for name in header])
    return make_head(kind(**header), new_body) + new_body


def put(name: str, index: int, value: float) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name][index] = value

    return change


def of_header(path: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(header: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        node: Any = header
        for part in parents:
            node = node[part]
        node[last] = value

    return change


def resized(name: str, change: int) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def apply(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = np.resize(arrays[name], max(0, arrays[name].size + change))

    return apply


def test_a_forgery_without_a_change_is_the_group() -> None:
    assert forged(lambda header, arrays: None) == encode_group(make_group())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("values", 0, np.nan), "values holds a non-finite"),
        (put("step_rewards", 0, np.inf), "step_rewards holds a non-finite"),
        (put("shaped_step_rewards", 0, np.nan), "shaped_step_rewards holds a non-finite"),
        (put("logprobs", 2, np.nan), "logprobs holds a non-finite"),
        (put("action_mask", 0, 2), "something other than 0 and 1"),
        (put("action_mask", 0, 1), "the first token"),
        (put("loss_mask", 1, 1), "off the action mask"),
        (put("spans", 1, 4), "do not cover"),
        (put("spans", 1, 99), "outside the branch"),
        (put("lengths", 0, 0), "is empty"),
        (put("lengths", 0, 2**32 - 1), "are needed"),
        (put("span_counts", 0, 2**32 - 1), "are needed"),
        (resized("lengths", 1), "4 entries for 3 branches"),
        (resized("span_counts", -1), "2 entries for 3 branches"),
        (resized("token_ids", 1), "belong to nothing"),
        (resized("values", 1), "1 entries of values belong to nothing"),
        (resized("values", -1), "values ends after"),
        (resized("step_rewards", -1), "are needed"),
        (resized("shaped_step_rewards", 2), "belong to nothing"),
        (of_header("lie", 1), "which are not there"),
        (of_header("lie", -1), "after the last array"),
        (of_header("lie", -100), "which are not there"),
        (of_header("lie", 2**62), "which are not there"),
        (of_header("sizes", [1, 2]), "2 arrays where"),
        (of_header("traces", []), "without a trace"),
        (of_header("samples", []), "without a trace or without a sample"),
        (of_header("traces.0.reward", float("nan")), "is not finite"),
        (of_header("samples.1.reward", float("inf")), "is not finite"),
        (of_header("samples.1.bootstrap_value", float("inf")), "is not finite"),
        (of_header("samples.1.critic_step", 3), "different critics"),
        (of_header("samples.1.is_scored", False), "scored: False"),
        (of_header("samples.1.trace", 2), "which is not there"),
        (of_header("samples.1.trace", -1), "which is not there"),
        (of_header("samples.1.branch", 7), "which is not there"),
        (of_header("traces.0.stop_reason", "tired"), "does not decode"),
        (of_header("traces.0.num_turns", "1"), "does not decode"),
        (of_header("order", "first"), "does not decode"),
        (of_header("more", 1), "does not decode"),
    ],
)
def test_a_well_formed_lie_is_refused_by_what_it_breaks(
    change: Callable[[dict[str, Any], dict[str, np.ndarray]], None], said: str
) -> None:
    with pytest.raises(CodecError, match=said):
        decode_group(forged(change))


def test_encoding_refuses_what_decoding_would() -> None:
    group = make_group()
    sample = group.samples[0]
    assert sample.values is not None
    broken = [
        Group(group.traces, [replace(sample, values=sample.values.astype(np.float32))]),
        Group(group.traces, [replace(sample, values=sample.values * np.nan)]),
        Group(group.traces, [replace(sample, trace_id="9/9")]),
        Group(group.traces, [replace(sample, branch=replace(sample.branch, token_ids=sample.branch.token_ids.copy()))]),
        Group(group.traces, []),
    ]
    bad_span = [*group.traces[1].branches[0].version_spans[:-1], VersionSpan(5, 6, -1)]
    lone = replace(group.traces[1], branches=[replace(group.traces[1].branches[0], version_spans=bad_span)])
    broken.append(Group([lone], [replace(group.samples[2], branch=lone.branches[0])]))
    for each in broken:
        with pytest.raises(CodecError):
            encode_group(each)


def test_a_head_longer_than_its_limit_is_neither_written_nor_believed() -> None:
    group = make_group()
    group.traces[0].task_id = "x" * MAX_HEAD_BYTES
    with pytest.raises(CodecError, match="more than"):
        encode_group(group)
    with pytest.raises(CodecError, match="which is not there"):
        decode_group(struct.pack("<I", MAX_HEAD_BYTES + 1) + b"x" * 100)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def groups() -> list[Group]:
    return [
        make_group(order=4, critic_step=1),
        make_group(order=3, seed=1, lengths=((5,),)),
        make_group(order=9, seed=2, scored=False),
    ]


def test_a_file_comes_back_as_it_went_and_its_head_tells_what_is_where() -> None:
    data = encode_file(groups(), **IDENTITY)
    header, back = decode_file(data)
    assert as_data(back) == as_data(groups())
    assert (header.run_id, header.epoch, header.step, header.policy_version) == ("demo-1", 2, 12, 11)
    assert [(e.order, e.critic_step, e.num_traces) for e in header.groups] == [(4, 1, 2), (3, 2, 1), (9, -1, 2)]
    start = data[: START_BYTES + file_head_bytes(data[:START_BYTES])]
    header, first = decode_file_header(start, num_bytes=len(data))  # the head is enough to find a group
    begin, size = list(header.spans())[1]
    group = decode_entry(header.groups[1], data[first + begin : first + begin + size])
    assert as_data(group) == as_data(groups()[1])


def test_a_file_without_a_group_is_one() -> None:
    header, back = decode_file(encode_file([], **IDENTITY))
    assert header.groups == [] and back == []


@settings(deadline=None, max_examples=200)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7), size=st.integers(0, 10**6))
def test_a_flipped_bit_or_a_missing_end_of_a_file_is_refused(position: int, bit: int, size: int) -> None:
    data = bytearray(encode_file(groups(), **IDENTITY))
    with pytest.raises(CodecError):
        decode_file(data[: size % len(data)])
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CodecError):
        decode_file(data)


def test_groups_in_another_order_than_the_head_says_are_refused() -> None:
    one, other = make_group(order=1), make_group(order=2)
    data = encode_file([one, other], **IDENTITY)
    first, second = encode_group(one), encode_group(other)
    with pytest.raises(CodecError, match="not the one"):
        decode_file(data[: -len(first) - len(second)] + second + first)


@pytest.mark.parametrize("name", ["step", "epoch", "policy_version"])
def test_a_file_with_a_negative_number_is_refused(name: str) -> None:
    with pytest.raises(CodecError, match="negative"):
        decode_file(encode_file([], **IDENTITY | {name: -1}))


def test_a_foreign_file_is_refused_and_so_is_a_head_that_is_too_long() -> None:
    with pytest.raises(CodecError, match="not a file of rollouts"):
        decode_file(b"\x80\x04\x95 a pickle, say")
    with pytest.raises(CodecError, match="more than"):
        decode_file(b"CPROLL01" + struct.pack("<I", MAX_HEAD_BYTES + 1))


def test_stop_reasons_travel_by_name() -> None:
    assert {trace.stop_reason for trace in decode_group(encode_group(make_group())).traces} == {
        StopReason.TERMINATED,
        StopReason.TRUNCATED_LENGTH,
    }
