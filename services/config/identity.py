"""What a run is, as far as a commit of it is concerned: kept in COMMIT.json, compared by whoever resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.config.exported import tokenizer_sha256
from services.config.schema import Config


def identity_of(config: Config, model_dir: Path) -> dict[str, Any]:
    """Facts that a resumed run must agree with, as JSON can hold them; layouts, learning rates and lengths may change.

    Args:
        config: The resolved configuration.
        model_dir: Folder of the run's first model, for its tokenizer.

    Returns:
        Keys are dotted as in the configuration.
    """
    value = config.value
    return {
        "seed": config.seed,
        "model.path": config.model.path,
        "tokenizer": tokenizer_sha256(model_dir)[:16],
        "algorithm.type": config.algorithm.type,
        "orchestrator.batch_size": config.orchestrator.batch_size,
        "orchestrator.group_size": config.orchestrator.group_size,
        "env": [env.type for env in config.env],
        "value": value is not None,
        "value.loss": value.loss.model_dump(mode="json", exclude={"clip"}) if value is not None else None,
        "value.warmup.critic_only_steps": value.warmup.critic_only_steps if value is not None else 0,
        "policy.lora": _adapter(config.policy.lora),
        "value.lora": _adapter(value.lora) if value is not None else None,
    }


def _adapter(lora: Any) -> dict[str, Any] | None:
    return None if lora is None else {"rank": lora.rank, "targets": list(lora.targets)}
