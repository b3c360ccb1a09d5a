"""The index of a pretraining run's rows: what is refused, who is held out, in which order rows come, in what memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.wire.errors import ConfigError
from tests.corpora import VOCABULARY, learnable, row, write_corpus
from value_service.pretrain_data import Batches, Position, RowIndex, RowReader, build_index, is_held_out, order_of

ROOT = Path(__file__).parents[3]


def index_of(*files: Path, seed: int = 0, held_out_fraction: float = 0.0) -> RowIndex:
    names = [str(file) for file in files]
    limits = {"vocab_size": VOCABULARY, "max_tokens": 16}
    return build_index(names, seed=seed, held_out_fraction=held_out_fraction, **limits)


def reader_of(index: RowIndex) -> RowReader:
    return RowReader(index, vocab_size=VOCABULARY, max_tokens=16)


def test_every_bad_row_of_every_file_is_told_with_its_line(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "a", [row(0), row(1, action_mask=[0]), row(2), row(3, **{"return": 7.0})])
    two = write_corpus(tmp_path / "b", [row(4, surprise=1)])
    with pytest.raises(ConfigError) as error:
        index_of(one, two)
    told = "\n".join(error.value.problems)
    assert f"{one}:2: action_mask has 1 entries" in told
    assert f"{one}:4: return 7 lies outside" in told
    assert f"{two}:1: Object contains unknown field `surprise`" in told
    assert len(error.value.problems) == 3


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, [row(number, action_mask=[0]) for number in range(30)])
    with pytest.raises(ConfigError) as error:
        index_of(path)
    assert len(error.value.problems) == 21 and "10 more bad rows" in error.value.problems[-1]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"sha256": "f" * 64}, "its sha256 is"), ({"rows": 3}, "2 rows, its manifest says 3")],
)
def test_a_file_that_is_not_what_its_manifest_says_is_refused(tmp_path: Path, facts: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        index_of(write_corpus(tmp_path, [row(0), row(1)], **facts))


def test_an_id_may_be_given_once_a_file(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a", [row(0), row(1), row(2, id="r0")])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3: the id of line 1"):
        index_of(path)
    other = write_corpus(tmp_path / "b", [row(0)])
    assert len(index_of(write_corpus(tmp_path / "c", [row(0)]), other)) == 2


def suffix(number: int, outcome: float, **changes: Any) -> dict[str, Any]:
    plain = {"prompt_id": "add:1", "prefix_tokens": 5, "suffix_of": "0@5", "return": outcome}
    return row(number, **(plain | changes))


def test_the_first_token_of_a_suffix_trains_on_the_mean_of_all_and_the_rest_on_its_own_return(tmp_path: Path) -> None:
    """Outcomes 1, 0, 0, 1, 0 of one prefix: its last state is worth 0.4."""
    longer = {"token_ids": [5, 6, 7, 8, 9, 10, 11], "action_mask": [0, 0, 1, 1, 0, 1, 1]}
    rows = [suffix(number, outcome, **longer) for number, outcome in enumerate([1.0, 0.0, 0.0, 1.0, 0.0])]
    rows.append(row(9))
    samples = reader_of(index_of(write_corpus(tmp_path, rows))).read(range(6))
    for sample, outcome in zip(samples[:5], [1.0, 0.0, 0.0, 1.0, 0.0], strict=True):
        assert sample.returns is not None
        assert sample.returns.tolist() == [0, 0, 0, 0, 0, pytest.approx(0.4), outcome]
        assert sample.branch.loss_mask.tolist() == [False] * 5 + [True, True]
    assert samples[5].returns is not None and samples[5].returns.tolist() == [0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": [5, 6, 99, 8, 9, 10]}, "begins with other tokens"),
        ({"prompt_id": "add:2"}, "has another prompt_id"),
        ({"prefix_tokens": 3}, "begins with other tokens"),
    ],
)
def test_suffixes_of_one_prefix_must_have_one_prefix(tmp_path: Path, changes: dict, reason: str) -> None:
    path = write_corpus(tmp_path, [suffix(0, 1.0), suffix(1, 0.0, **changes)])
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:2: another suffix of '0@5' {reason}"):
        index_of(path)


def test_all_rows_of_a_prompt_are_on_one_side_and_the_sides_do_not_move(tmp_path: Path) -> None:
    rows = learnable(200, 3)
    index = index_of(write_corpus(tmp_path / "a", rows), seed=4, held_out_fraction=0.25)
    expected = [is_held_out(line["prompt_id"], 4, 0.25) for line in rows]
    assert index.columns["held_out"].tolist() == expected
    assert 30 <= sum(expected) / 3 <= 70  # of 200 prompts, 50 expected
    fewer = index_of(write_corpus(tmp_path / "b", rows[300:]), seed=4, held_out_fraction=0.25)
    assert fewer.columns["held_out"].tolist() == expected[300:]
    assert (
        index_of(tmp_path / "a" / "rows.jsonl", seed=5, held_out_fraction=0.25).columns["held_out"].tolist() != expected
    )


def test_held_out_rows_are_found_by_policy(tmp_path: Path) -> None:
    index = index_of(write_corpus(tmp_path, learnable(40, policies=3)), held_out_fraction=0.5)
    parts = [index.training, *(index.held_out(policy) for policy in range(3))]
    assert index.policies == ["p0", "p1", "p2"]
    assert sorted(np.concatenate(parts).tolist()) == list(range(160))


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    held_out = next(row(n) for n in range(100) if is_held_out(f"add:{n}", 0, 0.5))
    with pytest.raises(ConfigError, match="no row is left to train on"):
        index_of(write_corpus(tmp_path, [held_out]), held_out_fraction=0.5)


def test_an_index_travels_between_ranks_as_bytes(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, [*learnable(20), suffix(500, 1.0), suffix(501, 0.0)])
    index = index_of(path, held_out_fraction=0.3)
    other = RowIndex.from_bytes(index.to_bytes())
    assert (other.files, other.policies) == (index.files, index.policies)
    assert other.prefix_means.tolist() == [0.5]
    for name, column in index.columns.items():
        assert other.columns[name].dtype == column.dtype and np.array_equal(other.columns[name], column)


def test_an_epoch_takes_every_row_once_in_an_order_of_seed_and_epoch() -> None:
    rows = np.arange(5, 55)
    orders = [order_of(rows, seed=seed, epoch=epoch).tolist() for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == rows.tolist() for order in orders)
    assert orders[0] == orders[1] and orders[0] != rows.tolist()
    assert len({tuple(order) for order in orders}) == 3


def test_batches_go_on_from_any_position_and_keep_the_last_incomplete_one() -> None:
    batches = Batches(np.arange(10), seed=1, batch_size=4, epochs=2)
    whole = [(position, numbers.tolist()) for position, numbers in batches.rest(Position())]
    assert [len(numbers) for _, numbers in whole] == [4, 4, 2, 4, 4, 2]
    assert batches.num_updates == 6
    for done in range(7):
        rest = [(position, numbers.tolist()) for position, numbers in batches.rest(batches.position(done))]
        assert rest == whole[done:]


def test_a_file_that_changes_under_a_reader_is_told(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, [row(0), row(1)])
    reader = reader_of(index_of(path))
    path.write_bytes(path.read_bytes().replace(b'"r1"', b'"r1 '))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: changed while it was read"):
        reader.read([1])


MEMORY = """
import resource, sys
from pathlib import Path
from tests.corpora import write_corpus
from value_service.pretrain_data import RowReader, build_index, order_of
limits = {"vocab_size": 261, "max_tokens": 128}

def use(name):
    index = build_index([name], seed=0, held_out_fraction=0.1, **limits)
    reader = RowReader(index, **limits)
    order = order_of(index.training, seed=0, epoch=0)
    batches = (reader.read(order[start : start + 256]) for start in range(0, len(order), 256))
    total = sum(sample.num_tokens for batch in batches for sample in batch)
    return len(index), total

use(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*use(sys.argv[2]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """100,000 rows of 100 tokens are 60 MB on disk; a small file first pays for imports and buffers."""

    tokens, mask = ([str(5 + t * 13 % 250) for t in range(100)], "0," * 20 + ",".join("1" * 80))

    def line(number: int) -> bytes:
        head = f'"id":"{number}","prompt_id":"p{number // 4}","policy_id":"a","return":1.0,"stop_reason":"terminated"'
        return f'{{{head},"token_ids":[{number % 250},{",".join(tokens[1:])}],"action_mask":[{mask}]}}'.encode()

    small = write_corpus(tmp_path / "small", [line(number) for number in range(1000)])
    large = write_corpus(tmp_path / "large", [line(number) for number in range(100_000)])
    assert large.stat().st_size > 50e6
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(small), str(large)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    num_rows, num_tokens, grown_kib = (int(word) for word in done.stdout.split())
    assert num_rows == 100_000 and 85_000 * 100 < num_tokens < 95_000 * 100
    assert grown_kib < 24 * 1024, f"{grown_kib} KiB"
