"""What a loss is divided by: from the header alone, the same on every rank."""

from __future__ import annotations

import msgspec
import pytest

from services.packing.grid import build_grid
from services.wire.codec import decode_item, encode_item
from services.wire.errors import ContractError
from services.wire.grids import GridItem, MiniBatch
from tests.samples import make_sample


def items(num_ranks: int = 2, **settings) -> list[GridItem]:
    samples = [make_sample([1] * n, trace_id=f"t{n}", group_id=f"g{n}") for n in (3, 5, 2)]
    for sample in samples:
        sample.advantages = sample.branch.action_mask.astype(float)
    return build_grid(
        samples,
        stream="policy",
        seq_len=8,
        num_data_ranks=num_ranks,
        run_id="run",
        epoch=1,
        step=0,
        policy_version=0,
        temperature=1.0,
        loss_name="dis",
        loss_constants={},
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10),
        ({"denominator": "token_mean"}, 10),
        ({"denominator": "sequence_mean"}, 3),
        ({"denominator": "constant", "denominator_tokens": 16}, 48),
    ],
)
def test_the_divisor_counts_over_all_ranks_and_survives_the_wire(settings, expected) -> None:
    for num_ranks in (1, 2, 5):
        for item in items(num_ranks, **settings):
            decoded = decode_item([bytes(frame) for frame in encode_item(item)], max_bytes=10_000)
            assert decoded.header == item.header
            (mini_batch,) = decoded.header.mini_batches
            assert decoded.header.divisor(mini_batch) == expected


def test_an_empty_batch_divides_by_one_and_a_constant_needs_its_number() -> None:
    header = items()[0].header
    empty = MiniBatch(1, 0, 0)
    for denominator in ("token_mean", "sequence_mean"):
        assert msgspec.structs.replace(header, denominator=denominator).divisor(empty) == 1
    with pytest.raises(ContractError, match="constant denominator of 0 tokens"):
        msgspec.structs.replace(header, denominator="constant").divisor(empty)


def test_a_token_mean_adds_no_byte_to_a_header() -> None:
    header = msgspec.msgpack.encode(items()[0].header)
    assert b"denominator" not in header
    assert b"denominator" in msgspec.msgpack.encode(items(denominator="sequence_mean")[0].header)
