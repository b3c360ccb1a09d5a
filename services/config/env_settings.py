"""What may be wrong with `[env.reward]` and `prefix_file` of an `[[env]]`, and where its shaped rewards lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.config.orchestrator import EnvConfig, RewardConfig
from services.config.tasks import RESTORABLE, REWARD_RANGES, TASK_ARGS
from services.config.toml_lines import KeyPath

EnvProblem = tuple[KeyPath, str, str, tuple[KeyPath, ...]]
"""Path, what is wrong, the fix, and further paths that were read."""

ROUNDING = 1e-9
"""By so much a range of rewards may be exceeded: sums of decimal fractions are not exact."""


def shaped_range(env: EnvConfig) -> tuple[float, float] | None:
    """Where the shaped rewards of an environment lie; None where the environment does not say where its own do."""
    bounds = REWARD_RANGES.get(env.type)
    return None if bounds is None else env.reward.range_of(*bounds, env.max_sampled_tokens)


def shaping_keys(index: int) -> tuple[KeyPath, ...]:
    """What `shaped_range` of the environment at `index` depends on."""
    limits = ("type", "max_turns", "max_turn_tokens", "max_trace_tokens")
    return *(("env", index, key) for key in limits), *(
        ("env", index, "reward", key) for key in RewardConfig.model_fields
    )


def reward_problems(index: int, env: EnvConfig, *, unit_interval_for: str | None) -> Iterator[EnvProblem]:
    """What is wrong with the keys of `[env.reward]`.

    Args:
        index: Of the environment.
        env: The environment.
        unit_interval_for: Name of the algorithm where it needs rewards within [0, 1].
    """
    reward, key = env.reward, ("env", index, "reward")
    limit_key, buffer_key = (*key, "overlong_limit_tokens"), (*key, "overlong_buffer_tokens")
    limit, buffer = reward.overlong_limit_tokens, reward.overlong_buffer_tokens
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        what = f"[{reward.clip[0]:g}, {reward.clip[1]:g}] is no range"
        yield (*key, "clip"), what, "give [low, high] with low below high", ()
    if (limit is None) != (buffer is None):
        given, missing = (limit_key, buffer_key) if buffer is None else (buffer_key, limit_key)
        yield given, "is half of the overlong punishment", f"give {missing[-1]} too, or delete it", (missing,)
    elif limit is not None and buffer is not None and buffer > limit:
        what = f"{buffer} is more than overlong_limit_tokens = {limit}"
        yield buffer_key, what, f"give at most {limit}", (limit_key,)
    elif limit is not None and buffer is not None and limit - buffer >= env.max_sampled_tokens:
        what = f"no rollout of at most {env.max_sampled_tokens} sampled tokens passes {limit} - {buffer}"
        yield limit_key, what, "lower it, or raise the limits of the environment", shaping_keys(index)
    shaped = shaped_range(env)
    if unit_interval_for is not None and shaped is not None and (shaped[0] < -ROUNDING or shaped[1] > 1 + ROUNDING):
        what = f"{unit_interval_for} needs rewards within [0, 1], and shaped ones lie in [{shaped[0]:g}, {shaped[1]:g}]"
        yield key, what, "add clip = [0.0, 1.0]", (("algorithm", "type"), *shaping_keys(index))


def prefix_problems(index: int, env: EnvConfig) -> Iterator[EnvProblem]:
    """Whether recorded traces can be continued; their rows are read, and refused by line, where they are used.

    Args:
        index: Of the environment.
        env: The environment.
    """
    key, kind = ("env", index, "prefix_file"), (("env", index, "type"),)
    if env.prefix_file is None:
        if env.prefix_cut != "entropy":
            what, fix = "there is no recorded trace to cut", "give a prefix_file, or delete it"
            yield ("env", index, "prefix_cut"), what, fix, (key,)
    elif env.type not in RESTORABLE and env.type in TASK_ARGS:
        what = f"{env.type} cannot be brought into the middle of an episode"
        yield key, what, f"delete it, or choose type = {', '.join(sorted(RESTORABLE))}", kind
    elif not Path(env.prefix_file).is_file():
        yield key, f"there is no file {env.prefix_file}", "give a JSON lines file, or delete it", kind
