"""E7: the coefficient of the double-sided mask inside the graph, and detached.

    python -m benchmarks.evidence.detached_ratio [--seeds 5] [--quick] [--write]

Legend: B samples of a batch, C contexts, A actions.

Notable:
- The detached arm is `policy_trainer.losses.dis.dis_loss` itself. The other one is the same expression with nothing
  detached, which is what automatic differentiation makes of the equation as printed.
- Every context has one right action among eight: a policy that knows nothing is right once in eight.
- Rollouts are of a policy up to three updates old, so that the ratio is not 1.
- `tests/unit/policy_trainer/losses/test_dis_detached.py` learns the same bandit in CI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.evidence.common import Check, Claim, Line, Page, Panel, over_seeds, run, table
from policy_trainer.losses.dis import dis_loss

NUM_CONTEXTS, NUM_ACTIONS = 32, 8
CHANCE = 1 / NUM_ACTIONS
BATCH, UPDATES, LAG = 256, 600, 4
LEARNING_RATE, BASELINE_DECAY = 0.02, 0.9
WARM_START = 0.8
"""probability of the right action that a warm-started policy begins with"""
EPS_LOW, EPS_HIGH = 0.3, 5.0
LOGPROBS = (-0.5, -1.0, math.log(CHANCE), -3.0)
"""at which the gradient of one token is shown"""
POINTS = 30
"""of a curve"""

LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities [B], those of the rollouts [B], advantages [B]) to the loss"""


def detached(logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Ours."""
    everywhere = torch.ones_like(logprobs, dtype=torch.bool)
    count = float(len(logprobs))
    return dis_loss(logprobs, rollout, advantages, everywhere, eps_low=EPS_LOW, eps_high=EPS_HIGH, denominator=count)[0]


def in_graph(logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-mean f(x) A log pi, differentiated as it stands."""
    ratio = (logprobs - rollout).exp()
    inside = (ratio > 1 - EPS_LOW) & (ratio < 1 + EPS_HIGH)
    return -(torch.where(inside, ratio, 0.0) * advantages * logprobs).mean()


ARMS: dict[str, LossFunction] = {"detached (ours)": detached, "in the graph": in_graph}


def learn(loss_of: LossFunction, seed: int, updates: int, *, start: float = CHANCE) -> np.ndarray:
    """Train a table of logits on the bandit.

    Args:
        loss_of: The loss.
        seed: Of contexts, initial logits and samples.
        updates: How many.
        start: About the probability of the right action at first.

    Returns:
        [updates] the probability of the right action after each.
    """
    generator = torch.Generator().manual_seed(seed)
    right = torch.randint(NUM_ACTIONS, (NUM_CONTEXTS,), generator=generator)  # [C]
    logits = 0.1 * torch.randn(NUM_CONTEXTS, NUM_ACTIONS, generator=generator)  # [C, A]
    logits[torch.arange(NUM_CONTEXTS), right] += math.log(start / (1 - start) * (NUM_ACTIONS - 1))
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], LEARNING_RATE)
    sampler, baseline, curve = logits.detach().clone(), start, []
    for update in range(updates):
        if update % LAG == 0:
            sampler = logits.detach().clone()
        contexts = torch.randint(NUM_CONTEXTS, (BATCH,), generator=generator)  # [B]
        rollout = sampler.log_softmax(-1)[contexts]  # [B, A]
        actions = torch.multinomial(rollout.exp(), 1, generator=generator)  # [B, 1]
        rewards = (actions[:, 0] == right[contexts]).float()
        logprobs = logits.log_softmax(-1)[contexts].gather(1, actions)[:, 0]
        loss = loss_of(logprobs, rollout.gather(1, actions)[:, 0], rewards - baseline)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        baseline = BASELINE_DECAY * baseline + (1 - BASELINE_DECAY) * float(rewards.mean())
        with torch.no_grad():
            curve.append(float(logits.softmax(-1)[torch.arange(NUM_CONTEXTS), right].mean()))
    return np.array(curve)


def slope(loss_of: LossFunction, logprob: float) -> float:
    """-dL/d log pi of one sample with ratio 1 and advantage 1: what it should be is 1."""
    leaf = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    loss_of(leaf, leaf.detach(), torch.ones(1, dtype=torch.float64)).backward()
    assert leaf.grad is not None
    return -float(leaf.grad)


def _checks(ends: dict[str, np.ndarray], warm_ends: dict[str, np.ndarray]) -> list[Check]:
    """What has to be so.

    Args:
        ends: By arm, the last probability of the right action with each seed, from chance.
        warm_ends: The same from WARM_START.
    """
    (ours, theirs), (ours_warm, theirs_warm) = ends.values(), warm_ends.values()
    weights = [slope(loss_of, LOGPROBS[-1]) for loss_of in ARMS.values()]
    return [
        Check(f"in the graph: ends below chance, {CHANCE:g}", over_seeds(theirs, ".4f"), bool((theirs < CHANCE).all())),
        Check("detached: ends above .99", over_seeds(ours, ".4f"), bool((ours > 0.99).all())),
        Check(
            "in the graph the gradient has the wrong sign for an improbable token, and detached it has not",
            f"weight at log pi = {LOGPROBS[-1]:g}: {weights[1]:g} and {weights[0]:g}",
            weights[1] < 0 < weights[0],
        ),
        Check(
            f"a policy that begins at {WARM_START:g}: in the graph it ends below chance too, detached above .99",
            f"{over_seeds(theirs_warm, '.4f')} and {over_seeds(ours_warm, '.4f')}",
            bool((theirs_warm < CHANCE).all() and (ours_warm > 0.99).all()),
        ),
    ]


def _tables(curves: dict[str, np.ndarray]) -> list[str]:
    """Learning from chance, and the gradient of a single token."""
    updates = curves[next(iter(ARMS))].shape[1]
    steps = [0, updates // 10, updates // 3, updates - 1]
    learning = table(
        ["probability of the right action, after update", *(str(step + 1) for step in steps)],
        [[arm, *(over_seeds(runs[:, step], ".3f") for step in steps)] for arm, runs in curves.items()],
    )
    signs = table(
        ["-dL / d log pi of a token with ratio 1 and advantage 1, at log pi =", *(f"{x:.2f}" for x in LOGPROBS)],
        [[arm, *(f"{slope(loss_of, logprob):+.2f}" for logprob in LOGPROBS)] for arm, loss_of in ARMS.items()],
    )
    return [learning, signs]


def experiment(seeds: Sequence[int], quick: bool) -> Page:
    """Both arms on the same seeds."""
    updates = UPDATES // 10 if quick else UPDATES
    curves, warm = (
        {arm: np.stack([learn(loss_of, seed, updates, start=start) for seed in seeds]) for arm, loss_of in ARMS.items()}
        for start in (CHANCE, WARM_START)
    )
    ends, warm_ends = ({arm: runs[:, -1] for arm, runs in each.items()} for each in (curves, warm))
    ours, theirs = ends.values()
    shown = np.linspace(0, updates - 1, min(POINTS, updates)).astype(int)
    return Page(
        name="E7",
        title="the masked ratio inside the graph, and detached",
        claim=Claim(
            "The loss -f(x) A log pi is a policy gradient only if f(x), the masked ratio, is a number: differentiated "
            "too, it gives x A (1 + log pi), of the wrong sign for every token less probable than 1/e.",
            "own, of arXiv 2607.07508 eq. 1-3 differentiated as printed",
        ),
        setting=f"A bandit of {NUM_CONTEXTS} contexts with one right action of {NUM_ACTIONS} each; a table of logits, "
        f"Adam at {LEARNING_RATE}, batches of {BATCH}, {updates} updates; rollouts of a policy up to {LAG - 1} updates "
        f"old; advantage = reward minus a running mean; eps_low {EPS_LOW}, eps_high {EPS_HIGH}. The detached arm is "
        "`policy_trainer.losses.dis.dis_loss`; both see the same seeds.",
        tables=_tables(curves),
        checks=_checks(ends, warm_ends),
        sentence=f"From chance, {CHANCE:g}, the detached coefficient learns to {np.median(ours):.3f}, the one in the "
        f"graph unlearns to {np.median(theirs):.4f} (medians of {len(seeds)} seeds).",
        panels=[
            Panel(
                "Eight actions, one is right",
                "update",
                "probability of the right action",
                [Line(arm, (shown + 1).tolist(), runs[:, shown]) for arm, runs in curves.items()],
                y_range=(0.0, 1.02),
            )
        ],
        notes=[
            "A sample of a rare wrong action has a negative advantage and a log-probability below -1: in the graph it "
            "makes that action likelier. So the warm-started policy is lost as well, only later.",
            "In CI, `tests/unit/policy_trainer/losses/test_dis.py` holds the gradient of a single token, and "
            "`test_dis_detached.py` beside it that a bandit is learned, and is not without `detach`.",
        ],
    )


if __name__ == "__main__":
    run(__doc__, [experiment], command="python -m benchmarks.evidence.detached_ratio", num_seeds=5)
