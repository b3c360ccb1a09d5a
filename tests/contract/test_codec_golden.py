"""The bytes of a grid item are a contract: a change here is a change of the wire."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from services.wire.codec import decode_item, digest_arrays, encode_item
from services.wire.grids import STREAM_ARRAYS, GridHeader, GridItem, MiniBatch, Stream

GOLDEN = Path(__file__).parent / "golden"


def golden_item(stream: Stream) -> GridItem:
    """Two samples and a dummy, every number written out."""
    arrays: dict[str, list[float]] = {
        "sample_counts": [2, 0],
        "lengths": [4, 3],
        "token_ids": [56, 48, 57, 4, 70000, 12, 4],
        "action_mask": [0, 0, 1, 1, 0, 1, 1],
        "loss_mask": [0, 0, 1, 1, 0, 0, 1],
        "logprobs": [0, 0, -0.5, -1.25, 0, -3.0, -0.125],
        "advantages": [0, 0, 1.5, 1.5, 0, -0.75, -0.75],
        "returns": [0, 0, 1, 1, 0, 0.25, 0.25],
        "old_values": [0, 0, 0.5, 0.75, 0, -0.5, 0.125],
        "bootstrapped": [0, 1],
        "span_counts": [2, 1],
        "spans": [2, 3, 11, 3, 4, 12, 1, 3, 12],
    }
    typed = {name: np.array(arrays[name]).astype(dtype) for name, dtype in STREAM_ARRAYS[stream].items()}
    header = GridHeader(
        run_id="demo-1",
        epoch=3,
        stream=stream,
        step=12,
        policy_version=12,
        data_rank=1,
        num_data_ranks=2,
        temperature=0.75,
        loss_name={"policy": "dis", "critic": "mse"}[stream],
        loss_constants={"policy": {"eps_low": 0.25, "eps_high": 5.0}, "critic": {}}[stream],
        mini_batches=[MiniBatch(1, 40, 9), MiniBatch(1, 36, 8)],
        digest=digest_arrays(typed),
        grid_digest="ab" * 32,
    )
    return GridItem(header=header, arrays=typed)


def join(frames: list[bytes]) -> bytes:
    """One file of a multipart: each frame after its length (u32, little-endian)."""
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def split(data: bytes) -> list[bytes]:
    frames = []
    while data:
        (size,) = struct.unpack_from("<I", data)
        frames.append(data[4 : 4 + size])
        data = data[4 + size :]
    return frames


@pytest.mark.parametrize("stream", ["policy", "critic"])
def test_a_grid_item_encodes_to_the_golden_bytes(stream: Stream):
    encoded = join([bytes(frame) for frame in encode_item(golden_item(stream))])
    assert encoded == (GOLDEN / f"{stream}_item.bin").read_bytes()


@pytest.mark.parametrize("stream", ["policy", "critic"])
def test_the_golden_bytes_decode_to_the_item(stream: Stream):
    item = decode_item(split((GOLDEN / f"{stream}_item.bin").read_bytes()), max_bytes=10_000)
    expected = golden_item(stream)
    assert item.header == expected.header
    assert list(item.arrays) == list(STREAM_ARRAYS[stream])
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(item.arrays[name], array)
        assert item.arrays[name].dtype == array.dtype
