"""Credit assignment: one page per algorithm, and the registry that names them.

Notable:
- A new algorithm is a config class in `services/config/algorithm.py`, a page here, and one line in ALGORITHMS.
"""

from __future__ import annotations

from typing import Any

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.evpo import Evpo
from orchestrator.algorithms.grpo import Grpo
from orchestrator.algorithms.ppo import Ppo
from orchestrator.algorithms.running_mean import RunningMean
from orchestrator.algorithms.sao import Sao
from orchestrator.algorithms.spo import Spo
from orchestrator.algorithms.vapo import Vapo
from services.config.algorithm import AlgorithmFacts
from services.wire.errors import ConfigError

ALGORITHMS: dict[str, type] = {
    "evpo": Evpo,
    "grpo": Grpo,
    "ppo": Ppo,
    "running_mean": RunningMean,
    "sao": Sao,
    "spo": Spo,
    "vapo": Vapo,
}


def build(config: AlgorithmFacts) -> Algorithm:
    """Make the algorithm a configuration names.

    Args:
        config: One of the classes of `services.config.algorithm`; its `type` is the name.

    Returns:
        The algorithm, holding `config`.

    Raises:
        ConfigError: the name is not in ALGORITHMS, or the algorithm refuses its settings.
    """
    name: Any = getattr(config, "type", None)
    if name not in ALGORITHMS:
        raise ConfigError([f"algorithm.type: unknown algorithm {name!r}; known: {', '.join(ALGORITHMS)}"])
    return ALGORITHMS[name](config)


__all__ = ["ALGORITHMS", "Algorithm", "build"]
