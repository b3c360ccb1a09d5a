"""Memory that goes and comes back: the sum that proves it, and the storages that share it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.model.checksum import checksum, tensors_of
from services.model.sleep import HostBackup, own_memory


def slow_checksum(data: bytes) -> int:
    """Word by word, in Python's own integers."""
    num_words = len(data) // 8
    total = 0
    for i in range(num_words):
        total += (2 * i + 1) * int.from_bytes(data[8 * i : 8 * i + 8], "little", signed=True)
    for j, byte in enumerate(data[8 * num_words :]):
        total += (2 * (num_words + j) + 1) * byte
    return total % 2**64


def test_the_sum_by_hand() -> None:
    assert checksum(torch.tensor([1, 2, 3])) == 1 * 1 + 3 * 2 + 5 * 3
    assert checksum(torch.tensor([-1])) == 2**64 - 1
    assert checksum(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 7], dtype=torch.uint8)) == 1 + 3 * 7
    assert checksum(torch.empty(0)) == 0


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 64, 4099])
def test_the_sum_is_that_of_a_slow_one(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    assert checksum(data) == slow_checksum(data.numpy().tobytes())


def test_the_sum_goes_on_across_the_pieces_that_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("services.model.checksum._CHUNK_WORDS", 64)
    assert checksum(data) == slow_checksum(data.numpy().tobytes())


def test_every_bit_and_every_place_counts() -> None:
    data = torch.randn(16, generator=torch.Generator().manual_seed(2))
    before, flat = checksum(data), data.view(torch.uint8)
    for byte in range(len(flat)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert checksum(data) != before, (byte, bit)
            flat[byte] ^= 1 << bit
    swapped = data.clone()
    swapped[[0, 4]] = swapped[[4, 0]]
    assert checksum(swapped) != before
    assert checksum(torch.zeros(16)) != before


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)).eval()


def test_all_memory_goes_and_comes_back_in_the_same_tensors() -> None:
    net, x = model(), torch.randn(3, 5)
    expected, held = net(x), [tensor for _, tensor in tensors_of(net)]
    view = held[0][2:4]
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
    backup = HostBackup(lambda: tensors_of(net))
    assert not backup.is_asleep and backup.wake() == []
    assert backup.put_to_sleep() == num_bytes == backup.num_bytes
    assert backup.is_asleep and backup.put_to_sleep() == 0
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
    assert backup.wake() == [] and not backup.is_asleep
    assert torch.equal(net(x), expected)
    assert view.data_ptr() == held[0][2:4].data_ptr() and torch.equal(view, held[0][2:4])


def test_tied_tensors_and_views_count_once() -> None:
    whole = torch.arange(10.0)
    pairs = [("whole", whole), ("half", whole[:5]), ("tied", whole), ("other", torch.ones(3))]
    backup = HostBackup(lambda: pairs)
    assert backup.put_to_sleep() == 10 * 4 + 3 * 4
    backup.wake()
    assert torch.equal(pairs[1][1], torch.arange(5.0))


def test_what_came_back_otherwise_is_named() -> None:
    pairs = [("a", torch.ones(100)), ("b", torch.zeros(7, dtype=torch.bfloat16)), ("c", torch.ones(3))]
    backup = HostBackup(lambda: pairs)
    backup.put_to_sleep()
    backup._bytes_of(backup._asleep[1])[0] ^= 1
    assert backup.wake() == ["b"]
    backup.put_to_sleep()
    assert backup.wake() == [], "it is asked about each sleep alone"


def test_each_sleep_takes_what_there_is_then() -> None:
    pairs = [("a", torch.ones(4))]
    backup = HostBackup(lambda: pairs)
    backup.put_to_sleep()
    backup.wake()
    pairs[0][1].add_(1)
    pairs.append(("b", torch.full((1000,), 5.0)))
    assert backup.put_to_sleep() == 4 * 4 + 1000 * 4
    assert backup.wake() == []
    assert torch.equal(pairs[0][1], torch.full((4,), 2.0)) and torch.equal(pairs[1][1], torch.full((1000,), 5.0))


def test_parameters_in_a_mapped_file_get_memory_of_their_own(tmp_path) -> None:
    net = nn.Linear(4, 4)
    numbers = torch.arange(16.0)
    (tmp_path / "weights").write_bytes(numbers.numpy().tobytes())
    mapped = torch.from_file(str(tmp_path / "weights"), size=16)
    net.weight.data = mapped.view(4, 4)
    assert not net.weight.untyped_storage().resizable()
    with pytest.raises(AssertionError, match="weight lies in memory that is not torch's own"):
        HostBackup(lambda: tensors_of(net)).put_to_sleep()
    own_memory(net)
    backup = HostBackup(lambda: tensors_of(net))
    backup.put_to_sleep()
    assert backup.wake() == [] and torch.equal(net.weight.data, numbers.view(4, 4))
