"""The environments: one file each, found by name here.

Notable:
- To add one: its settings and texts in `services.config.tasks`, its page here, one line in `ENVIRONMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.environments.add import AddEnvironment
from orchestrator.environments.guess import GuessEnvironment
from orchestrator.environments.prefixed import PrefixedEnvironment
from orchestrator.environments.protocol import Environment, TextTokenizer
from orchestrator.environments.reverse import ReverseEnvironment
from services.config.orchestrator import EnvConfig
from services.config.tasks import problems_of
from services.wire.errors import ConfigError

ENVIRONMENTS: dict[str, Callable[[dict[str, Any], TextTokenizer], Environment]] = {
    "add": AddEnvironment,
    "reverse": ReverseEnvironment,
    "guess": GuessEnvironment,
}


def build(env_type: str, args: dict[str, Any], tokenizer: TextTokenizer) -> Environment:
    """Make an environment.

    Raises:
        ConfigError: an unknown name, or settings the environment does not have; lists the choices.
    """
    problems = problems_of(env_type, args)
    if problems:
        raise ConfigError([f"env: {problem}" for problem in problems])
    return ENVIRONMENTS[env_type](args, tokenizer)


def build_training(config: EnvConfig, tokenizer: TextTokenizer) -> Environment:
    """Make the environment of an `[[env]]`: whole episodes, or continuations of recorded ones.

    Raises:
        ConfigError: see `build` and `PrefixedEnvironment`.
    """
    environment = build(config.type, config.args, tokenizer)
    return environment if config.prefix_file is None else PrefixedEnvironment(environment, config)
