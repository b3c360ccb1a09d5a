"""What a run is, as far as a commit of it is concerned: kept in COMMIT.json, compared by whoever resumes."""

from __future__ import annotations

from typing import Any

from services.config.schema import Config


def identity_of(config: Config) -> dict[str, Any]:
    """Facts that a resumed run must agree with, as JSON can hold them; layouts, losses and lengths may change.

    Returns:
        Keys are dotted as in the configuration.
    """
    return {
        "seed": config.seed,
        "model.path": config.model.path,
        "algorithm.type": config.algorithm.type,
        "orchestrator.batch_size": config.orchestrator.batch_size,
        "orchestrator.group_size": config.orchestrator.group_size,
        "env": [env.type for env in config.env],
        "value": config.value is not None,
        "value.warmup.critic_only_steps": config.value.warmup.critic_only_steps if config.value else 0,
    }
