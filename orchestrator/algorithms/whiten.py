"""Whitening of advantages over a whole batch.

Legend: T tokens of one branch; lists run over branches.

Notable:
- One affine map for the whole batch, taken over the tokens that count, in f64, with the n-1 standard deviation and
  no epsilon. Whitening per rank, per micro-batch or per half of a sequence gives other numbers.
- Fewer than two counted tokens have no spread: the advantages pass unchanged. Equal advantages become zeros.
- Inputs are never changed; outputs are zero off their masks. Value targets never come here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.packing.grid import policy_loss_mask
from services.wire.samples import TrainingSample

RELATIVE_SPREAD_FLOOR = 1e-12
"""A standard deviation at or below this share of max(1, |mean|) is rounding, not spread."""


def whiten(
    advantages: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    counted: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Shift and scale all branches by the batch's mean and standard deviation.

    Args:
        advantages: Per branch, [T].
        masks: Per branch, [T]; where the output is not zero.
        counted: Per branch, [T]; the tokens mean and deviation are taken over. None: `masks`.

    Returns:
        Per branch, [T] f64, new arrays.

    Raises:
        ValueError: a non-finite advantage on a mask, or lists of different lengths.
    """
    counted = masks if counted is None else counted
    bool_masks = [np.asarray(mask).astype(bool) for mask in masks]
    arrays = [np.asarray(array, dtype=np.float64) for array in advantages]
    for array, mask in zip(arrays, bool_masks, strict=True):
        if not np.isfinite(array[mask]).all():
            raise ValueError("advantages holds a non-finite number on a masked-in token")
    pool = [array[np.asarray(mask).astype(bool)] for array, mask in zip(arrays, counted, strict=True)]
    tokens = np.concatenate(pool) if pool else np.zeros(0)

    mean, scale = 0.0, 1.0
    if len(tokens) >= 2:
        mean = float(tokens.mean())
        deviation = float(tokens.std(ddof=1))
        is_flat = deviation <= RELATIVE_SPREAD_FLOOR * max(1.0, abs(mean))
        scale = 0.0 if is_flat else 1.0 / deviation
    whitened = []
    for array, mask in zip(arrays, bool_masks, strict=True):
        out = np.zeros(len(array))
        out[mask] = (array[mask] - mean) * scale
        whitened.append(out)
    return whitened


def whiten_samples(samples: Sequence[TrainingSample]) -> None:
    """Replace the advantages of a credited batch by their whitened ones, counted over the policy's loss tokens.

    Args:
        samples: Samples whose advantages are filled; each gets a new array.

    Raises:
        ValueError: a non-finite advantage on an action token.
    """
    credited = [(sample, sample.advantages) for sample in samples if sample.advantages is not None]
    whitened = whiten(
        [advantages for _, advantages in credited],
        [sample.branch.action_mask for sample, _ in credited],
        counted=[policy_loss_mask(sample) for sample, _ in credited],
    )
    for (sample, _), advantages in zip(credited, whitened, strict=True):
        sample.advantages = advantages
