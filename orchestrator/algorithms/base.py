"""What an algorithm is to the loop, and what all of them do before and after they assign credit.

Notable:
- An algorithm credits samples and nothing else: it opens no socket, keeps no clock and knows no trainer.
- Filters act on `policy_loss_mask` alone: the critic trains on every group, also on those that are all right or all
  wrong.
- The order is fixed: filter groups, assign, agree on shared nodes, whiten over what still trains, prune zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from orchestrator.algorithms.credit import credit_metrics
from orchestrator.algorithms.filters import filter_equal_rewards, prune_zero_advantages
from orchestrator.algorithms.shared_nodes import average_shared_nodes
from orchestrator.algorithms.whiten import whiten_samples
from services.config.algorithm import AlgorithmFacts
from services.wire.errors import ConfigError
from services.wire.samples import TrainingSample


class Algorithm(ABC):
    """Turns rewards and values into advantages (for the policy) and value targets (for the critic)."""

    def __init__(self, config: AlgorithmFacts) -> None:
        """Keep the facts that all algorithms share.

        Args:
            config: One of the classes of `services.config.algorithm`.

        Raises:
            ConfigError: a cut trace shall be worth what the critic says, but there is none.
        """
        if config.truncation == "bootstrap" and not config.needs_value:
            name = getattr(config, "type", "it")
            raise ConfigError([f'algorithm.truncation = "bootstrap" needs a critic; {name} has none: use "terminal"'])
        self._facts = config
        self._whitens = bool(getattr(config, "whiten", False))

    def credit(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """Fill `advantages`, `policy_loss_mask` and, with a critic, `returns` and `value_loss_mask` in place.

        Args:
            groups: The batch, in order of completion; each group holds all samples (branches) of one prompt's traces.

        Returns:
            Metrics of the batch, by name; those about advantages describe them before whitening.

        Raises:
            NonFiniteError: a reward or value is not finite.
            ContractError: a sample was never scored where there is a critic.
            ValueError: a group that the algorithm cannot credit.
        """
        samples = [sample for group in groups for sample in group]
        for sample in samples:
            sample.policy_loss_mask = sample.value_loss_mask = None
        metrics: dict[str, float] = {}
        if self._facts.filter_equal_rewards:
            metrics["credit/filtered_groups"] = float(filter_equal_rewards(groups))
        metrics |= self._assign(groups)
        if self._facts.shared_nodes == "mean":
            average_shared_nodes(samples)
        metrics |= credit_metrics(samples)
        if self._whitens:
            whiten_samples(samples)
        if self._facts.prune_zero_advantages:
            metrics["credit/pruned_tokens"] = float(prune_zero_advantages(samples))
        return metrics

    def credit_policy_again(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """`credit` after the values have changed: targets and the critic's mask stay as the critic got them.

        Args:
            groups: A batch that was credited once. The algorithm must keep no state: it would count the batch twice.

        Returns:
            See `credit`; so are the errors.
        """
        samples = [sample for group in groups for sample in group]
        kept = [(sample.returns, sample.value_loss_mask) for sample in samples]
        metrics = self.credit(groups)
        for sample, (returns, mask) in zip(samples, kept, strict=True):
            sample.returns, sample.value_loss_mask = returns, mask
        return metrics

    def prompt_weight(self) -> Callable[[str], float] | None:
        """How often a prompt shall come, by its id, relative to the others; None = every prompt once an epoch.

        Returns:
            A function of what is known when it is called, with values in (0, 1].
        """
        return None

    @abstractmethod
    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        """Fill `advantages`, and `returns` with a critic; return the algorithm's own metrics."""

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers between batches, as JSON can hold it; empty for most."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an algorithm with the same settings.

        Raises:
            ValueError: a state that this algorithm did not write.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {', '.join(state)}")
