"""Before a step: all ranks show each other what they hold, and go on only if it is the same grid.

Notable:
- Runs over gloo before the first collective of the step, so a starved rank, another count of micro-batches or another
  grid is a named error on every rank, never a hang.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.training.ranks import Ranks
from services.wire.errors import PreflightError
from services.wire.grids import GridItem

DIGEST_HEX_DIGITS = 15
"""What fits a signed 64-bit integer."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds for the step; all zero where it received nothing."""

    received: int = 0
    epoch: int = 0
    step: int = 0
    num_micro_batches: int = 0
    grid_digest: int = 0
    item_digest: int = 0
    data_rank: int = 0
    num_tokens: int = 0

    @staticmethod
    def of(item: GridItem | None) -> Held:
        """Summarise an item."""
        if item is None:
            return Held()
        header = item.header
        return Held(
            received=1,
            epoch=header.epoch,
            step=header.step,
            num_micro_batches=sum(m.num_micro_batches for m in header.mini_batches),
            grid_digest=int(header.grid_digest[:DIGEST_HEX_DIGITS], 16),
            item_digest=int(header.digest[:DIGEST_HEX_DIGITS], 16),
            data_rank=header.data_rank,
            num_tokens=len(item.arrays["token_ids"]),
        )


def agree(step: int, item: GridItem | None, ranks: Ranks, *, cp: int = 1) -> list[Held]:
    """What every rank holds, in rank order; `cp` ranks each hold the same item.

    Raises:
        PreflightError: on all ranks alike, when one received nothing or they hold different grids.
    """
    mine = Held.of(item)
    held = [Held(*row) for row in ranks.gather_ints([getattr(mine, name) for name in Held.__slots__])]
    missing = [rank for rank, other in enumerate(held) if not other.received]
    if missing:
        raise PreflightError(f"step {step}: rank(s) {missing} received no grid item in time")
    for name in ("epoch", "step", "num_micro_batches", "grid_digest"):
        values = [getattr(other, name) for other in held]
        if len(set(values)) > 1:
            raise PreflightError(f"step {step}: ranks disagree about {name}: {values}")
    wrong = [rank for rank, other in enumerate(held) if other.data_rank != rank // cp]
    if wrong:
        raise PreflightError(f"step {step}: rank(s) {wrong} received another rank's item")
    return held
