"""What an algorithm is to the loop.

Notable:
- An algorithm credits samples and nothing else: it opens no socket, keeps no clock and knows no trainer.
"""

from __future__ import annotations

from typing import Protocol

from services.wire.samples import TrainingSample


class Algorithm(Protocol):
    """Turns rewards and values into advantages (for the policy) and value targets (for the critic)."""

    def credit(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """Fill `advantages` and, with a critic, `returns` of every sample in place.

        Args:
            groups: The batch; each group holds all samples (branches) of one prompt's traces.

        Returns:
            Metrics of the batch, by name.
        """
        ...  # pragma: no cover
