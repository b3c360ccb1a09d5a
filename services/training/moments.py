"""AdamW on local shards, in pieces; its moments live beside the parameters or in host memory.

Legend: a piece is a run of consecutive parameters, flattened, of at most `piece_bytes`; a larger parameter is cut.

Notable:
- AdamW is elementwise, so that stepping shards and pieces gives what stepping whole tensors gives. The formula is
  torch's own.
- Both places of the moments go through the same pieces, which keeps temporaries small and both steps bit-equal.
- In host memory the moments of a piece are one pinned buffer: one copy to the device and one back, the next piece's
  on its way while a piece is stepped.
- Steps are counted by parameter: one that joins later starts its own bias correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from services.config.train import OptimConfig
from services.wire.errors import ContractError

PIECE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Slice:
    """Elements `start` to `end` of a flattened parameter."""

    index: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class _Piece:
    slices: list[_Slice]
    moments: torch.Tensor
    """[2, n]: exp_avg and exp_avg_sq of all slices, one after another"""


class Moments:
    """What AdamW remembers of every parameter, and its step."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], config: OptimConfig, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Start with zeros.

        Args:
            parameters: By name, this rank's part of each: contiguous, may be empty; all of one type and device.
            config: Constants of AdamW; with `offload` the moments live in host memory.
            piece_bytes: Parameters stepped at a time, at most.
        """
        places = {(tensor.dtype, tensor.device) for tensor in parameters.values()}
        assert len(places) <= 1, f"trainable parameters of several types or devices: {places}"
        assert all(tensor.is_contiguous() for tensor in parameters.values())
        self._config = config
        self._names = list(parameters)
        self._shapes = [tensor.shape for tensor in parameters.values()]
        self._num_steps = [0] * len(self._names)
        self._dtype, self._device = places.pop() if places else (torch.float32, torch.device("cpu"))
        home = torch.device("cpu") if config.offload else self._device
        is_pinned = config.offload and self._device.type == "cuda"
        limit = max(1, piece_bytes // self._dtype.itemsize)
        self._pieces: list[_Piece] = []
        for slices in _cut([tensor.numel() for tensor in parameters.values()], limit):
            size = sum(part.size for part in slices)
            moments = torch.zeros(2, size, dtype=self._dtype, device=home, pin_memory=is_pinned)
            self._pieces.append(_Piece(slices, moments))

    @property
    def devices(self) -> set[torch.device]:
        """Where the moments live."""
        return {piece.moments.device for piece in self._pieces}

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that live on `device`, by the first parameter of their piece."""
        for number, piece in enumerate(self._pieces):
            if piece.moments.device == device:
                name = self._names[piece.slices[0].index] if piece.slices else ""
                yield f"moments of piece {number} ({name})", piece.moments

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor], *, lr: float) -> None:
        """One step of the parameters that have a gradient; the others and their moments stay as they are.

        Args:
            parameters: In the order and shapes of the constructor's.
            gradients: By index of the parameter.
            lr: Learning rate.
        """
        pieces = [piece for piece in self._pieces if any(part.index in gradients for part in piece.slices)]
        for piece, moments in self._brought(pieces):
            self._step_piece(piece, moments, parameters, gradients, lr)
        for index in gradients:
            self._num_steps[index] += 1

    def _step_piece(
        self,
        piece: _Piece,
        moments: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        gradients: Mapping[int, torch.Tensor],
        lr: float,
    ) -> None:
        columns = moments.split([part.size for part in piece.slices], dim=1)
        stepped = [(part, own) for part, own in zip(piece.slices, columns, strict=True) if part.index in gradients]
        adamw(
            [parameters[part.index].detach().view(-1)[part.start : part.end] for part, _ in stepped],
            [gradients[part.index].reshape(-1)[part.start : part.end] for part, _ in stepped],
            [own[0] for _, own in stepped],
            [own[1] for _, own in stepped],
            [],
            [torch.tensor(float(self._num_steps[part.index])) for part, _ in stepped],
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=lr,
            weight_decay=self._config.weight_decay,
            eps=self._config.eps,
            maximize=False,
        )

    def _brought(self, pieces: list[_Piece]) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """Each piece with its moments on the device of the parameters; what is done to them there stays."""
        if all(piece.moments.device == self._device for piece in pieces):
            yield from ((piece, piece.moments) for piece in pieces)
            return
        here = torch.cuda.current_stream(self._device)
        up, down = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        room = max(piece.moments.numel() for piece in pieces)
        buffers = [torch.empty(room, dtype=self._dtype, device=self._device) for _ in range(2)]
        arrived, left = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        up.wait_stream(here)  # the buffers' memory may still be in use there

        def bring(number: int) -> torch.Tensor:
            moments, turn = pieces[number].moments, number % 2
            buffer = buffers[turn][: moments.numel()].view_as(moments)
            with torch.cuda.stream(up):
                left[turn].wait(up)  # no wait where nothing was recorded yet
                buffer.copy_(moments, non_blocking=True)
                arrived[turn].record(up)
            return buffer

        coming = bring(0)
        for number, piece in enumerate(pieces):
            buffer = coming
            if number + 1 < len(pieces):
                coming = bring(number + 1)
            arrived[number % 2].wait(here)
            yield piece, buffer
            down.wait_stream(here)
            with torch.cuda.stream(down):
                piece.moments.copy_(buffer, non_blocking=True)
                left[number % 2].record(down)
        down.synchronize()  # from here on the host may read them, and the buffers may go

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Copies in host memory: `exp_avg`, `exp_avg_sq` (this rank's part) and `num_steps` by parameter name."""
        both = [torch.empty(2, *shape, dtype=self._dtype) for shape in self._shapes]
        for part, own in self._columns():
            both[part.index].view(2, -1)[:, part.start : part.end] = own
        return {
            name: {"exp_avg": moments[0], "exp_avg_sq": moments[1], "num_steps": num_steps}
            for name, moments, num_steps in zip(self._names, both, self._num_steps, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` of the same layout gave.

        Raises:
            ContractError: naming what is missing, unknown or of another shape; nothing has changed then.
        """
        for name, shape in zip(self._names, self._shapes, strict=True):
            for key in ("exp_avg", "exp_avg_sq", "num_steps"):
                if key not in state.get(name, {}):
                    raise ContractError(f"optimizer state has no {key} of {name}")
                if key != "num_steps" and state[name][key].shape != shape:
                    found = list(state[name][key].shape)
                    raise ContractError(f"optimizer state: {key} of {name} has shape {found}, not {list(shape)}")
        unknown = sorted(state.keys() - set(self._names))
        if unknown:
            raise ContractError(f"optimizer state is of parameters that do not train here: {', '.join(unknown)}")
        for part, own in self._columns():
            entry = state[self._names[part.index]]
            for row, key in enumerate(("exp_avg", "exp_avg_sq")):
                own[row].copy_(entry[key].reshape(-1)[part.start : part.end])
        self._num_steps = [int(state[name]["num_steps"]) for name in self._names]

    def _columns(self) -> Iterator[tuple[_Slice, torch.Tensor]]:
        """Every slice with its moments [2, size]."""
        for piece in self._pieces:
            columns = piece.moments.split([part.size for part in piece.slices], dim=1)
            yield from zip(piece.slices, columns, strict=True)


def _cut(sizes: Sequence[int], limit: int) -> list[list[_Slice]]:
    """Pieces of at most `limit` elements that cover parameters of these sizes in order."""
    pieces: list[list[_Slice]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                pieces.append([])
                room = limit
            end = min(size, start + room)
            pieces[-1].append(_Slice(index, start, end))
            room -= end - start
            start = end
    return pieces
