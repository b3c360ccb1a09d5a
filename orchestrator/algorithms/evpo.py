"""EVPO: the critic is the baseline where it explains the returns; elsewhere the mean of the group is.

Paper: arXiv 2604.19485 (explained variance of the batch, threshold 0, batch mean).

Notable:
- Explained variance compares Monte-Carlo returns with the values of all loss tokens of the scope, population variances,
  in f64. The values at one common prompt would explain nothing by construction: tokens must differ.
- Strict: explained variance equal to the threshold, up to rounding, takes the mean. So does a scope whose returns do
  not vary, where it is undefined; all its advantages are then 0.
- Explained variance does not see a constant bias of the critic; `value/bias` does.
- The critic trains on every group, whichever baseline was used.

Deviations:
- The default scope is each prompt's group, with the group's mean; `scope = "batch"` is the paper.
- The mean is over traces, of their returns at the first action token: see `groups.py`. Not divided by a deviation.
"""

from __future__ import annotations

import numpy as np

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.credit import assign_credit, bootstrap_value, lambda_metrics, token_rewards
from orchestrator.algorithms.gae import skip_observation_gae
from orchestrator.algorithms.groups import group_advantages, scores_of_traces, spread_over_actions
from services.config.algorithm import EvpoConfig
from services.wire.samples import TrainingSample

RELATIVE_VARIANCE_FLOOR = 1e-12
"""A variance of returns at or below this share of max(1, mean^2) is rounding."""
ROUNDING = 1e-9
"""Explained variance this little above the threshold equals it: a value of the prompt explains 0 up to rounding."""


class Evpo(Algorithm):
    """GAE or a mean, by explained variance."""

    def __init__(self, config: EvpoConfig) -> None:
        super().__init__(config)
        self._config = config

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        scopes = groups if self._config.scope == "group" else [[sample for group in groups for sample in group]]
        scopes = [scope for scope in scopes if scope]
        lambdas: list[float] = []
        num_critic = num_flat = 0
        for scope in scopes:
            returns = [self._credit_by_critic(sample) for sample in scope]  # Monte-Carlo, [T] each
            explained = explained_variance_of(scope, returns)
            num_flat += explained is None
            if explained is not None and explained > self._config.threshold + ROUNDING:
                num_critic += 1
                lambdas += [self._config.lam for sample in scope if sample.branch.action_mask.any()]
            else:
                self._credit_by_mean(scope, returns)
        metrics = lambda_metrics(lambdas) | {"credit/flat_groups": float(num_flat)}
        return metrics | ({"evpo/critic_fraction": num_critic / len(scopes)} if scopes else {})

    def _credit_by_critic(self, sample: TrainingSample) -> np.ndarray:
        """Fill advantages and targets; return the Monte-Carlo returns."""
        config = self._config
        assign_credit(
            sample, gamma=config.gamma, lam=config.lam, value_lambda=config.value_lambda, truncation=config.truncation
        )
        assert sample.values is not None and sample.returns is not None
        if config.value_lambda == 1.0:
            return sample.returns
        return skip_observation_gae(
            sample.values,
            sample.branch.action_mask,
            token_rewards(sample),
            gamma=config.gamma,
            lam=1.0,
            bootstrap_value=bootstrap_value(sample, config.truncation),
        )[1]

    def _credit_by_mean(self, scope: list[TrainingSample], returns: list[np.ndarray]) -> None:
        """Replace the advantages, and only them."""
        pairs = [(s, float(r[s.branch.action_mask][0])) for s, r in zip(scope, returns, strict=True) if _acts(s)]
        members, firsts = [sample for sample, _ in pairs], [first for _, first in pairs]
        num_traces = len(scores_of_traces(members, firsts))
        if self._config.scope == "group" and num_traces < 2:
            name = scope[0].group_id
            raise ValueError(f"group {name} has {num_traces} trace(s); a group baseline needs at least 2")
        for sample, advantage in zip(members, group_advantages(members, firsts), strict=True):
            sample.advantages = spread_over_actions(sample, advantage)


def explained_variance_of(samples: list[TrainingSample], returns: list[np.ndarray]) -> float | None:
    """1 - Var(G - V) / Var(G) over the loss tokens of scored samples, those aside that hold the critic's own value.

    Args:
        samples: Scored and credited samples.
        returns: [T] each.

    Returns:
        At most 1; None where the returns do not vary.
    """
    pairs = [
        (r, s.values, s.branch.loss_mask)
        for s, r in zip(samples, returns, strict=True)
        if s.values is not None and not s.bootstrapped
    ]
    if not pairs:
        return None
    flat = np.concatenate([targets[mask] for targets, _, mask in pairs])
    values = np.concatenate([numbers[mask] for _, numbers, mask in pairs])
    if not len(flat) or float(flat.var()) <= RELATIVE_VARIANCE_FLOOR * max(1.0, float(flat.mean()) ** 2):
        return None
    return 1.0 - float((flat - values).var()) / float(flat.var())


def _acts(sample: TrainingSample) -> bool:
    return bool(sample.branch.action_mask.any())
