"""Explained variance of the critic, pooled exactly over micro-batches and ranks.

Notable:
- EV = 1 - Var(y - V) / Var(y), population variances over all loss tokens at once. A mean of per-rank EVs is another
  number, and usually a wrong one.
- What travels are (n, mean, M2) in f64, merged by Chan's formula: raw sums lose the variance when the mean is large.
- EV does not see a constant bias; `error_sum` of the loss does.
- Undefined (fewer than two tokens, or targets that do not vary) is None, never 0 and never -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.wire.errors import NonFiniteError

ArrayLike = np.ndarray | torch.Tensor | Sequence[float]

RELATIVE_VARIANCE_FLOOR = 1e-12
"""A variance at or below this share of max(1, mean^2) is rounding."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers.

    Example: of [1, 3]: n = 2, mean = 2, m2 = 2.
    """

    n: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, numbers: ArrayLike) -> Moments:
        """Moments of the numbers, in f64.

        Args:
            numbers: Any shape; masked entries already taken out.

        Raises:
            NonFiniteError: a number that is not finite.
        """
        array = _f64(numbers)
        if not np.isfinite(array).all():
            raise NonFiniteError("moments of a non-finite number")
        if len(array) == 0:
            return cls()
        mean = float(array.mean())
        return cls(float(len(array)), mean, float(np.square(array - mean).sum()))

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of numbers together (Chan, Golub, LeVeque 1979)."""
        n = self.n + other.n
        if n == 0:
            return self
        delta = other.mean - self.mean
        return Moments(
            n,
            self.mean + delta * other.n / n,
            self.m2 + other.m2 + delta * delta * self.n * other.n / n,
        )

    @property
    def variance(self) -> float | None:
        """Population variance; None for fewer than two numbers."""
        return self.m2 / self.n if self.n >= 2 else None

    def to_list(self) -> list[float]:
        """[n, mean, m2], for an all-gather in f64."""
        return [self.n, self.mean, self.m2]

    @classmethod
    def from_list(cls, flat: Sequence[float]) -> Moments:
        """Undo `to_list`."""
        n, mean, m2 = flat
        return cls(float(n), float(mean), float(m2))


@dataclass(frozen=True, slots=True)
class FitMoments:
    """What explained variance needs of one shard: moments of the targets y and of the residuals y - V."""

    returns: Moments = Moments()
    residuals: Moments = Moments()

    @classmethod
    def of(cls, returns: ArrayLike, values: ArrayLike) -> FitMoments:
        """Moments of a shard; a dummy's empty arrays contribute nothing.

        Args:
            returns: Targets of the shard's loss tokens.
            values: The critic's values of the same tokens.

        Raises:
            NonFiniteError: a number that is not finite.
            ValueError: lengths that differ.
        """
        returns, values = _f64(returns), _f64(values)
        if len(returns) != len(values):
            raise ValueError(f"returns has {len(returns)} entries, values has {len(values)}")
        return cls(Moments.of(returns), Moments.of(returns - values))

    def merge(self, other: FitMoments) -> FitMoments:
        """Moments of both shards together."""
        return FitMoments(self.returns.merge(other.returns), self.residuals.merge(other.residuals))

    def to_list(self) -> list[float]:
        """Six numbers, for an all-gather in f64."""
        return self.returns.to_list() + self.residuals.to_list()

    @classmethod
    def from_list(cls, flat: Sequence[float]) -> FitMoments:
        """Undo `to_list`."""
        return cls(Moments.from_list(flat[:3]), Moments.from_list(flat[3:]))

    @classmethod
    def pooled(cls, shards: Sequence[Sequence[float]]) -> FitMoments:
        """Merge what an all-gather of `to_list` brought, in rank order."""
        total = cls()
        for flat in shards:
            total = total.merge(cls.from_list(flat))
        return total

    def explained_variance(self) -> float | None:
        """1 - Var(y - V) / Var(y), or None where undefined."""
        target, residual = self.returns.variance, self.residuals.variance
        if target is None or residual is None:
            return None
        if target <= RELATIVE_VARIANCE_FLOOR * max(1.0, self.returns.mean * self.returns.mean):
            return None
        explained = 1.0 - residual / target
        return explained if math.isfinite(explained) else None


def explained_variance(returns: ArrayLike, values: ArrayLike) -> float | None:
    """Share of the targets' variance that the critic's values explain.

    Args:
        returns: Targets of the loss tokens.
        values: The critic's values of the same tokens, from before the update.

    Returns:
        1 for a perfect critic up to a constant, 0 for a constant one, negative for a harmful one; None where the
        targets do not vary (variance at most 1e-12 max(1, mean^2)) or fewer than two tokens count.

    Raises:
        NonFiniteError: a number that is not finite.
        ValueError: lengths that differ.
    """
    return FitMoments.of(returns, values).explained_variance()


def _f64(numbers: ArrayLike) -> np.ndarray:
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.detach().to("cpu", torch.float64).numpy()
    return np.asarray(numbers, dtype=np.float64).reshape(-1)
