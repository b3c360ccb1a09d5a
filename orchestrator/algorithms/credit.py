"""What every algorithm with a critic shares: where rewards go, what a cut is worth, and GAE with its two lambdas.

Legend: T tokens of a branch.

Notable:
- The outcome reward sits on the last *action* token of each branch: a trace that ends in an observation keeps it.
- The stop reason is data. Only a `truncated_*` trace may bootstrap, and only where the configuration says so; its
  targets are then partly the critic's own, which is marked for whoever measures the critic by them.
- One lambda for the policy's advantages, another for the critic's targets, in one pass over the values.
- The arrays of a batch are rows of one: they live as long as any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from orchestrator.algorithms.steps import last_tokens, num_transitions, step_gae
from services.config.algorithm import GaeKeys, Granularity, Truncation
from services.wire.errors import ContractError, NonFiniteError
from services.wire.samples import StopReason, TrainingSample

TRUNCATED = (StopReason.TRUNCATED_LENGTH, StopReason.TRUNCATED_TURNS)


def token_rewards(sample: TrainingSample) -> np.ndarray:
    """Rewards per token: the outcome on the last action token, plus step rewards where there are any.

    Args:
        sample: A sample; a branch without action tokens carries no reward.

    Returns:
        [T] f64, a new array.

    Raises:
        NonFiniteError: the outcome reward is not a finite number.
        ValueError: a step reward off the action mask.
    """
    if not np.isfinite(sample.reward):
        raise NonFiniteError(f"trace {sample.trace_id}: reward is {sample.reward}")
    branch = sample.branch
    rewards = np.zeros(sample.num_tokens)  # [T]
    if branch.step_rewards is not None:
        if (np.asarray(branch.step_rewards)[~branch.action_mask] != 0).any():
            raise ValueError(f"trace {sample.trace_id}: step_rewards holds a reward off the action mask")
        rewards += branch.step_rewards
    action_positions = np.flatnonzero(branch.action_mask)
    if len(action_positions):
        rewards[action_positions[-1]] += sample.reward
    return rewards


def bootstrap_value(sample: TrainingSample, truncation: Truncation) -> float:
    """Value of the state after the last token, as the targets count it.

    Args:
        sample: A scored sample.
        truncation: "terminal": a cut trace is worth its reward alone; "bootstrap": plus the critic's value at the cut.

    Returns:
        The critic's output at the last position for a truncated sample under "bootstrap", else 0.
    """
    return sample.bootstrap_value if _bootstraps(sample, truncation) else 0.0


def _bootstraps(sample: TrainingSample, truncation: Truncation) -> bool:
    return truncation == "bootstrap" and sample.stop_reason in TRUNCATED


def assign_credit(
    sample: TrainingSample,
    *,
    gamma: float,
    lam: float,
    value_lambda: float,
    truncation: Truncation,
    granularity: Granularity = "token",
    out: np.ndarray | None = None,
) -> None:
    """Fill `sample.advantages` with lambda `lam` and `sample.returns` with lambda `value_lambda`.

    And `sample.bootstrapped`: whether the critic's value at the cut went into them. With "step_last" also
    `sample.value_loss_mask`: the critic then trains on the last token of each step.

    Args:
        sample: A scored sample; its other fields stay as they are.
        gamma: Discount per transition.
        lam: GAE lambda of the policy's advantages.
        value_lambda: Lambda of the critic's targets.
        truncation: See `bootstrap_value`.
        granularity: What one transition is.
        out: [2, T] f64 whose rows advantages and returns become; None: a new array.

    Raises:
        ContractError: the sample was never scored.
        NonFiniteError: the reward, a value on an action token or the bootstrap value is not finite.
    """
    if sample.values is None:
        raise ContractError(f"trace {sample.trace_id}: values are missing, the sample was never scored")
    mask = sample.branch.action_mask
    sample.bootstrapped = _bootstraps(sample, truncation)
    bootstrap = bootstrap_value(sample, truncation)
    if not (np.isfinite(sample.values[mask]).all() and np.isfinite(bootstrap)):
        raise NonFiniteError(f"trace {sample.trace_id}: values hold a non-finite number")
    sample.advantages, sample.returns = step_gae(
        sample.values,
        mask,
        token_rewards(sample),
        granularity=granularity,
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap,
        value_lambda=value_lambda,
        out=out,
    )
    if granularity == "step_last":
        sample.value_loss_mask = sample.branch.loss_mask & last_tokens(mask)


def assign_gae(samples: Iterable[TrainingSample], config: GaeKeys, lam_of: Callable[[int], float]) -> dict[str, float]:
    """Credit every sample of a batch by GAE.

    Args:
        samples: Scored samples.
        config: Discount, target lambda, truncation and granularity.
        lam_of: The policy's lambda, given the number of transitions of a branch.

    Returns:
        `lambda_metrics` of the branches that have a transition.

    Raises:
        ContractError: a sample was never scored.
        NonFiniteError: a reward or value is not finite.
    """
    samples = list(samples)
    ends = np.cumsum([sample.num_tokens for sample in samples])
    # One array for the batch: fresh pages for each sample by itself would cost more than the arithmetic.
    whole = np.empty((2, ends[-1] if len(ends) else 0))
    lambdas: list[float] = []
    for sample, end in zip(samples, ends, strict=True):
        num = num_transitions(sample.branch.action_mask, config.granularity)
        lam = lam_of(num)
        if num:
            lambdas.append(lam)
        assign_credit(
            sample,
            gamma=config.gamma,
            lam=lam,
            value_lambda=config.value_lambda,
            truncation=config.truncation,
            granularity=config.granularity,
            out=whole[:, end - sample.num_tokens : end],
        )
    return lambda_metrics(lambdas)


def credit_metrics(samples: Iterable[TrainingSample]) -> dict[str, float]:
    """Facts about a credited batch; means are over action tokens, counts over samples.

    Args:
        samples: Samples whose advantages are filled.

    Returns:
        `credit/*` metrics; means are absent where the batch has no action token.
    """
    samples = list(samples)
    advantages: list[np.ndarray] = []
    returns: list[np.ndarray] = []
    for sample in samples:
        mask = sample.branch.action_mask
        if sample.advantages is not None:
            advantages.append(sample.advantages[mask])
        if sample.returns is not None:
            returns.append(sample.returns[mask])
    num_tokens = sum(len(array) for array in advantages)
    metrics = {
        "credit/action_tokens": float(num_tokens),
        "credit/empty_samples": float(sum(not sample.branch.action_mask.any() for sample in samples)),
        "credit/truncated_samples": float(sum(sample.stop_reason in TRUNCATED for sample in samples)),
    }
    if num_tokens:
        flat = np.concatenate(advantages)
        metrics["credit/advantage_mean"] = float(flat.mean())
        metrics["credit/advantage_abs_mean"] = float(np.abs(flat).mean())
        metrics |= _failed_to_successful(samples)
    if sum(len(array) for array in returns):
        metrics["credit/return_mean"] = float(np.concatenate(returns).mean())
    return metrics


def _failed_to_successful(samples: list[TrainingSample]) -> dict[str, float]:
    """Mean |advantage| a token of failed traces over that of successful ones (arXiv 2608.02181); {} without both.

    Successful is a reward above the middle between the batch's lowest and highest.
    """
    sizes = [
        (sample.reward, np.abs(sample.advantages[sample.branch.action_mask]))
        for sample in samples
        if sample.advantages is not None and sample.branch.action_mask.any()
    ]
    rewards = [reward for reward, _ in sizes]
    middle = (min(rewards) + max(rewards)) / 2
    means = []
    for is_successful in (False, True):
        own = [size for reward, size in sizes if (reward > middle) == is_successful]
        if not own:
            return {}
        means.append(float(np.concatenate(own).mean()))
    return {"credit/advantage_abs_ratio": means[0] / means[1]} if means[1] > 0 else {}


def lambda_metrics(lambdas: list[float]) -> dict[str, float]:
    """Mean, least and greatest policy lambda over the branches that have one.

    Args:
        lambdas: One per branch with action tokens.

    Returns:
        `credit/lambda_{mean,min,max}`; empty for an empty list.
    """
    if not lambdas:
        return {}
    return {
        "credit/lambda_mean": float(np.mean(lambdas)),
        "credit/lambda_min": min(lambdas),
        "credit/lambda_max": max(lambdas),
    }
