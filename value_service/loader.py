"""`POST /load`: the weights of an exported critic put into the running service, between two commands, all or nothing.

Notable:
- Everything that can go wrong goes wrong before: rank 0 reads the folder in a thread of its own while the group works
  on, and compares support, tokenizer, architecture, names, shapes and finiteness. Only then is there a command.
- Ranks get whole tensors one at a time and keep their own part aside; the model is written once all of them have it.
- The folder must lie below `value.load_roots`, links followed, and so must every file in it.
- `critic_step` goes on, and so do schedules that count updates; AdamW's moments begin anew, for they are of other
  weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.tensor import DTensor

from services.config.exported import CriticFacts, init_from_problems, read_facts
from services.config.train import ValueConfig
from services.model.head import Critic
from services.model.init_from import CriticSource
from services.model.load import load_causal_lm
from services.model.mesh import Mesh
from services.training.board import StatusBoard
from services.training.parts import Part, Places, local_of, parameters_of, reshard, rows_of
from services.wire.errors import ConfigError
from services.wire.messages import LoadReply

MAX_REASON_CHARACTERS = 500
_NO_NUMBERS = frozenset(
    {
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "counterpoint"),
        *("id2label", "label2id", "num_labels", "problem_type", "use_cache", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    }
)
"""Keys of a model's configuration that change nothing about hidden states."""


class LoadRefused(Exception):
    """A folder that is not loaded; `status` is HTTP's, the text is one line."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(" ".join(reason.split())[:MAX_REASON_CHARACTERS])


@dataclass
class _Job:
    state: Mapping[str, torch.Tensor]
    facts: CriticFacts
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[int] = field(init=False)

    def __post_init__(self) -> None:
        self.done = self.loop.create_future()


class Loader:
    """Replacements of the critic's weights: read on rank 0, written by every rank."""

    kind = "load"

    def __init__(self, part: Part, board: StatusBoard, config: ValueConfig, model_dir: Path, architecture: Any) -> None:
        """Serve one critic.

        Args:
            part: The critic as this rank holds it.
            board: Counts loads.
            config: Names the roots.
            model_dir: The run's model.
            architecture: The configuration that the critic's backbone was built from.
        """
        self._part = part
        self._board = board
        self._config = config
        self._model_dir = model_dir
        self._architecture = _numbers_of(architecture)
        places = Places(part)
        self._specs = {name: places.spec(name) for name, _ in parameters_of(part)}
        self._roots = [Path(root).resolve() for root in config.load_roots]
        self._is_busy = False
        self._lock = threading.Lock()
        self._waiting: _Job | None = None

    async def load(self, path: str) -> LoadReply:
        """Replace the weights (rank 0's event loop).

        Raises:
            LoadRefused: nothing has changed.
        """
        folder = self._allowed(path)
        if self._is_busy:
            raise LoadRefused(409, "another folder is being loaded")
        self._is_busy = True
        try:
            state, facts = await asyncio.to_thread(self._read, folder)
            job = _Job(state, facts, asyncio.get_running_loop())
            with self._lock:
                self._waiting = job
            num_loads = await job.done
        finally:
            self._is_busy = False
        return LoadReply(self._board.steps_done, num_loads, facts.run, facts.source)

    def pending(self) -> bool:
        """Is a folder read and waiting."""
        return self._waiting is not None

    def next_command(self) -> dict[str, Any]:
        """Announce it (rank 0 only)."""
        return {"kind": self.kind}

    @torch.no_grad()
    def execute(self, command: dict[str, Any]) -> None:
        """Write it (every rank)."""
        del command
        with self._lock:
            job, self._waiting = self._waiting, None  # None on all ranks but the first
        part = self._part
        reshard(part.model)
        own: dict[str, torch.Tensor] = {}
        for name, parameter in parameters_of(part):
            spec = self._specs[name]
            whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            if job is not None:
                whole.copy_(job.state[name])
            if part.ranks.size > 1:
                dist.broadcast(whole, src=0)
            own[name] = _own_part(whole, parameter, part.mesh, is_divided=name in part.divided)
        for name, parameter in parameters_of(part):
            local_of(parameter).copy_(own[name])
        _forget_moments(part)
        self._board.add(num_loads=1)
        self._board.progress()
        if job is not None:
            norm = float(job.state["head.weight"].norm())
            logger.info("critic: loaded {} of run {}, value head's norm {:.6g}", job.facts.source, job.facts.run, norm)
            num_loads = self._board.snapshot().num_loads
            job.loop.call_soon_threadsafe(job.done.set_result, num_loads)

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait on: a load may be a few milliseconds late."""

    def _allowed(self, path: str) -> Path:
        """The folder, if it may be read."""
        if not self._roots:
            raise LoadRefused(403, "value.load_roots names no folder: weights cannot be replaced")
        try:
            folder = Path(path).resolve()
            is_inside = any(folder.is_relative_to(root) for root in self._roots)
            if is_inside and folder.is_dir():
                files = [file.resolve() for file in folder.iterdir()]
                is_inside = all(any(file.is_relative_to(root) for root in self._roots) for file in files)
        except (OSError, ValueError, RuntimeError):  # too long a name, a null byte, links in a circle
            raise LoadRefused(422, "path: not a path") from None
        if not is_inside:
            raise LoadRefused(403, "path: not below value.load_roots")
        if not folder.is_dir():
            raise LoadRefused(422, "path: no such folder")
        if self._config.lora is not None:
            raise LoadRefused(409, "value.lora: this critic has adapters, an exported one has none")
        return folder

    def _read(self, folder: Path) -> tuple[Mapping[str, torch.Tensor], CriticFacts]:
        """Everything of a folder, held against the running critic; a boundary: strangers' files may do anything."""
        problems = list(init_from_problems(str(folder), self._config.loss, self._model_dir))
        if problems:
            raise LoadRefused(422, problems[0][0])
        facts = read_facts(folder)
        if not isinstance(facts, CriticFacts):
            raise LoadRefused(422, "path: no exported critic (see `counterpoint export --role critic`)")
        try:
            state = self._read_tensors(folder, facts)
        except ConfigError as error:
            raise LoadRefused(422, error.problems[0]) from error
        except LoadRefused:
            raise
        except Exception as error:
            raise LoadRefused(422, f"path: cannot be read: {type(error).__name__}: {error}") from error
        return state, facts

    def _read_tensors(self, folder: Path, facts: CriticFacts) -> Mapping[str, torch.Tensor]:
        model = load_causal_lm(folder, needs_output=False)
        theirs = _numbers_of(model.config)
        for key, value in sorted(self._architecture.items()):  # what only theirs has, the architecture does not know
            if theirs.get(key) != value:
                raise LoadRefused(422, f"path: config.json has another {key} than the running critic")
        critic = Critic(model, head_init_std=0.0, seed=0, points=facts.points)
        CriticSource(folder, "pretrained", facts).fill_head(critic.head, Mesh())
        state = {name: parameter.detach() for name, parameter in critic.named_parameters()}
        for name in sorted(state.keys() ^ self._specs.keys()):
            where = "the folder" if name in state else "the running critic"
            raise LoadRefused(422, f"path: {name} is in {where} alone")
        for name, tensor in state.items():
            if list(tensor.shape) != self._specs[name].shape:
                raise LoadRefused(422, f"path: {name} is {list(tensor.shape)}, here {self._specs[name].shape}")
            if not bool(tensor.isfinite().all()):
                raise LoadRefused(422, f"path: {name} holds a number that is not finite")
        return state


def _numbers_of(architecture: Any) -> dict[str, Any]:
    content = architecture.to_dict()
    return {key: value for key, value in content.items() if key not in _NO_NUMBERS and not key.startswith("_")}


def _own_part(whole: torch.Tensor, parameter: torch.Tensor, mesh: Mesh, *, is_divided: bool) -> torch.Tensor:
    """What of a whole tensor this rank holds, without the rest of its memory."""
    if is_divided:
        whole = whole.chunk(mesh.ep)[mesh.ep_rank]
    if isinstance(parameter, DTensor):
        start, end = rows_of(len(parameter), parameter.device_mesh)
        whole = whole[start:end]
    return whole.clone()


def _forget_moments(part: Part) -> None:
    state = part.optimizer.state_dict()
    for entry in state["moments"].values():
        for key, value in entry.items():
            entry[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
    part.optimizer.load_state_dict(state)
