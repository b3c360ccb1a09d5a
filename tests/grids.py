"""Small valid grid items for tests, made by hand so that tests of the wire need no packer."""

from __future__ import annotations

import numpy as np

from services.wire.codec import digest_arrays
from services.wire.grids import STREAM_ARRAYS, GridHeader, GridItem, MiniBatch, Stream


def make_item(
    *,
    stream: Stream = "policy",
    step: int = 0,
    data_rank: int = 0,
    num_data_ranks: int = 1,
    run_id: str = "run",
    epoch: int = 1,
    lengths: tuple[int, ...] = (4, 3),
    seed: int = 0,
) -> GridItem:
    """One item: a micro-batch with all samples and a dummy; the second half of each sample was sampled."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(lengths)
    action_mask = np.concatenate([np.zeros(0, bool), *(np.arange(n) >= (n + 1) // 2 for n in lengths)]).astype("|u1")
    spans = [bound for n in lengths for bound in ((n + 1) // 2, n, 7)]
    arrays = {
        "sample_counts": np.array([len(lengths), 0]),
        "lengths": np.array(lengths),
        "token_ids": rng.integers(0, 261, num_tokens),
        "action_mask": action_mask,
        "loss_mask": action_mask,
        "logprobs": -rng.random(num_tokens) * action_mask,
        "advantages": rng.standard_normal(num_tokens) * action_mask,
        "returns": rng.random(num_tokens) * action_mask,
        "old_values": rng.random(num_tokens) * action_mask,
        "bootstrapped": np.arange(len(lengths)) % 2,
        "span_counts": np.ones(len(lengths)),
        "spans": np.array(spans),
    }
    typed = {name: arrays[name].astype(dtype) for name, dtype in STREAM_ARRAYS[stream].items()}
    return with_header(
        typed, stream=stream, step=step, data_rank=data_rank, num_data_ranks=num_data_ranks, run_id=run_id, epoch=epoch
    )


def with_header(
    arrays: dict[str, np.ndarray],
    *,
    stream: Stream = "policy",
    step: int = 0,
    data_rank: int = 0,
    num_data_ranks: int = 1,
    run_id: str = "run",
    epoch: int = 1,
    digest: str | None = None,
) -> GridItem:
    """Put a matching header before arrays."""
    header = GridHeader(
        run_id=run_id,
        epoch=epoch,
        stream=stream,
        step=step,
        policy_version=step,
        data_rank=data_rank,
        num_data_ranks=num_data_ranks,
        temperature=1.0,
        loss_name="dis" if stream == "policy" else "mse",
        loss_constants={"eps_low": 0.3, "eps_high": 5.0} if stream == "policy" else {},
        mini_batches=[MiniBatch(num_micro_batches=2, tokens=int(arrays["loss_mask"].sum()), samples=2)],
        digest=digest_arrays(arrays) if digest is None else digest,
        grid_digest="0" * 64,
    )
    return GridItem(header=header, arrays=arrays)
