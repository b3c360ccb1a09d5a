"""`[checkpoint]`: when a run is committed to disk, and which commits stay.

Notable:
- A commit is policy, critic and orchestrator together; every kept one is a place to resume from.
- Whatever the interval, a run is committed at its end and when it is pre-empted.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from services.config.base import Section
from services.config.toml_lines import KeyPath

CheckpointProblem = tuple[KeyPath, str, str, tuple[KeyPath, ...]]
"""Path, what is wrong, the fix, and further paths that were read."""

_EVERY, _INTERVAL = ("checkpoint", "keep_every_steps"), ("checkpoint", "interval_steps")


class CheckpointConfig(Section):
    """`[checkpoint]`."""

    interval_steps: int = Field(default=20, ge=0)
    """Finished steps from one commit to the next; a crash costs at most so many. 0 = only at the end of the run and on
    pre-emption."""
    keep_last: int = Field(default=2, ge=1)
    """Newest commits that stay. 1 leaves none to fall back to where a file of it is damaged. While one is made, the
    disk holds one more."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Commits whose step is a multiple of this stay for good; 0 = none."""

    def is_due(self, num_steps: int) -> bool:
        """Whether a run that has finished `num_steps` steps is to be committed now."""
        return self.interval_steps > 0 and num_steps > 0 and num_steps % self.interval_steps == 0


def checkpoint_problems(section: CheckpointConfig) -> Iterator[CheckpointProblem]:
    """What of the section does not fit together."""
    interval, every = section.interval_steps, section.keep_every_steps
    if every == 0:
        return
    if interval == 0:
        what = "no step is committed on the way (checkpoint.interval_steps = 0), so there is nothing to keep"
        yield _EVERY, what, "delete it, or give checkpoint.interval_steps", (_INTERVAL,)
    elif every % interval:
        what = f"{every} is not a multiple of checkpoint.interval_steps = {interval}"
        yield _EVERY, what, f"give {-(-every // interval) * interval}, or another interval", (_INTERVAL,)
