"""E5: the largest policy gradients when rollouts are some updates old, under three ratio-based losses.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.staleness [--seeds 5] [--quick] [--write]

Notable:
- A softmax policy over the actions of a few contexts; one action of a context is right. Now and then another becomes
  right, so the policy keeps moving, and an old policy says something else than the present one.
- Rollouts come from the policy as it was so many updates ago. Losses, with the defaults of SAO and PPO, are those of
  the policy trainer; "raw" is the double-sided mask with its window wide open.
- Plain gradient steps without clipping of the gradient's norm: what a loss lets through is what the policy gets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from policy_trainer.losses import LOSSES
from services.config.algorithm import PpoConfig, SaoConfig

CONTEXTS, ACTIONS, BATCH = 16, 16, 64
LR, CHANGE, NOISE = 8.0, 0.02, 0.1
"""Learning rate; probability of a change of what is right, each update; that of a reward the wrong way round."""
UPDATES, BURN_IN = 1500, 200
STALENESS = (0, 16, 32, 64)
WIDE_OPEN = {"eps_low": 1.0, "eps_high": 1e12}
WAYS: dict[str, tuple[str, Mapping[str, float]]] = {
    "raw ratio": ("dis", WIDE_OPEN),
    "PPO clip": ("ppo_clip", PpoConfig(type="ppo").loss_constants()),
    "double-sided mask": ("dis", SaoConfig(type="sao").loss_constants()),
}
TAIL = 0.999


class Trained(NamedTuple):
    """One training, its beginning left out."""

    tail: float
    """the 99.9th percentile of the gradient's norm over its median"""
    ratio_max: float
    reward: float


def train(way: str, staleness: int, seed: int, updates: int) -> Trained:
    """Train a policy on rollouts of the policy `staleness` updates ago."""
    name, constants = WAYS[way]
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator)

    right = draw(ACTIONS, CONTEXTS)
    logits = torch.zeros(CONTEXTS, ACTIONS, requires_grad=True)
    past = deque([logits.detach().clone()], maxlen=staleness + 1)
    mask = torch.ones(BATCH, dtype=torch.bool)
    norms, ratios, rewards = (np.empty(updates) for _ in range(3))
    for update in range(updates):
        if float(torch.rand((), generator=generator)) < CHANGE:
            right[draw(CONTEXTS, 1)] = draw(ACTIONS, 1)
        contexts = draw(CONTEXTS, BATCH)
        behind = past[0][contexts].log_softmax(-1)  # [BATCH, ACTIONS]
        actions = torch.multinomial(behind.exp(), 1, generator=generator)
        reward = ((actions[:, 0] == right[contexts]) ^ (torch.rand(BATCH, generator=generator) < NOISE)).float()
        logprobs = logits[contexts].log_softmax(-1).gather(1, actions)[:, 0]
        rollout_logprobs, advantages = behind.gather(1, actions)[:, 0], reward - reward.mean()
        loss, sums = LOSSES[name](logprobs, rollout_logprobs, advantages, mask, denominator=BATCH, **constants)
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= LR * gradient
        past.append(logits.detach().clone())
        norms[update], rewards[update] = float(gradient.norm()), float(reward.mean())
        ratios[update] = np.exp(float(sums["log_ratio_abs_max"]))
    norms, ratios, rewards = norms[BURN_IN:], ratios[BURN_IN:], rewards[BURN_IN:]
    return Trained(float(np.quantile(norms, TAIL) / np.median(norms)), float(ratios.max()), float(rewards.mean()))


Found = dict[str, list[list[Trained]]]
"""Way to [staleness][seed]."""


def column(found: Found, way: str, pick: Callable[[Trained], float]) -> np.ndarray:
    """[S, staleness] of one number."""
    return np.array([[pick(trained) for trained in many] for many in found[way]]).T


def medians(numbers: np.ndarray, form: str = ".1f") -> str:
    """One for each staleness but 0."""
    return ", ".join(format(number, form) for number in np.median(numbers, axis=0)[1:])


def checks_of(tails: Mapping[str, np.ndarray], rewards: Mapping[str, np.ndarray]) -> list[Check]:
    raw, clip, masked = (tails[way] for way in WAYS)
    stale = range(1, len(STALENESS))

    def shown(way: str, numbers: Mapping[str, np.ndarray]) -> str:
        return f"{way}: " + ", ".join(
            over_seeds(numbers[way][:, i], ".2f" if numbers is rewards else ".1f") for i in stale
        )

    return [
        Check(
            f"staleness {', '.join(map(str, STALENESS[1:]))}: the median tail of the raw ratio is twice the mask's",
            "; ".join(shown(way, tails) for way in ("raw ratio", "double-sided mask")),
            all(np.median(raw[:, i]) > 2 * np.median(masked[:, i]) for i in stale),
        ),
        Check(
            "the mask's tail does not grow with staleness: below twice its own on fresh rollouts, median",
            over_seeds(masked[:, 1:].max(axis=1), ".1f") + " against " + over_seeds(masked[:, 0], ".1f"),
            bool(np.median(masked[:, 1:].max(axis=1)) < 2 * np.median(masked[:, 0])),
        ),
        Check(
            "on fresh rollouts the three are one",
            ", ".join(over_seeds(tails[way][:, 0], ".1f") for way in WAYS),
            bool(np.allclose(raw[:, 0], clip[:, 0]) and np.allclose(raw[:, 0], masked[:, 0])),
            limits=True,
        ),
        Check(
            "the tail is one of ratios alone: on fresh rollouts it is below the raw ratio's on any older ones, median",
            over_seeds(raw[:, 0], ".1f"),
            all(np.median(raw[:, 0]) < np.median(raw[:, i]) for i in stale),
            limits=True,
        ),
        Check(
            "PPO's clip bounds the tail no worse than the mask does, median at each staleness",
            shown("PPO clip", tails),
            all(np.median(clip[:, i]) <= np.median(masked[:, i]) for i in stale),
            limits=True,
        ),
        Check(
            "a bounded tail buys no reward here: the mask's is within 0.05 of the raw ratio's, median",
            "; ".join(shown(way, rewards) for way in ("raw ratio", "double-sided mask")),
            all(
                abs(np.median(rewards["double-sided mask"][:, i]) - np.median(rewards["raw ratio"][:, i])) < 0.05
                for i in stale
            ),
            limits=True,
        ),
    ]


def tail(seeds: Sequence[int], quick: bool) -> Page:
    updates = BURN_IN + 100 if quick else UPDATES
    found = {way: [[train(way, age, seed, updates) for seed in seeds] for age in STALENESS] for way in WAYS}
    tails, tops, rewards = (
        {way: column(found, way, pick) for way in WAYS}
        for pick in (lambda t: t.tail, lambda t: t.ratio_max, lambda t: t.reward)
    )
    head = ["loss", *(f"staleness {age}" for age in STALENESS)]
    forms = {
        "Tail of the gradient's norm": (tails, ".1f"),
        "Largest ratio met": (tops, ".3g"),
        "Mean reward": (rewards, ".2f"),
    }
    return Page(
        name="E5",
        title="the tail of the policy's gradients under staleness",
        claim=Claim(
            "On rollouts of an older policy, importance ratios have a heavy tail, and with them the policy's "
            "gradients; a mask that drops tokens with a ratio too far on either side keeps them within bounds.",
            "arXiv 2607.07508, equations 1 to 3",
        ),
        setting=(
            f"{CONTEXTS} contexts, {ACTIONS} actions, one of them right; which one changes in some context with "
            f"probability {CHANGE:g} an update; a reward is the wrong way round with probability {NOISE:g}. {BATCH} "
            f"rollouts an update from the policy so many updates ago, advantages against the batch's mean, {updates} "
            f"gradient steps of {LR:g} of which the first {BURN_IN} do not count. Windows: mask (0.7, 6), PPO (0.8, "
            "1.2). Tail: 99.9th percentile of the gradient's norm over its median."
        ),
        tables=[
            f"{title}:\n\n" + table(head, [[way, *(over_seeds(x, form) for x in numbers[way].T)] for way in WAYS])
            for title, (numbers, form) in forms.items()
        ],
        checks=checks_of(tails, rewards),
        sentence=(
            f"At staleness {', '.join(map(str, STALENESS[1:]))} the largest gradients are "
            f"{medians(tails['raw ratio'])} times the median under the raw ratio, "
            f"{medians(tails['double-sided mask'])} under the mask and {medians(tails['PPO clip'])} under PPO's clip; "
            f"with mean rewards of {medians(rewards['raw ratio'], '.2f')}, "
            f"{medians(rewards['double-sided mask'], '.2f')} and {medians(rewards['PPO clip'], '.2f')}, and a tail of "
            f"{np.median(tails['raw ratio'][:, 0]):.1f} on fresh "
            "rollouts already."
        ),
        panels=[
            Panel(
                "largest gradients",
                "staleness in updates",
                "99.9th percentile / median",
                [Line(way, STALENESS, numbers) for way, numbers in tails.items()],
                y_log=True,
            ),
            Panel(
                "reward",
                "staleness in updates",
                "mean reward",
                [Line(way, STALENESS, numbers) for way, numbers in rewards.items()],
                (0, 1),
            ),
        ],
        notes=[
            "The setting was picked among six that were looked at, as one in which the policy moves enough for ratios "
            "to matter; with gradient steps half as long the raw ratio's tail was hardly longer than the mask's.",
            "Fresh rollouts can have a long tail too, without any ratio, and seeds differ widely in it. How much of "
            "the tail on older rollouts is of that kind is not separated here.",
            "With a gradient clipped to a norm, as the trainers do, a tail costs the other tokens of its batch their "
            "share of the step rather than the policy its place; this is not measured here.",
            "That training collapses without the mask is a claim about deep networks after many steps: a table of "
            "logits does not collapse.",
        ],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(__doc__, [tail], command="python -m benchmarks.evidence.staleness", num_seeds=5)
