"""Which traces may train: validity, staleness, and when too many are bad to go on.

Notable:
- An invalid trace is dropped whole and counted by cause; it is never scored as reward 0.
- Staleness = version about to be trained minus the oldest version among the trace's action tokens, checked when the
  batch is made up. A stale trace is not a bad one: it does not count against `max_bad_fraction`.
- Bad rollouts often end at once and good ones late: nothing is judged before as many have ended as run at a time.
- `max_bad_fraction = 1` tolerates everything but a wait without end: see `Producer.next_group`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any, NoReturn

import numpy as np

from services.wire.errors import BadData, ContractError
from services.wire.samples import StopReason, Trace, validate_branch

MIN_OUTCOMES = 20
"""Fewer finished rollouts than this never stop a run."""


def cause_of_invalid(trace: Trace, *, max_tokens: int) -> str | None:
    """Why this trace cannot train, or None where it can.

    Args:
        trace: a finished rollout.
        max_tokens: the longest branch that policy and critic take.
    """
    if trace.stop_reason is StopReason.ABORTED:
        return "aborted"
    if not isinstance(trace.reward, (int, float)) or not math.isfinite(trace.reward):
        return "nonfinite_reward"
    if trace.num_action_tokens == 0:
        return "no_action"
    for branch in trace.branches:
        if len(branch.token_ids) > max_tokens:
            return "over_long"
        if not np.isfinite(branch.logprobs[branch.action_mask]).all():
            return "missing_logprob"
        if branch.step_rewards is not None and not np.isfinite(branch.step_rewards).all():
            return "nonfinite_reward"
        try:
            validate_branch(branch)
        except ContractError:
            return "contract"
    return None


class Outcomes:
    """Counts drops by cause, and stops the run when too large a share of recent rollouts is invalid."""

    def __init__(self, *, max_bad_fraction: float, window: int, num_concurrent: int = 0) -> None:
        """Start with nothing counted.

        Args:
            max_bad_fraction: invalid share of the window that is still allowed.
            window: finished rollouts that are looked at.
            num_concurrent: rollouts that run at a time.
        """
        self._max_bad_fraction = max_bad_fraction
        self._recent: deque[str | None] = deque(maxlen=window)
        self._min_outcomes = min(max(MIN_OUTCOMES, num_concurrent), window)
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def good(self) -> None:
        """A rollout finished and is valid."""
        self._recent.append(None)

    def bad(self, cause: str, example: str) -> None:
        """A rollout is invalid.

        Raises:
            BadData: when more than `max_bad_fraction` of the window is invalid; names the causes and an example.
        """
        self.dropped[cause] += 1
        self.examples[cause] = example
        self._recent.append(cause)
        causes = Counter(c for c in self._recent if c is not None)
        share = causes.total() / len(self._recent)
        if len(self._recent) >= self._min_outcomes and share > self._max_bad_fraction:
            worst = causes.most_common(1)[0][0]
            listed = ", ".join(f"{count} {name}" for name, count in causes.most_common())
            raise BadData(
                f"{share:.0%} of the last {len(self._recent)} rollouts were invalid ({listed}); "
                f"orchestrator.max_bad_fraction is {self._max_bad_fraction:.0%}; for example {self.examples[worst]}"
            )

    def fruitless(self, num_rollouts: int, waited_s: float) -> NoReturn:
        """So many rollouts ended, over at least so long, without a valid group among them.

        Raises:
            BadData: always; names what was dropped since the last row of metrics, and an example.
        """
        causes = self.dropped.most_common()
        listed = ", ".join(f"{count} {name}" for name, count in causes)
        example = next((self.examples[name] for name, _ in causes if name in self.examples), "none")
        raise BadData(
            f"no valid group among the last {num_rollouts} rollouts, in {waited_s:g} s or more "
            f"(dropped: {listed or 'none'}); for example {example}"
        )

    def drop(self, cause: str, count: int = 1) -> None:
        """Count a drop that says nothing about the data's quality (staleness, a group too small)."""
        self.dropped[cause] += count

    def state_dict(self) -> dict[str, Any]:
        """Drops since the last row, and the window that `max_bad_fraction` looks at."""
        return {"dropped": dict(self.dropped), "recent": list(self._recent), "examples": dict(self.examples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was counted."""
        self.dropped = Counter(state["dropped"])
        self._recent = deque(state["recent"], maxlen=self._recent.maxlen)
        self.examples = dict(state["examples"])

    def take_counts(self) -> dict[str, int]:
        """Drops by cause since the last call."""
        counts = dict(self.dropped)
        self.dropped.clear()
        return counts
