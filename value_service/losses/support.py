"""The fixed points on which a classification critic spreads a value, padded so that its borders are unbiased.

    low = 0, high = 1, num_bins = 5, pad_bins = 1:   -0.25   0   0.25   0.5   0.75   1   1.25

Paper: arXiv 2403.03950, section 3 (value functions by classification).

Legend: K points, N targets, w = spacing.

Notable:
- Points are evenly spaced and include `low` and `high`; edges lie half a spacing around each point.
- A smoothed target at the very border of the points loses the half that falls outside, and its mean moves inward (by
  0.007 at w = 1/50): binary rewards sit exactly there. `pad_bins` points beyond both ends give the mass a place.
- Targets are clamped to [low, high], the range without the padding, and the clamped ones are counted.

Deviations:
- The paper lays edges evenly over [low, high] and takes midpoints as points; here the points themselves are even, so
  that low and high are points. `pad_bins = 0` with 51 points on [0, 1] is a head as others use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class Support:
    """K = num_bins + 2 pad_bins points at spacing (high - low) / (num_bins - 1).

    Raises:
        ValueError: low not below high, a border that is not finite, fewer than two bins, or a negative padding.
    """

    low: float
    high: float
    num_bins: int
    pad_bins: int = 3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low must be below high, both finite; got {self.low} and {self.high}")
        if self.num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {self.num_bins}")
        if self.pad_bins < 0:
            raise ValueError(f"pad_bins must not be negative, got {self.pad_bins}")

    @property
    def width(self) -> float:
        """w, the spacing of the points."""
        return (self.high - self.low) / (self.num_bins - 1)

    @property
    def num_points(self) -> int:
        """K, the outputs of the head."""
        return self.num_bins + 2 * self.pad_bins

    @cached_property
    def points(self) -> np.ndarray:
        """[K] f64, ascending."""
        inner = np.linspace(self.low, self.high, self.num_bins)
        pad = self.width * np.arange(1, self.pad_bins + 1)
        return np.concatenate([self.low - pad[::-1], inner, self.high + pad])

    @cached_property
    def edges(self) -> np.ndarray:
        """[K + 1] f64: midpoints between neighbours, and half a spacing beyond the outer points."""
        points, half = self.points, self.width / 2
        return np.concatenate([[points[0] - half], (points[1:] + points[:-1]) / 2, [points[-1] + half]])

    def clamp(self, returns: torch.Tensor) -> torch.Tensor:
        """Targets within [low, high], in f64.

        Args:
            returns: [N].

        Returns:
            [N] f64; NaN where a target is not finite, so that the trainer refuses the step.
        """
        returns = returns.detach().double()
        return returns.clamp(self.low, self.high) + 0.0 * returns

    def num_out_of_range(self, returns: torch.Tensor) -> torch.Tensor:
        """How many targets `clamp` moves.

        Args:
            returns: [N].

        Returns:
            f64 scalar. What f32 rounds beyond a border (a relative 1e-6) is not counted.
        """
        returns, slack = returns.detach().double(), 1e-6 * max(1.0, abs(self.low), abs(self.high))
        return ((returns < self.low - slack) | (returns > self.high + slack)).sum(dtype=torch.float64)
