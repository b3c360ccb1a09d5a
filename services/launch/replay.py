"""`counterpoint replay RUN_DIR`: train again from a run's recorded rollouts, without inference.

Notable:
- The configuration is the recorded run's with settings on top. What made the rollouts cannot change: each such key is
  an error with its reason. Everything after them can: algorithm, losses, critic, optimizers, layouts.
- Another `algorithm.type` or `value.loss.type` begins from its own defaults, not from the other one's constants.
- The recorded run's folder is only read; the replay has one of its own, by default with the suffix `-replay`.
- A replay is committed and resumed as any run: same data, same bits, as if it had never been interrupted.
- Evaluations need an engine: there are none. Ports that the recorded run fixes are chosen anew: both can run at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.config.deployment_checks import CRITIC_KEYS, beyond_this_machine
from services.config.ports import PORT_KEYS, fixed_ports
from services.config.resolve import resolve
from services.config.schema import Config, load_resolved
from services.launch.planner import plan
from services.launch.resume import resume_run
from services.launch.supervisor import View, supervise
from services.runtime.records import RecordedStep, open_record, why_it_ends
from services.wire.errors import ConfigError, UsageError

SUFFIX = "-replay"
_CONFIG = "config.resolved.toml"
_FIXED: dict[tuple[str, ...], str] = {
    ("model", "path"): "the record holds token ids of its tokenizer, and log-probabilities of its first weights",
    ("env",): "the record holds what these environments said",
    ("orchestrator", "batch_size"): "batches were made up as they were recorded",
    ("orchestrator", "group_size"): "groups were rolled out as they were recorded",
    ("orchestrator", "temperature"): "recorded log-probabilities are those at this temperature",
}
"""What cannot change, and why."""


def replay(
    source: Path,
    overrides: Sequence[tuple[str, str]],
    view: View,
    *,
    overwrite: bool = False,
    resume: bool = False,
    allow_fallback: bool = False,
) -> tuple[int, Config]:
    """Carry out a replay.

    Args:
        source: The recorded run's directory.
        overrides: Settings on top of its configuration.
        view: Shows progress.
        overwrite: Remove an earlier replay in the same directory.
        resume: Go on from the last commit of an earlier replay in the same directory.
        allow_fallback: Where that commit is damaged, take the one before it.

    Returns:
        The exit code, and the replay's configuration.

    Raises:
        UsageError: `source` is no run directory.
        ConfigError: It has no record, or the settings do not fit it.
    """
    source = source.resolve()
    config = replay_config(source, overrides)
    lay_out = partial(plan, replay_of=source)
    if resume:
        return resume_run(config, view, lay_out=lay_out, allow_fallback=allow_fallback), config
    return supervise(config, view, overwrite=overwrite, lay_out=lay_out), config


def replay_config(source: Path, overrides: Sequence[tuple[str, str]]) -> Config:
    """The configuration of a replay.

    Args:
        source: The recorded run's directory, absolute.
        overrides: Settings on top of its configuration.

    Raises:
        UsageError: `source` is no run directory.
        ConfigError: It has no record, or the settings do not fit it; every problem at once.
        CodecError: A file of the record is damaged.
    """
    path = source / _CONFIG
    if not path.is_file():
        raise UsageError(f"{source} is not a run directory (it has no {_CONFIG})")
    recorded, steps = load_resolved(path), open_record(source / "rollouts")
    if not steps:
        what = "holds no recorded rollouts" + _because(source)
        raise ConfigError([f"{source}: {what}; fix: replay a run that had run.record = true"])
    config = resolve([path], [*_implied(recorded, source, len(steps), dict(overrides)), *overrides]).config
    problems = [
        *beyond_this_machine(config),
        *_changed(recorded, config),
        *_beyond(source, config, steps),
        *_too_small(config, steps),
    ]
    if Path(config.run.dir).resolve() == source:
        problems.append(f"run.dir: {source} is the recorded run; fix: choose another directory")
    if problems:
        raise ConfigError(problems)
    return config


def _implied(recorded: Config, source: Path, num_steps: int, given: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Settings that come before those that were given."""
    yield "run.dir", str(source.with_name(source.name + SUFFIX))
    yield "run.record", "false"
    yield "eval", "none"
    yield "orchestrator.max_steps", str(min(recorded.orchestrator.max_steps, num_steps))
    for name in fixed_ports(recorded):
        yield ".".join(map(str, PORT_KEYS[name])), "none"
    if given.get("algorithm.type", recorded.algorithm.type) != recorded.algorithm.type:
        yield "algorithm", "none"
    if recorded.value is None:
        return
    if given.get("value") == "none":
        for key in CRITIC_KEYS:
            yield ".".join(map(str, key)), "none"
        yield "orchestrator.schedule", "none"  # nothing is left to overlap
    elif given.get("value.loss.type", recorded.value.loss.type) != recorded.value.loss.type:
        yield "value.loss", "none"


def _changed(recorded: Config, config: Config) -> Iterator[str]:
    for key, why in _FIXED.items():
        before, after = (_at(each.model_dump(mode="json"), key) for each in (recorded, config))
        if before != after:
            shown = f"{after!r} is not the record's {before!r}" if not isinstance(before, list) else "it differs"
            yield f"{'.'.join(key)}: {shown}: {why}; fix: delete the setting"


def _at(data: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        data = data[part]
    return data


def _beyond(source: Path, config: Config, steps: list[RecordedStep]) -> Iterator[str]:
    if config.orchestrator.max_steps > len(steps):
        ends = f"the record ends after {len(steps)} steps{_because(source)}"
        yield f"orchestrator.max_steps: {config.orchestrator.max_steps} is too many: {ends}; fix: give {len(steps)}"


def _too_small(config: Config, steps: list[RecordedStep]) -> Iterator[str]:
    """A group may have lost traces, down to what the recorded run's algorithm needs."""
    least = config.algorithm.min_group
    for step, recorded in enumerate(steps[: config.orchestrator.max_steps]):
        smallest = min(entry.num_traces for entry in recorded.header.groups)
        if smallest < least:
            what = f"{config.algorithm.type} needs groups of {least}, step {step} of the record has one of {smallest}"
            yield f"algorithm.type: {what}; fix: choose another, or give --orchestrator.max_steps {step}"
            return


def _because(source: Path) -> str:
    cause = why_it_ends(source / "rollouts")
    return f" ({cause})" if cause else ""
