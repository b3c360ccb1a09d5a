"""A role's part of a commit: every rank writes and reads what it holds, and another layout may read it.

Notable:
- Written by torch.distributed.checkpoint (DCP): one file a rank, and `.metadata`, which says where each piece of each
  whole tensor lies. Beside them `state.json`: counters, layout, and the shapes of everything, readable without torch.
- Parameters, AdamW's moments (equally laid out), saved buffers, and each rank's random state; the steps of every
  parameter are numbers of the whole group. What is frozen has no moments.
- Tensors are written from host memory, and DCP's own collectives go over gloo. They exchange plans as pickled objects
  between the ranks of one group: torch's business, as its rendezvous is. Reading needs no collective but agreement.
- `.metadata` is pickle. It is read only after the digests of the manifest have been verified, and only if it is ours.
- Loading first compares, then reads everything into host memory, and only then touches the model: a checkpoint that
  does not fit leaves it as it was, on every rank.
- Random state comes back in the same layout; in another one it is seeded anew by (seed, steps done, rank).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from loguru import logger
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from services.runtime.durable import write_atomic
from services.runtime.manifests import Manifest, check_contents, survey
from services.training.parts import (
    Part,
    Places,
    TensorSpec,
    buffers_of,
    local_of,
    parameters_of,
    random_state_of,
    reshard,
    spec_of,
)
from services.training.ranks import Ranks
from services.wire.errors import CannotWrite, CommitError, ConfigError, CounterpointError, DamagedCommit

FORMAT = 1
STATE, METADATA = "state.json", ".metadata"
MOMENTS = ("exp_avg", "exp_avg_sq")
PROBLEMS_TOLD = 8


class SavedLayout(msgspec.Struct, frozen=True):
    """The group that wrote."""

    size: int
    cp: int
    ep: int
    device: str


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`state.json`."""

    format: int
    role: str
    steps_done: int
    """grids fully applied"""
    num_updates: int
    """optimizer steps taken: learning rate and head-only phase follow from it"""
    skipped_in_a_row: int
    layout: SavedLayout
    parameters: dict[str, TensorSpec]
    buffers: dict[str, TensorSpec]
    num_steps: dict[str, int]
    """AdamW's steps of each parameter that trains"""


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def save(folder: Path, part: Part, *, steps_done: int) -> None:
    """Write this role's state into `folder`, but for the manifest; every rank calls it.

    Args:
        folder: Made here; what is in it from an attempt before goes.
        part: The role.
        steps_done: Grids fully applied.

    Raises:
        CannotWrite: on every rank, with each rank's cause; the folder is gone then, and the group as it was.
        PeerLost: when a rank vanished.
    """
    ranks = part.ranks
    reshard(part.model)
    what = f"cannot write {folder}"
    _agree(ranks, _tried(lambda: _clear(folder)) if ranks.rank == 0 else "", CannotWrite, what)
    optimizer = part.optimizer.state_dict()
    with ranks.during("a checkpoint", collective="torch's exchange of plans"):
        problem = _write_tensors(folder, part, optimizer["moments"])
    if not problem and ranks.rank == 0:
        state = msgspec.json.encode(_state_of(part, optimizer, steps_done))
        problem = _tried(lambda: write_atomic(folder / STATE, state))
    try:
        _agree(ranks, problem, CannotWrite, what)
    except CannotWrite:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # gives a full disk its room back
        raise


def _tried(action: Callable[[], None]) -> str:
    """What went wrong, empty where nothing did: the other ranks are to hear of it."""
    try:
        action()
    except (OSError, CannotWrite) as error:
        return str(error)
    return ""


def _clear(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_tensors(folder: Path, part: Part, moments: dict[str, dict[str, Any]]) -> str:
    """Every rank's tensors; what went wrong on this rank."""
    ranks, places = part.ranks, Places(part)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, parameter in parameters_of(part):
        tensors[f"parameters/{name}"] = places.whole(name, local_of(parameter).cpu())
    for full_name, entry in moments.items():
        name = full_name.removeprefix(part.prefix)
        tensors |= {f"{key}/{name}": places.whole(name, entry[key]) for key in MOMENTS}
    if ranks.rank == 0:
        tensors |= {f"buffers/{name}": buffer.cpu() for name, buffer in buffers_of(part)}
    tensors |= random_state_of(part)
    own = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a group of one is told that it is alone
            write_tensors(
                own,
                storage_writer=FileSystemWriter(folder),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=ranks.size == 1,
            )
    except CheckpointException as error:
        return _told(error, ranks.rank)
    return ""


def _told(error: CheckpointException, rank: int) -> str:
    """What went wrong on this rank, one line; empty where it was another one's."""
    if rank not in error.failures:
        return ""
    cause = error.failures[rank][0]
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def _state_of(part: Part, optimizer: dict[str, Any], steps_done: int) -> SavedState:
    places = Places(part)
    return SavedState(
        format=FORMAT,
        role=part.role,
        steps_done=steps_done,
        num_updates=optimizer["num_updates"],
        skipped_in_a_row=optimizer["skipped_in_a_row"],
        layout=_layout_of(part),
        parameters={name: places.spec(name) for name, _ in parameters_of(part)},
        buffers={name: spec_of(buffer) for name, buffer in buffers_of(part)},
        num_steps={name.removeprefix(part.prefix): entry["num_steps"] for name, entry in optimizer["moments"].items()},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load(folder: Path, part: Part, *, seed: int) -> SavedState:
    """Continue where `save` was called, in this layout or another; every rank calls it, before the first step.

    Args:
        folder: A role's folder of a commit, with its manifest.
        part: The role, in its layout.
        seed: The run's, for random state where the layout is another.

    Returns:
        What was saved beside the tensors.

    Raises:
        DamagedCommit: files that are missing or damaged, or not ours.
        CommitError: a checkpoint of another role or format.
        ConfigError: the checkpoint is of another model, head or choice of what trains; every difference by name.
    """
    _agree(part.ranks, _damage(folder, part.ranks), DamagedCommit, f"checkpoint {folder}")
    state = msgspec.json.decode((folder / STATE).read_bytes(), type=SavedState)
    if (state.format, state.role) != (FORMAT, part.role):
        found = f"format {state.format}, role {state.role}"
        raise CommitError(f"checkpoint {folder} is of {found}; wanted are format {FORMAT}, role {part.role}")
    _refuse(folder, list(_differences(state, part)))
    reshard(part.model)
    is_same = state.layout == _layout_of(part)
    read = _Read(part, state, with_random_state=is_same)
    _agree(part.ranks, read.fill(folder), DamagedCommit, f"checkpoint {folder}")
    _refuse(folder, list(read.other_points()))
    read.apply()
    if not is_same:
        seed_anew(seed, state.steps_done, part.ranks.rank)
    if part.ranks.rank == 0:
        random = "random state restored" if is_same else f"random state from (seed {seed}, {state.steps_done}, rank)"
        logger.info(
            "{}: loaded {} after {} steps and {} updates, written by {}; {}",
            *(part.role, folder, state.steps_done, state.num_updates, state.layout, random),
        )
    return state


class _Read:
    """A checkpoint in host memory, as much of it as this rank holds."""

    def __init__(self, part: Part, state: SavedState, *, with_random_state: bool) -> None:
        self._part, self._state = part, state
        self._parameters = {name: local_of(parameter) for name, parameter in parameters_of(part)}
        self._buffers = dict(buffers_of(part))
        self._random = random_state_of(part) if with_random_state else {}
        wanted = self._random | {f"buffers/{name}": buffer for name, buffer in self._buffers.items()}
        for name, local in self._parameters.items():
            wanted |= {f"{key}/{name}": local for key in ("parameters", *(MOMENTS if name in state.num_steps else ()))}
        self._own = {key: torch.empty_like(tensor, device="cpu") for key, tensor in wanted.items()}

    def fill(self, folder: Path) -> str:
        """Read; what went wrong on this rank, which reads for itself alone."""
        places = Places(self._part)
        wanted: dict[str, torch.Tensor] = {}
        for key, own in self._own.items():
            kind, _, name = key.partition("/")
            whole = places.whole(name, own, everywhere=True) if kind in ("parameters", *MOMENTS) else own
            wanted |= {key: whole} if whole is not None else {}
        try:
            read_alone(folder, wanted)
        except CheckpointException as error:
            return _told(error, 0)  # to DCP it is alone
        return ""

    def other_points(self) -> Iterator[str]:
        """Points of a value head that are not those of this run's loss."""
        for name, own in self._buffers.items():
            saved = self._own[f"buffers/{name}"]
            if name.rpartition(".")[2] == "points" and not torch.equal(saved, own.cpu()):
                spans = [f"{len(p)} points from {p[0]:g} to {p[-1]:g}" for p in (saved, own)]
                yield f"{name}: {spans[0]} in the checkpoint, {spans[1]} in value.loss"

    @torch.no_grad()
    def apply(self) -> None:
        """Put everything into model, optimizer and generators."""
        moments = {
            self._part.prefix + name: {key: self._own[f"{key}/{name}"] for key in MOMENTS} | {"num_steps": num_steps}
            for name, num_steps in self._state.num_steps.items()
        }
        counters = {"num_updates": self._state.num_updates, "skipped_in_a_row": self._state.skipped_in_a_row}
        self._part.optimizer.load_state_dict(counters | {"moments": moments})
        for kind, tensors in (("parameters", self._parameters), ("buffers", self._buffers)):
            for name, tensor in tensors.items():
                tensor.copy_(self._own[f"{kind}/{name}"])
        for key in self._random:
            if key.startswith("rng_cuda/"):
                torch.cuda.set_rng_state(self._own[key], self._part.mesh.device)
            else:
                torch.set_rng_state(self._own[key])


def _differences(state: SavedState, part: Part) -> Iterator[str]:
    """What the checkpoint has and the run has not, by name and with both values."""
    places = Places(part)
    own = {name: places.spec(name) for name, _ in parameters_of(part)}
    buffers = {name: spec_of(buffer) for name, buffer in buffers_of(part)}
    for here, there in ((own, state.parameters), (buffers, state.buffers)):
        yield from (
            f"{name}: {_shown(here[name])} here, missing in the checkpoint" for name in here if name not in there
        )
        yield from (
            f"{name}: {_shown(there[name])} in the checkpoint, unknown here" for name in there if name not in here
        )
        for name in sorted(here.keys() & there.keys()):
            if here[name] != there[name]:
                yield f"{name}: {_shown(there[name])} in the checkpoint, {_shown(here[name])} here"
    trains = {name for name, parameter in parameters_of(part) if parameter.requires_grad}
    for name in sorted(trains & state.parameters.keys() - state.num_steps.keys()):
        yield f"{name}: trains here, the checkpoint has no optimizer state of it"
    for name in sorted(own.keys() & state.num_steps.keys() - trains):
        yield f"{name}: trained in the checkpoint, is frozen here"


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape}"


def _refuse(folder: Path, problems: list[str]) -> None:
    """End with what is different; the same on every rank."""
    if problems:
        more = len(problems) - PROBLEMS_TOLD
        told = problems[:PROBLEMS_TOLD] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError([f"checkpoint {folder} does not fit this run: {problem}" for problem in told])


def _damage(folder: Path, ranks: Ranks) -> str:
    """What is wrong with the files that this rank verifies: its share of the large ones, and all of the small ones."""
    try:
        manifest, _ = survey(folder, None)
        missing = [name for name in (STATE, METADATA) if name not in manifest.files]
        if missing:
            return f"the manifest does not name {', '.join(missing)}"
        share = {
            name: entry
            for number, (name, entry) in enumerate(sorted(manifest.files.items()))
            if number % ranks.size == ranks.rank or name in (STATE, METADATA)
        }
        check_contents(folder, Manifest(share, {}), f"{folder.name} of {folder.parent.name}")
    except DamagedCommit as error:
        return str(error)
    owner = (folder / METADATA).stat().st_uid
    return "" if owner == os.geteuid() else f"{METADATA} belongs to user {owner}, not to {os.geteuid()}"


def read_alone(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Fill tensors from a role's files, by key, without a word to any other rank.

    Raises:
        CheckpointException: torch cannot read them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that nothing is coordinated: nothing need be
        read_tensors(
            wanted,
            storage_reader=FileSystemReader(folder),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


def seed_anew(seed: int, steps_done: int, rank: int) -> None:
    """Seed torch's generators, of the CPU and of every GPU, by the rule of a start after so many steps."""
    digest = hashlib.sha256(f"{seed}/{steps_done}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _layout_of(part: Part) -> SavedLayout:
    mesh = part.mesh
    return SavedLayout(mesh.size, mesh.cp, mesh.ep, mesh.device.type)


def _agree(ranks: Ranks, problem: str, error: type[CounterpointError], what: str) -> None:
    """Go on together, or raise on every rank what any of them has to tell."""
    told = [row.decode() for row in ranks.gather_bytes(problem.encode())]
    if any(told):
        raise error(f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text))
