"""Grid items survive the wire unchanged, and nothing that is not a grid item does."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from services.wire.codec import MAX_HEADER_BYTES, decode_item, digest_arrays, encode_item, item_digest
from services.wire.errors import CodecError
from services.wire.grids import STREAM_ARRAYS, GridItem, MiniBatch, Stream
from tests.grids import make_item, with_header

MAX_BYTES = 2**20


def encoded(item: GridItem) -> list[bytes]:
    return [bytes(frame) for frame in encode_item(item)]


@settings(deadline=None, max_examples=50)
@given(
    stream=st.sampled_from(["policy", "critic"]),
    lengths=st.lists(st.integers(1, 40), max_size=8),
    seed=st.integers(0, 2**31),
)
def test_every_item_comes_back_as_it_went(stream: Stream, lengths: list[int], seed: int):
    lengths = [max(length, 2) for length in lengths]
    item = make_item(stream=stream, lengths=tuple(lengths), seed=seed)
    back = decode_item(encoded(item), max_bytes=MAX_BYTES)
    assert back.header == item.header
    for name, array in item.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)


def test_a_policy_grid_costs_fourteen_bytes_a_token():
    def size(lengths: tuple[int, ...]) -> int:
        return sum(map(len, encoded(make_item(lengths=lengths))[1:]))

    per_sample = 4 + 4 + 12  # its length, its number of spans, one span
    assert size((20_000,)) == 14 * 20_000 + per_sample + 8
    assert size((20_000, 10_000)) == 14 * 30_000 + 2 * per_sample + 8


def test_a_critic_grid_costs_fourteen_bytes_a_token_and_five_a_sample():
    def size(lengths: tuple[int, ...]) -> int:
        return sum(map(len, encoded(make_item(stream="critic", lengths=lengths))[1:]))

    per_sample = 4 + 1  # its length, and whether its targets are bootstrapped
    assert size((20_000,)) == 14 * 20_000 + per_sample + 8
    assert size((20_000, 10_000)) == 14 * 30_000 + 2 * per_sample + 8


def test_each_micro_batch_gets_the_flags_of_its_own_samples():
    """Flags 0 1 0 over micro-batches of two samples, one and none; the policy's stream has no flag."""
    arrays = make_item(stream="critic", lengths=(4, 3, 5)).arrays | {"sample_counts": np.array([2, 1, 0], "<u4")}
    item = with_header(arrays, stream="critic")
    item.header = msgspec.structs.replace(item.header, mini_batches=[MiniBatch(3, 7, 3)])
    back = decode_item(encoded(item), max_bytes=MAX_BYTES)
    ((_, micro_batches),) = back.mini_batches()
    assert [m.sample_arrays["bootstrapped"].tolist() for m in micro_batches] == [[0, 1], [0], []]
    ((_, micro_batches),) = make_item().mini_batches()
    assert [m.sample_arrays for m in micro_batches] == [{}, {}]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, zmq.Frame])
def test_bytes_memoryviews_and_zmq_frames_decode_without_a_copy(wrap: Callable):
    frames = [wrap(frame) for frame in encoded(make_item())]
    item = decode_item(frames, max_bytes=MAX_BYTES)
    token_ids = item.arrays["token_ids"]
    assert not token_ids.flags.owndata
    assert np.shares_memory(token_ids, np.frombuffer(memoryview(frames[3]), dtype=np.uint8))


@pytest.mark.parametrize("stream", ["policy", "critic"])
def test_no_frame_is_a_copy_and_no_decoded_array_is_either(stream: Stream):
    """One array from end to end: the sender's memory is what the socket is given, the receiver reads what came."""
    item = make_item(stream=stream, lengths=(400, 300))
    frames = encode_item(item)
    assert len(frames) == 1 + len(STREAM_ARRAYS[stream])
    back = decode_item(frames, max_bytes=MAX_BYTES)
    for name, frame in zip(STREAM_ARRAYS[stream], frames[1:], strict=True):
        assert np.shares_memory(np.frombuffer(frame, np.uint8), item.arrays[name]), name
        assert np.shares_memory(back.arrays[name], item.arrays[name]), name


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(2, 8), min_size=1, max_size=4),
    spans=st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=3), min_size=4, max_size=4),
    mask=st.lists(st.booleans(), min_size=32, max_size=32),
    follow=st.booleans(),
)
def test_spans_are_accepted_exactly_where_they_cover_each_action_token_once(
    lengths: list[int], spans: list[list[tuple[int, int]]], mask: list[bool], follow: bool
):
    """Against counting token by token; with `follow` the mask is what the spans cover, so that most are accepted."""
    arrays = dict(make_item(lengths=tuple(lengths)).arrays)
    covered = [[0] * length for length in lengths]
    for counts, own in zip(covered, spans, strict=False):
        for start, size in own:
            for token in range(start, min(start + size, len(counts))):
                counts[token] += 1
    fits = all(start + size <= n for n, own in zip(lengths, spans, strict=False) for start, size in own)
    total = [count for counts in covered for count in counts]
    action = np.array([count > 0 for count in total] if follow else mask[: len(total)], "|u1")
    starts = np.cumsum(lengths) - lengths
    if action[starts].any():
        return  # refused for its first token
    used = spans[: len(lengths)]
    arrays |= {"action_mask": action, "loss_mask": action}
    arrays["span_counts"] = np.array([len(own) for own in used], "<u4")
    arrays["spans"] = np.array([n for own in used for a, size in own for n in (a, a + size, 7)], "<u4")
    item = with_header(arrays)
    if fits and total == action.tolist():
        assert decode_item(encoded(item), max_bytes=MAX_BYTES).header == item.header
    else:
        with pytest.raises(CodecError, match="span"):
            encode_item(item)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=12))
def test_random_bytes_raise_codec_error_and_nothing_else(frames: list[bytes]):
    with pytest.raises(CodecError):
        decode_item(frames, max_bytes=MAX_BYTES)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), stream=st.sampled_from(["policy", "critic"]))
def test_any_altered_byte_raises_codec_error(data: st.DataObject, stream: Stream):
    frames = [bytearray(frame) for frame in encoded(make_item(stream=stream))]
    frame = data.draw(st.sampled_from([f for f in frames if f]))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError):
        decode_item(frames, max_bytes=MAX_BYTES)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_lost_repeated_and_shortened_frames_raise_codec_error(data: st.DataObject):
    frames = encoded(make_item())
    position = data.draw(st.integers(0, len(frames) - 1))
    cut = data.draw(st.integers(0, max(0, len(frames[position]) - 1)))
    change = data.draw(st.sampled_from(["lose", "repeat", "shorten", "lengthen", "swap"]))
    if change == "lose":
        del frames[position]
    elif change == "repeat":
        frames.insert(position, frames[position])
    elif change == "shorten":
        frames[position] = frames[position][:cut]
    elif change == "lengthen":
        frames[position] += b"\0"
    else:
        other = (position + 1) % len(frames)
        frames[position], frames[other] = frames[other], frames[position]
    if frames == encoded(make_item()):
        return  # two equal neighbours changed places
    with pytest.raises(CodecError):
        decode_item(frames, max_bytes=MAX_BYTES)


def reseal(frames: list[bytes], **header_changes: object) -> list[bytes]:
    """Rewrite the header as a peer with a bug would: consistent digests, wrong content."""
    import hashlib

    envelope = msgspec.msgpack.decode(frames[0])
    header = msgspec.msgpack.encode(envelope["header"] | header_changes)
    sizes = msgspec.msgpack.encode(envelope["arrays"])
    digest = hashlib.sha256(header + sizes).hexdigest()
    envelope = {"header": msgspec.Raw(header), "arrays": msgspec.Raw(sizes), "digest": digest}
    return [msgspec.msgpack.encode(envelope), *frames[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": "value"},
        {"stream": "critic"},
        {"epoch": -1},
        {"step": True},
        {"step": 2**70 % 2**63 - 2**63},
        {"data_rank": 1},
        {"num_data_ranks": 0},
        {"temperature": math.nan},
        {"temperature": 0.0},
        {"loss_constants": {"eps_low": math.inf}},
        {"denominator": "constant"},
        {"denominator": "token_mean", "denominator_tokens": 5},
        {"denominator": "median"},
        {"mini_batches": []},
        {"mini_batches": [{"num_micro_batches": 3, "tokens": 4, "samples": 2}]},
        {"mini_batches": [{"num_micro_batches": 2, "tokens": -4, "samples": 2}]},
        {"mini_batches": [{"num_micro_batches": 0, "tokens": 4, "samples": 2}] * 2},
        {"mini_batches": "x"},
        {"digest": "0" * 64},
    ],
)
def test_a_header_that_does_not_fit_raises_codec_error(changes: dict):
    frames = encoded(make_item())
    decode_item(reseal(frames), max_bytes=MAX_BYTES)
    with pytest.raises(CodecError):
        decode_item(reseal(frames, **changes), max_bytes=MAX_BYTES)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bootstrapped", [1], "1 entries for 2 samples"),
        ("bootstrapped", [0, 0, 0], "3 entries for 2 samples"),
        ("bootstrapped", [0, 2], "0 and 1"),
        ("sample_counts", [2], "micro-batches"),
        ("sample_counts", [1, 0], "add up"),
        ("sample_counts", [2**32 - 1, 2**32 - 1], "add up"),
        ("lengths", [7, 0], "no tokens"),
        ("lengths", [4, 4], "entries for 8 tokens"),
        ("token_ids", [0] * 6, "entries for 7 tokens"),
        ("action_mask", [0, 0, 2, 1, 0, 0, 1], "0 and 1"),
        ("action_mask", [1, 0, 1, 1, 0, 0, 1], "first token"),
        ("loss_mask", [0, 1, 1, 1, 0, 0, 1], "off the action mask"),
        ("logprobs", [0, 0, math.nan, 0, 0, 0, 0], "non-finite"),
        ("advantages", [0, 0, math.inf, 0, 0, 0, 0], "non-finite"),
        ("span_counts", [1], "span_counts"),
        ("span_counts", [1, 2], "span_counts"),
        ("span_counts", [2**32 - 1, 2**32 - 1], "span_counts"),
        ("spans", [2, 4, 7, 2, 4, 7], "outside its sample"),
        ("spans", [2, 4, 7, 2, 2, 7], "empty"),
        ("spans", [2, 3, 7, 2, 3, 7], "cover exactly"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_both_ends(name: str, values: list[float], message: str):
    stream: Stream = "policy" if name in STREAM_ARRAYS["policy"] else "critic"
    good = make_item(stream=stream)
    arrays = good.arrays | {name: np.array(values).astype(good.arrays[name].dtype)}
    item = with_header(arrays, stream=stream)
    with pytest.raises(CodecError, match=message):
        encode_item(item)
    frames = encoded(good)
    sizes = [[key, arrays[key].size] for key in STREAM_ARRAYS[stream]]
    envelope = msgspec.msgpack.decode(frames[0]) | {"arrays": sizes}
    frames[0] = msgspec.msgpack.encode(envelope)
    position = 1 + list(STREAM_ARRAYS[stream]).index(name)
    frames[position] = arrays[name].tobytes()
    with pytest.raises(CodecError, match=message):
        decode_item(reseal(frames, digest=item.header.digest), max_bytes=MAX_BYTES)


def test_an_item_over_the_limit_is_refused_before_anything_is_read():
    frames = encoded(make_item())
    with pytest.raises(CodecError, match="limit"):
        decode_item(frames, max_bytes=sum(map(len, frames)) - 1)
    with pytest.raises(CodecError, match="frame 0"):
        decode_item([bytes(MAX_HEADER_BYTES + 1)], max_bytes=2 * MAX_HEADER_BYTES)


def test_a_pickle_is_never_loaded():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a byte from a socket was unpickled",))

    frames = encoded(make_item())
    for position in range(len(frames)):
        with pytest.raises(CodecError):
            decode_item([*frames[:position], pickle.dumps(Bomb()), *frames[position + 1 :]], max_bytes=MAX_BYTES)


def test_the_encoder_refuses_wrong_dtypes_missing_arrays_and_wrong_digests():
    good = make_item()
    with pytest.raises(CodecError, match="token_ids"):
        encode_item(GridItem(good.header, good.arrays | {"token_ids": good.arrays["token_ids"].astype(np.int64)}))
    with pytest.raises(CodecError, match="arrays"):
        encode_item(GridItem(good.header, {k: v for k, v in good.arrays.items() if k != "logprobs"}))
    with pytest.raises(CodecError, match="unknown stream"):
        encode_item(GridItem(msgspec.structs.replace(good.header, stream="value"), good.arrays))
    with pytest.raises(CodecError, match="digest"):
        encode_item(with_header(good.arrays, digest="0" * 64))
    with pytest.raises(CodecError, match="unknown"):
        digest_arrays({"rewards": np.zeros(1)})


def test_the_digest_is_of_the_content_not_of_the_dicts_order():
    arrays = make_item().arrays
    assert digest_arrays(dict(reversed(arrays.items()))) == digest_arrays(arrays)
    assert digest_arrays(make_item(seed=1).arrays) != digest_arrays(arrays)


def test_the_item_digest_covers_the_loss_denominators():
    """Same arrays, other denominators: another item."""
    item = make_item()
    header = msgspec.structs.replace(item.header, mini_batches=[MiniBatch(2, 99, 2)])
    other = GridItem(header=header, arrays=item.arrays)
    assert item_digest(encode_item(item)[0]) != item_digest(encode_item(other)[0])
    with pytest.raises(CodecError):
        item_digest(b"x")
