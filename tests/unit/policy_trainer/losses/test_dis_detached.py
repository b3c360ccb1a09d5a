"""A bandit that the double-sided mask learns, and that the same expression without `detach` unlearns."""

from __future__ import annotations

from collections.abc import Callable

import torch

from policy_trainer.losses.dis import dis_loss

NUM_ACTIONS = 8
CHANCE = 1 / NUM_ACTIONS
EPS_LOW, EPS_HIGH = 0.3, 5.0
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    count = float(len(logprobs))
    return dis_loss(logprobs, rollout, advantages, mask, eps_low=EPS_LOW, eps_high=EPS_HIGH, denominator=count)[0]


def nothing_detached(logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = (logprobs - rollout).exp()
    inside = (ratio > 1 - EPS_LOW) & (ratio < 1 + EPS_HIGH)
    return -(torch.where(inside, ratio, 0.0) * advantages * logprobs).mean()


def learned(loss_of: Loss, *, num_updates: int = 120, batch: int = 128) -> float:
    """Probability of action 0, the only right one, after updates on rollouts of a policy up to one update old."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(NUM_ACTIONS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    sampler = logits.detach().log_softmax(-1)
    for update in range(num_updates):
        if update % 2 == 0:
            sampler = logits.detach().log_softmax(-1)
        actions = torch.multinomial(sampler.exp(), batch, replacement=True, generator=generator)
        rewards = (actions == 0).float()
        optimizer.zero_grad()
        loss_of(logits.log_softmax(-1)[actions], sampler[actions], rewards - float(sampler[0].exp())).backward()
        optimizer.step()
    return float(logits.softmax(-1)[0].detach())


def test_the_right_one_of_eight_actions_is_learned() -> None:
    assert learned(ours) > 0.99


def test_with_the_coefficient_in_the_graph_it_would_be_unlearned() -> None:
    assert learned(nothing_detached) < CHANCE / 4
