"""Files of groups: the batch of a recorded step, or the groups that a commit keeps for later steps.

    MAGIC | u32 bytes of the head | head | the groups one after the other, `num_bytes` of each in the head

Notable:
- The head alone says which group comes where, which critic scored it and when: a reader plans before it reads a group.
- The head's digest covers the head; each group has its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from services.wire.errors import CodecError
from services.wire.heads import MAX_HEAD_BYTES, make_head, read_head, split_head
from services.wire.rollouts import Group, decode_group, encode_group

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"CPROLL01"
START_BYTES = len(MAGIC) + 4
"""What must be read of a file to know how long its head is."""


class GroupEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file's head says of one group."""

    order: int
    critic_step: int
    num_traces: int
    num_bytes: int


class FileHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of groups is."""

    run_id: str
    epoch: int
    step: int
    """the step whose batch these groups are; in a commit, the first step that could train them"""
    policy_version: int
    """the version that the step trains"""
    groups: list[GroupEntry]

    def spans(self) -> Iterator[tuple[int, int]]:
        """First byte behind the file's head and number of bytes of each group."""
        start = 0
        for entry in self.groups:
            yield start, entry.num_bytes
            start += entry.num_bytes


_decode_header = msgspec.msgpack.Decoder(FileHeader).decode


def encode_file(groups: list[Group], *, run_id: str, epoch: int, step: int, policy_version: int) -> bytes:
    """Encode groups, in order, with what a reader must know before it touches one.

    Raises:
        CodecError: see `encode_group`.
    """
    encoded = [encode_group(group) for group in groups]
    entries = [
        GroupEntry(group.order, group.critic_step, len(group.traces), len(data))
        for group, data in zip(groups, encoded, strict=True)
    ]
    return b"".join([MAGIC, make_head(FileHeader(run_id, epoch, step, policy_version, entries)), *encoded])


def decode_file(data: Buffer) -> tuple[FileHeader, list[Group]]:
    """Decode a whole file.

    Raises:
        CodecError: anything but a complete, consistent, unaltered file.
    """
    view = memoryview(data).cast("B")
    header, start = decode_file_header(view, num_bytes=view.nbytes)
    groups: list[Group] = []
    for entry, (first, size) in zip(header.groups, header.spans(), strict=True):
        groups.append(decode_entry(entry, view[start + first : start + first + size]))
    return header, groups


def file_head_bytes(start: Buffer) -> int:
    """From the first START_BYTES bytes of a file: how many follow that `decode_file_header` needs.

    Raises:
        CodecError: no file of this format.
    """
    view = memoryview(start).cast("B")
    if view.nbytes < START_BYTES or view[: len(MAGIC)] != MAGIC:
        raise CodecError("not a file of rollouts, or of another version of the format")
    (num_bytes,) = struct.unpack_from("<I", view, len(MAGIC))
    if num_bytes > MAX_HEAD_BYTES:
        raise CodecError(f"a head of {num_bytes} bytes, more than {MAX_HEAD_BYTES}")
    return num_bytes


def decode_file_header(data: Buffer, *, num_bytes: int) -> tuple[FileHeader, int]:
    """Decode the beginning of a file.

    Args:
        data: at least START_BYTES and the head.
        num_bytes: of the whole file.

    Returns:
        The header, and where its first group begins.

    Raises:
        CodecError: the head is damaged, or the groups it announces do not make up the rest of the file.
    """
    view = memoryview(data).cast("B")
    end = START_BYTES + file_head_bytes(view[:START_BYTES])
    head, _ = split_head(view[:end], start=len(MAGIC))
    header = read_head(head, b"", _decode_header, "the file")
    sizes = [entry.num_bytes for entry in header.groups]
    if any(size < 0 for size in sizes) or end + sum(sizes) != num_bytes:
        raise CodecError(f"{num_bytes} bytes where the head announces {end + sum(sizes)}")
    if header.step < 0 or header.policy_version < 0 or header.epoch < 0:
        raise CodecError("a negative step, version or epoch")
    return header, end


def decode_entry(entry: GroupEntry, data: Buffer) -> Group:
    """Decode one group of a file.

    Raises:
        CodecError: see `decode_group`; or the group is not the one that the head describes.
    """
    group = decode_group(data)
    if (group.order, group.critic_step, len(group.traces)) != (entry.order, entry.critic_step, entry.num_traces):
        raise CodecError("a group that is not the one its file's head describes")
    return group
