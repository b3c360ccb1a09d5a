"""A critic's head by itself, trained on fixed features: what the evidence on value losses is measured with.

Notable:
- Features are random directions of one norm, of which one decides the probability of success by a logistic.
- Head, losses, optimizer (AdamW, gradients clipped to norm 1) and explained variance are those of the value service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from services.config.train import OptimConfig
from services.model.head import ValueHead
from services.training.optimizer import Optimizer
from services.training.ranks import Ranks
from services.wire.grids import MicroBatch
from value_service.losses import ValueLoss, explained_variance, support_of

FEATURES, BATCH, HELD_OUT = 256, 64, 4000
SIGNAL = 3.0
"""Logit of success for one standard deviation of the deciding direction."""
TASK_SEEDS = 1000
"""Apart from the heads' own: with the same seed a head would begin as the very direction that decides."""
NOTHING = MicroBatch(np.zeros(0), {}, [])
"""The optimizer asks for micro-batches; the features are in the loss function's closure."""
Draw = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Number to features [N, FEATURES] of norm 1 and binary returns [N]."""


class Trained(NamedTuple):
    """What one training showed."""

    explained: list[float]
    """on held-out states with clean returns, after each of the asked number of updates"""
    peak_norm: float
    """largest gradient norm before clipping"""


def task(seed: int) -> Draw:
    """States of one task, new ones at each call."""
    generator = torch.Generator().manual_seed(TASK_SEEDS + seed)
    direction = torch.randn(FEATURES, generator=generator)
    direction /= direction.norm()

    def draw(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.randn(num, FEATURES, generator=generator)
        chances = torch.sigmoid(SIGNAL * (features @ direction))
        returns = (torch.rand(num, generator=generator) < chances).float()
        return features / features.norm(dim=1, keepdim=True), returns

    return draw


def train(
    loss: str,
    constants: Mapping[str, float],
    seed: int,
    *,
    norm: float,
    std: float,
    lr: float,
    at: Sequence[int],
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda returns: returns,
) -> Trained:
    """Train a head on fresh states and judge it on held-out ones.

    Args:
        loss: Name of a value loss.
        constants: As a grid's header would carry them.
        seed: Of task and head.
        norm: Of a state's features.
        std: Of the head's initial weight.
        lr: Learning rate.
        at: Numbers of updates after which it is judged, ascending.
        spoil: What becomes of the training returns.
    """
    draw = task(seed)
    held_out, clean = draw(HELD_OUT)
    support = support_of(loss, constants)
    points = None if support is None else torch.from_numpy(support.points).float()
    head = ValueHead(FEATURES, init_std=std, seed=seed, points=points)
    value_loss, optimizer = (
        ValueLoss(loss, constants, head.points),
        Optimizer(head, OptimConfig(lr=lr), Ranks(), warmup_updates=0),
    )
    mask, old_values = torch.ones(BATCH, dtype=torch.bool), torch.zeros(BATCH)
    explained, norms = [], []
    for update in range(1, at[-1] + 1):
        features, returns = draw(BATCH)
        outputs, targets = head.outputs(norm * features), spoil(returns)
        total, _ = value_loss(outputs, targets, mask, old_values=old_values, denominator=BATCH)
        norms.append(optimizer.update([NOTHING], lambda _, total=total: (total, {})).grad_norm)
        if update in at:
            with torch.no_grad():
                found = explained_variance(clean, head(norm * held_out))
            assert found is not None, "the held-out returns vary"
            explained.append(found)
    return Trained(explained, max(norms))


def ceiling() -> float:
    """Explained variance of the true probability, Var(p) / (E(p) (1 - E(p))), over many states."""
    chances = 1 / (1 + np.exp(-SIGNAL * np.random.default_rng(0).normal(size=100_000)))
    return float(chances.var() / (chances.mean() * (1 - chances.mean())))
