"""Groups of rollouts as bytes and back: what a run records, what a commit keeps of them, what `replay` reads.

    u32 bytes of the head | head | the arrays of GROUP_ARRAYS in that order, raw little-endian

Legend: T tokens of all branches, B branches, N version spans, V tokens of the scored samples.

Notable:
- A group is everything an algorithm sees, before it credits anything: traces with the environment's rewards, samples
  with the shaped ones, values as scored and by which critic. A sample names its branch, whose arrays are there once.
- Values and step rewards travel as f64, unlike in grids: a group that is read back is credited to the last bit alike.
- Decoding raises CodecError on any bytes that are not valid, and nothing else. Every size is compared with the bytes
  that are there before anything is built from it; no byte is ever unpickled.
- Arrays are copied once a group, so that a group holds no file in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from services.wire.errors import CodecError, ContractError
from services.wire.heads import make_head, read_head, split_head
from services.wire.samples import Branch, StopReason, Trace, TrainingSample, VersionSpan, validate_branch

if TYPE_CHECKING:
    from typing_extensions import Buffer

GROUP_ARRAYS: dict[str, str] = {
    "values": "<f8",  # [V] samples in order
    "step_rewards": "<f8",  # tokens of the branches that have them
    "shaped_step_rewards": "<f8",  # tokens of the samples whose step rewards are not their branch's
    "lengths": "<u4",  # [B] traces in order
    "token_ids": "<u4",  # [T]
    "logprobs": "<f4",  # [T]
    "span_counts": "<u4",  # [B]
    "spans": "<u4",  # [3 N] start, end, version
    "action_mask": "|u1",  # [T]
    "loss_mask": "|u1",  # [T]
}


@dataclass(slots=True)
class Group:
    """The valid traces of one prompt, with their samples in order."""

    traces: list[Trace]
    samples: list[TrainingSample]
    order: int = -1
    """place in the order in which the run's groups were scored (finished, without a critic); -1 before that"""

    @property
    def critic_step(self) -> int:
        """Critic grids applied when the group was scored; -1 unscored."""
        return self.samples[0].critic_step if self.samples else -1


class _Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trace_id: str
    group_id: str
    env: str
    task_id: str
    reward: float
    stop_reason: StopReason
    num_turns: int
    duration_s: float
    has_step_rewards: list[bool]
    """of each branch"""


class _Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trace: int
    branch: int
    """of that trace"""
    reward: float
    critic_step: int
    bootstrap_value: float
    prompt_id: str
    is_scored: bool
    has_own_step_rewards: bool
    """`shaped_step_rewards`; else those of its branch, if any"""


class _GroupHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    order: int
    traces: list[_Trace]
    samples: list[_Sample]
    sizes: list[int]
    """entries of each array of GROUP_ARRAYS"""


_decode_header = msgspec.msgpack.Decoder(_GroupHeader).decode


def encode_group(group: Group) -> bytes:
    """Encode one group; what credit fills in is left out.

    Raises:
        CodecError: `decode_group` would not accept it.
    """
    branches = [branch for trace in group.traces for branch in trace.branches]
    samples = [_sample_header(group, sample) for sample in group.samples]
    own_steps = [s.branch for s, header in zip(group.samples, samples, strict=True) if header.has_own_step_rewards]
    spans = [number for branch in branches for span in branch.version_spans for number in span]
    if spans and not 0 <= min(spans) <= max(spans) < 2**32:
        raise CodecError("a version span holds a number that is no u32")
    arrays = {
        "values": _joined("values", [s.values for s in group.samples if s.values is not None]),
        "step_rewards": _joined("step_rewards", [b.step_rewards for b in branches if b.step_rewards is not None]),
        "shaped_step_rewards": _joined("shaped_step_rewards", [b.step_rewards for b in own_steps]),
        "lengths": np.array([len(branch.token_ids) for branch in branches], dtype="<u4"),
        "span_counts": np.array([len(branch.version_spans) for branch in branches], dtype="<u4"),
        "spans": np.array(spans, dtype="<u4"),
    }
    for name in ("token_ids", "logprobs", "action_mask", "loss_mask"):
        arrays[name] = _joined(name, [getattr(branch, name) for branch in branches])
    traces = [
        _Trace(
            trace.trace_id,
            trace.group_id,
            trace.env,
            trace.task_id,
            float(trace.reward),
            trace.stop_reason,
            trace.num_turns,
            float(trace.duration_s),
            [branch.step_rewards is not None for branch in trace.branches],
        )
        for trace in group.traces
    ]
    header = _GroupHeader(group.order, traces, samples, [arrays[name].size for name in GROUP_ARRAYS])
    _build(header, arrays)  # raises where decoding would
    body = b"".join(arrays[name].tobytes() for name in GROUP_ARRAYS)
    return make_head(header, body) + body


def decode_group(data: Buffer) -> Group:
    """Decode one group from exactly its bytes.

    Raises:
        CodecError: anything but a complete, consistent, unaltered group.
    """
    view = memoryview(data).cast("B")
    head, body = split_head(view)
    header = read_head(head, body, _decode_header, "the group")
    if len(header.sizes) != len(GROUP_ARRAYS):
        raise CodecError(f"{len(header.sizes)} arrays where a group has {len(GROUP_ARRAYS)}")
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for (name, dtype), num_entries in zip(GROUP_ARRAYS.items(), header.sizes, strict=True):
        num_bytes = num_entries * np.dtype(dtype).itemsize
        if num_entries < 0 or start + num_bytes > body.nbytes:
            raise CodecError(f"{name} has {num_entries} entries, which are not there")
        arrays[name] = np.frombuffer(body[start : start + num_bytes], dtype=dtype).copy()
        start += num_bytes
    if start != body.nbytes:
        raise CodecError(f"{body.nbytes - start} bytes after the last array")
    return _build(header, arrays)


def _sample_header(group: Group, sample: TrainingSample) -> _Sample:
    trace, branch = _place_of(group, sample)
    shaped, raw = sample.branch.step_rewards, group.traces[trace].branches[branch].step_rewards
    return _Sample(
        trace=trace,
        branch=branch,
        reward=float(sample.reward),
        critic_step=sample.critic_step,
        bootstrap_value=float(sample.bootstrap_value),
        prompt_id=sample.prompt_id,
        is_scored=sample.values is not None,
        has_own_step_rewards=shaped is not None and shaped is not raw,
    )


def _place_of(group: Group, sample: TrainingSample) -> tuple[int, int]:
    """Which branch of which trace a sample was made from: the one whose tokens are the same array."""
    for trace_index, trace in enumerate(group.traces):
        if trace.trace_id == sample.trace_id:
            for branch_index, branch in enumerate(trace.branches):
                if branch.token_ids is sample.branch.token_ids:
                    return trace_index, branch_index
    raise CodecError(f"a sample of trace {sample.trace_id!r} has no branch in its group")


def _joined(name: str, arrays: list[Any]) -> np.ndarray:
    dtype = np.dtype(GROUP_ARRAYS[name])
    plain = [array.view(np.uint8) if array.dtype == np.bool_ else array for array in arrays]
    if any(array.dtype != dtype for array in plain):
        raise CodecError(f"{name} is not {dtype}")
    return np.concatenate(plain) if plain else np.empty(0, dtype=dtype)


def _build(header: _GroupHeader, arrays: dict[str, np.ndarray]) -> Group:
    """The group that header and arrays describe, every rule checked."""
    _check_numbers(header, arrays)
    branches = _Branches(header, arrays)
    traces = [
        Trace(
            trace_id=trace.trace_id,
            group_id=trace.group_id,
            env=trace.env,
            task_id=trace.task_id,
            branches=[branches.next(has_step_rewards=has) for has in trace.has_step_rewards],
            reward=trace.reward,
            stop_reason=trace.stop_reason,
            num_turns=trace.num_turns,
            duration_s=trace.duration_s,
        )
        for trace in header.traces
    ]
    values = _Reader("values", arrays["values"])
    shaped = _Reader("shaped_step_rewards", arrays["shaped_step_rewards"])
    samples: list[TrainingSample] = []
    for sample in header.samples:
        if not 0 <= sample.trace < len(traces) or not 0 <= sample.branch < len(traces[sample.trace].branches):
            raise CodecError(f"a sample of branch {sample.branch} of trace {sample.trace}, which is not there")
        trace = traces[sample.trace]
        branch = trace.branches[sample.branch]
        num_tokens = len(branch.token_ids)
        if sample.has_own_step_rewards:
            branch = replace(branch, step_rewards=shaped.take(num_tokens))
        samples.append(
            TrainingSample(
                trace.trace_id,
                trace.group_id,
                branch,
                sample.reward,
                trace.stop_reason,
                values=values.take(num_tokens) if sample.is_scored else None,
                bootstrap_value=sample.bootstrap_value,
                critic_step=sample.critic_step,
                prompt_id=sample.prompt_id,
            )
        )
    for reader in (values, shaped, *branches.readers):
        reader.finish()
    return Group(traces, samples, header.order)


def _check_numbers(header: _GroupHeader, arrays: dict[str, np.ndarray]) -> None:
    if not header.traces or not header.samples:
        raise CodecError("a group without a trace or without a sample")
    if len({sample.critic_step for sample in header.samples}) > 1:
        raise CodecError("samples of one group that different critics scored")
    for sample in header.samples:
        if sample.critic_step < -1 or sample.is_scored != (sample.critic_step >= 0):
            raise CodecError(f"a sample with critic step {sample.critic_step} that is scored: {sample.is_scored}")
    floats = [number for trace in header.traces for number in (trace.reward, trace.duration_s)]
    floats += [number for sample in header.samples for number in (sample.reward, sample.bootstrap_value)]
    if not all(map(math.isfinite, floats)):
        raise CodecError("a reward, a duration or a bootstrap value is not finite")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise CodecError(f"{name} holds a non-finite number")
    for name in ("action_mask", "loss_mask"):
        if int(arrays[name].max(initial=0)) > 1:
            raise CodecError(f"{name} holds something other than 0 and 1")
    num_branches = sum(len(trace.has_step_rewards) for trace in header.traces)
    for name in ("lengths", "span_counts"):
        if arrays[name].size != num_branches:
            raise CodecError(f"{name} has {arrays[name].size} entries for {num_branches} branches")


class _Reader:
    """Takes an array's entries in order."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array
        self._start = 0

    def take(self, num: int) -> np.ndarray:
        """The next entries.

        Raises:
            CodecError: there are not so many.
        """
        end = self._start + num
        if end > self._array.size:
            raise CodecError(f"{self._name} ends after {self._array.size} entries, {end} are needed")
        self._start, taken = end, self._array[self._start : end]
        return taken

    def finish(self) -> None:
        """Nothing may be left.

        Raises:
            CodecError: something is.
        """
        if self._start != self._array.size:
            raise CodecError(f"{self._array.size - self._start} entries of {self._name} belong to nothing")


class _Branches:
    """Takes the arrays apart, branch by branch."""

    def __init__(self, header: _GroupHeader, arrays: dict[str, np.ndarray]) -> None:
        self._lengths, self._span_counts = iter(arrays["lengths"].tolist()), iter(arrays["span_counts"].tolist())
        names = ("token_ids", "action_mask", "loss_mask", "logprobs", "spans", "step_rewards")
        self._of = {name: _Reader(name, arrays[name]) for name in names}
        self.readers = list(self._of.values())

    def next(self, *, has_step_rewards: bool) -> Branch:
        """The next branch, as the wire's rules have it."""
        num_tokens, num_spans = next(self._lengths), next(self._span_counts)
        spans = self._of["spans"].take(3 * num_spans).reshape(-1, 3).tolist()
        branch = Branch(
            token_ids=self._of["token_ids"].take(num_tokens),
            action_mask=self._of["action_mask"].take(num_tokens).view(np.bool_),
            loss_mask=self._of["loss_mask"].take(num_tokens).view(np.bool_),
            logprobs=self._of["logprobs"].take(num_tokens),
            version_spans=[VersionSpan(*span) for span in spans],
            step_rewards=self._of["step_rewards"].take(num_tokens) if has_step_rewards else None,
        )
        try:
            validate_branch(branch)
        except ContractError as error:
            raise CodecError(f"a branch that breaks the wire's rules: {error}") from None
        return branch
