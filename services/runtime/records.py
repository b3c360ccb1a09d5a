"""The record of a run's rollouts as files: `rollouts/step_000012.bin` holds the batch of step 12.

Notable:
- Which group of which batch was scored when is in the heads of the files; groups are read one at a time.
- `incomplete.json` says why a record ends before its run did.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from services.wire.errors import CodecError
from services.wire.rollout_files import START_BYTES, FileHeader, decode_entry, decode_file_header, file_head_bytes
from services.wire.rollouts import Group

MARK = "incomplete.json"
_STEP = re.compile(r"step_(\d{6,})\.bin")


def path_of(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step_{step:06d}.bin"


def recorded_steps(folder: Path) -> dict[int, Path]:
    """The files of a record by step, in order."""
    found = {int(match[1]): path for path in folder.glob("step_*.bin") if (match := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class RecordedStep:
    """One step's file, its head read."""

    path: Path
    header: FileHeader
    start: int
    """where its first group begins"""

    def read(self, index: int) -> Group:
        """Read one group.

        Raises:
            CodecError: it is damaged; names the file.
        """
        begin, num_bytes = list(self.header.spans())[index]
        with self.path.open("rb") as file:
            file.seek(self.start + begin)
            data = file.read(num_bytes)
        try:
            return decode_entry(self.header.groups[index], data)
        except CodecError as error:
            raise CodecError(f"{self.path}: group {index}: {error}") from None


def open_step(path: Path, step: int) -> RecordedStep:
    """Read a file's head.

    Args:
        path: Of the record.
        step: That the file must be of.

    Raises:
        CodecError: it is damaged, or of another step; names the file.
    """
    with path.open("rb") as file:
        try:
            start = file.read(START_BYTES)
            head = file.read(file_head_bytes(start))
            header, first = decode_file_header(start + head, num_bytes=path.stat().st_size)
        except CodecError as error:
            raise CodecError(f"{path}: {error}") from None
    if header.step != step:
        raise CodecError(f"{path}: is the file of step {header.step}")
    return RecordedStep(path, header, first)


def open_record(folder: Path) -> list[RecordedStep]:
    """The heads of all steps from the first on without a hole; none where there is no record.

    Raises:
        CodecError: a file is damaged.
    """
    files = recorded_steps(folder)
    steps: list[RecordedStep] = []
    while len(steps) in files:
        steps.append(open_step(files[len(steps)], len(steps)))
    return steps


def why_it_ends(folder: Path) -> str:
    """What the run said about the end of its record; "" where it said nothing."""
    try:
        return str(json.loads((folder / MARK).read_text())["cause"])
    except (OSError, ValueError, KeyError, TypeError):  # a note for people: none, or none that can be read
        return ""
