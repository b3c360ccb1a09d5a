"""Encoding and decoding a grid item of 4.3 million tokens, and where the time goes.

    python -m benchmarks.codec

Writes benchmarks/results/codec.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np

from benchmarks.timing import machine, timed
from services.wire import codec
from services.wire.codec import decode_item, digest_arrays, encode_item
from services.wire.grids import STREAM_ARRAYS, GridHeader, GridItem, MiniBatch, Stream

RESULT = Path(__file__).parent / "results" / "codec.md"
NUM_SAMPLES, SAMPLE_TOKENS, NUM_TURNS = 1024, 4200, 8
MAX_BYTES = 2**32


def item_of(stream: Stream) -> GridItem:
    """Samples of eight turns each; half of the tokens were sampled."""
    rng = np.random.default_rng(0)
    edges = np.linspace(0, SAMPLE_TOKENS, 2 * NUM_TURNS + 1).astype(int)
    action_mask = np.zeros((NUM_SAMPLES, SAMPLE_TOKENS), dtype="|u1")
    for start, end in zip(edges[1::2], edges[2::2], strict=True):
        action_mask[:, start:end] = 1
    mask = action_mask.reshape(-1)
    spans = np.stack([edges[1::2], edges[2::2], np.full(NUM_TURNS, 7)], axis=1)
    whole = {
        "sample_counts": np.array([NUM_SAMPLES]),
        "lengths": np.full(NUM_SAMPLES, SAMPLE_TOKENS),
        "token_ids": rng.integers(0, 150_000, mask.size),
        "action_mask": mask,
        "loss_mask": mask.copy(),
        "bootstrapped": np.zeros(NUM_SAMPLES),
        "span_counts": np.full(NUM_SAMPLES, NUM_TURNS),
        "spans": np.tile(spans.reshape(-1), NUM_SAMPLES),
    }
    whole |= {name: rng.random(mask.size) * mask for name in ("logprobs", "advantages", "returns", "old_values")}
    arrays = {name: whole[name].astype(dtype) for name, dtype in STREAM_ARRAYS[stream].items()}
    header = GridHeader(
        run_id="benchmark",
        epoch=0,
        stream=stream,
        step=0,
        policy_version=0,
        data_rank=0,
        num_data_ranks=1,
        temperature=1.0,
        loss_name="dis",
        loss_constants={},
        mini_batches=[MiniBatch(1, int(mask.sum()), NUM_SAMPLES)],
        digest=digest_arrays(arrays),
        grid_digest="0" * 64,
    )
    return GridItem(header, arrays)


def rows_of(stream: Stream, repeats: int) -> list[str]:
    """The lines of one stream."""
    item = item_of(stream)
    frames = encode_item(item)
    copies = sum(
        not np.shares_memory(np.frombuffer(frame, np.uint8), item.arrays[name])
        for name, frame in zip(STREAM_ARRAYS[stream], frames[1:], strict=True)
    )
    raw = [memoryview(frame) for frame in frames[1:]]
    num_bytes = sum(view.nbytes for view in raw)

    def hash_alone() -> None:
        sha = hashlib.sha256()
        for view in raw:
            sha.update(view)

    parts = {
        "encode": lambda: encode_item(item),
        "decode": lambda: decode_item(frames, max_bytes=MAX_BYTES),
        "sha256 of the same bytes": hash_alone,
        "checks of the arrays": lambda: codec._check_arrays(item.header, item.arrays),
    }
    rows = []
    for name, work in parts.items():
        timing = timed(work, repeats)
        rate = num_bytes / timing.cpu_s / 1e9
        rows.append(
            f"| {stream} | {name} | {timing.wall_s * 1e3:.1f} | {timing.cpu_s * 1e3:.1f} | {rate:.2f} "
            f"| {f'{copies} of {len(raw)}' if name == 'encode' else ''} |"
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="repetitions; the best is reported")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [row for stream in STREAM_ARRAYS for row in rows_of(stream, args.repeats)]
    num_tokens = NUM_SAMPLES * SAMPLE_TOKENS
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        f"""# The codec

One grid item of {num_tokens:,} tokens ({NUM_SAMPLES:,} samples of {SAMPLE_TOKENS:,} tokens and {NUM_TURNS} turns),
from numpy arrays to frames and back, with all checks and the digest of every byte. Milliseconds, the best of
{args.repeats}: of wall clock, and of the process's own CPU time, which is what the wall clock shows on an idle core.
GB/s are bytes of the arrays over CPU time. The last two rows of a stream are parts of each of the first two; the hash
is most of it. "Copies" counts frames that are not the memory of the array they came from.

{machine("python -m benchmarks.codec", ("numpy", "msgspec"), load)}

| stream | what | wall ms | CPU ms | GB/s | copies |
|---|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
