"""Recorded rollouts in place of a producer: the same groups in the same order, scored again by the critic of now.

Notable:
- A group is scored when as many critic grids are applied as when it was first scored: before grid c goes, every group
  that critic c scored is, those of later batches too. These are kept until their batch comes.
- One request at a time, in the recorded order. Requests that wait together are packed together, and packing moves the
  last bits of a value: so nothing here depends on timing, and two replays are equal bit for bit.
- A group that was recorded without a critic is scored when its batch comes.
- The record is only read. Recorded values are not used.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from loguru import logger

from orchestrator.critic_grids import CriticGrids
from orchestrator.producer import score_group
from services.runtime.records import open_record
from services.transport.score_client import ScoreClient
from services.wire.errors import ContractError, UsageError
from services.wire.rollouts import Group

_Place = tuple[int, int]
"""Step and index within its batch."""


class RecordedRollouts:
    """Serves a record's batches.

    Args:
        folder: `rollouts` of the recorded run.
        scorer: the value service's client, or None without a critic.
        critic_grids: says how many grids the critic has applied; None without a critic.
        score_deadline_s: of one scoring request.
    """

    def __init__(
        self, folder: Path, scorer: ScoreClient | None, critic_grids: CriticGrids | None, *, score_deadline_s: float
    ) -> None:
        self._folder = folder
        self._steps = open_record(folder)
        self._scorer = scorer
        self._critic_grids = critic_grids
        self._score_deadline_s = score_deadline_s
        self._place: _Place = (0, 0)
        self._kept: dict[_Place, Group] = {}
        self._order_of = {
            (step, index): entry.order
            for step, recorded in enumerate(self._steps)
            for index, entry in enumerate(recorded.header.groups)
        }
        self.num_sampled_tokens = 0

    @property
    def num_in_flight(self) -> int:
        """Nothing is being rolled out."""
        return 0

    @property
    def num_ready(self) -> int:
        """Traces that were scored for later batches."""
        return sum(len(group.traces) for group in self._kept.values())

    def poke(self) -> None:
        """Nothing to start."""

    async def run(self) -> None:
        """Nothing to do besides."""
        await asyncio.Event().wait()

    async def ready(self) -> bool:
        """Score what is to be scored before the batch whose turn it is.

        Raises:
            UsageError: the record ends here.
            CodecError: a file of it is damaged.
            ContractError: the value service is at another step than it should be.
        """
        step, index = self._place
        if step >= len(self._steps):
            raise UsageError(f"the record {self._folder} ends before step {step}")
        if index == 0:
            await self._score_all_of(critic_step=step)
        return True

    async def next_group(self) -> Group:
        """The next group of the batch whose turn it is.

        Raises:
            UsageError, CodecError, ContractError: see `ready`.
        """
        await self.ready()
        step, index = self._place
        kept = self._kept.get((step, index))
        group = kept if kept is not None else await self._read((step, index))
        self._kept.pop((step, index), None)
        is_last = index + 1 == len(self._steps[step].header.groups)
        self._place = (step + 1, 0) if is_last else (step, index + 1)
        return group

    def pending(self) -> list[Group]:
        """What was scored for later batches, in the order of scoring."""
        return sorted(self._kept.values(), key=lambda group: group.order)

    def state_dict(self) -> dict[str, Any]:
        """Which batch's turn it is: one that was taken in part is served again."""
        return {"step": self._place[0]}

    def load_state_dict(self, state: dict[str, Any], pending: list[Group]) -> None:
        """Go on there, with what was scored before."""
        self._place = (int(state["step"]), 0)
        place_of = {order: place for place, order in self._order_of.items()}
        self._kept = {place_of[group.order]: group for group in pending}

    async def _score_all_of(self, *, critic_step: int) -> None:
        """Score every group whose turn it is once so many critic grids are applied."""
        if self._scorer is None or self._critic_grids is None:
            return
        await self._critic_grids.wait_done(critic_step - 1)
        for place in self._due(critic_step):
            group = await self._read(place)
            await score_group(group, self._scorer, deadline_s=self._score_deadline_s)
            if group.critic_step != critic_step:
                raise ContractError(f"the value service scored at critic step {group.critic_step}, not {critic_step}")
            self._kept[place] = group

    def _due(self, critic_step: int) -> list[_Place]:
        places = []
        for (step, index), _ in sorted(self._order_of.items(), key=lambda item: item[1]):
            if step < critic_step or (step, index) in self._kept:
                continue
            scored_by = self._steps[step].header.groups[index].critic_step
            if step == critic_step or scored_by == critic_step:
                places.append((step, index))
                if 0 <= scored_by < critic_step:
                    # the record was shorter when an earlier start of this replay was at that step
                    logger.warning("group {} of step {} was not scored by critic {}", index, step, scored_by)
        return places

    async def _read(self, place: _Place) -> Group:
        """A group as it was before it was scored."""
        step, index = place
        group = await asyncio.to_thread(self._steps[step].read, index)
        for sample in group.samples:
            sample.values, sample.bootstrap_value, sample.critic_step = None, 0.0, -1
        return group
