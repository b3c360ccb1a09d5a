"""Cross-checks: what no single section can know.

Notable:
- Each check names every path it reads; none speaks about a value that was itself broken.
- What is about sizes and nodes is in `deployment_checks.py`, what is about this machine in `machine_checks.py`.
- Nothing is changed anywhere: files and folders are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from services.config.algorithm import EitherLossKeys, SpoConfig
from services.config.checkpoint import checkpoint_problems
from services.config.deployment_checks import deployment_findings
from services.config.env_settings import ROUNDING, prefix_problems, reward_problems, shaped_range, shaping_keys
from services.config.exported import init_from_problems, policy_problem
from services.config.finding import Finding
from services.config.layers import Layers, Problem
from services.config.machine_checks import machine_findings
from services.config.model_path import max_positions, missing_sizes, model_folder, model_problem, other_inputs
from services.config.parts import training_problems
from services.config.schema import Config
from services.config.tasks import problems_of
from services.config.toml_lines import KeyPath, dotted
from services.wire.messages import ROWS_KEPT

_ID_BYTES = 4
"""Of a token id, and of a branch's length, in a scoring request."""


def check(
    config: Config, layers: Layers, broken: set[KeyPath], *, about: Callable[[Finding], bool] = lambda finding: True
) -> list[Problem]:
    """Run all cross-checks.

    Args:
        config: A validated config, possibly with placeholders.
        layers: Knows where each value came from.
        broken: Paths that already have a problem of their own.
        about: Which findings count, where only a part of a run is to start.
    """
    findings = [finding for each in _CHECKS for finding in each(config)]
    return [
        Problem(layers.where(finding.path), finding.path, finding.what, finding.fix)
        for finding in findings
        if about(finding) and not any(_is_broken(path, broken) for path in (finding.path, *finding.reads))
    ]


def _critic(config: Config) -> Iterator[Finding]:
    algorithm = config.algorithm
    if algorithm.needs_value and config.value is None:
        fix = "add a [value] table or choose algorithm.type = grpo, running_mean or spo"
        yield Finding(
            ("algorithm", "type"), f"{algorithm.type} needs a critic, but there is no [value]", fix, (("value",),)
        )
    if not algorithm.needs_value and config.value is not None:
        fix = "delete [value] or choose algorithm.type = sao, ppo, vapo or evpo"
        yield Finding(("value",), f"{algorithm.type} has no use for a critic", fix, (("algorithm", "type"),))
    if not algorithm.needs_value and algorithm.truncation == "bootstrap":
        what = f"{algorithm.type} has no critic to bootstrap a cut trace from"
        yield Finding(("algorithm", "truncation"), what, 'delete it, or give "terminal"', (("algorithm", "type"),))


def _algorithm(config: Config) -> Iterator[Finding]:
    algorithm, kind = config.algorithm, (("algorithm", "type"),)
    if algorithm.filter_equal_rewards and config.orchestrator.group_size < 2:
        what = "a group of one trace has nothing to be equal to"
        fix = "delete it, or raise orchestrator.group_size"
        yield Finding(("algorithm", "filter_equal_rewards"), what, fix, (*kind, ("orchestrator", "group_size")))
    if isinstance(algorithm, EitherLossKeys):
        loss = (*kind, ("algorithm", "loss"))
        if algorithm.loss == "dis" and algorithm.dual_clip is not None:
            what = 'the double-sided mask of algorithm.loss = "dis" has no dual clip'
            yield Finding(("algorithm", "dual_clip"), what, 'delete it, or give algorithm.loss = "ppo_clip"', loss)
        if algorithm.loss == "ppo_clip" and algorithm.eps_low is not None and algorithm.eps_low >= 1:
            what = f"{algorithm.eps_low:g} leaves the clipped ratio no lower bound"
            yield Finding(("algorithm", "eps_low"), what, 'give less than 1, or algorithm.loss = "dis"', loss)
    if isinstance(algorithm, SpoConfig):
        if algorithm.rho_low > algorithm.rho_high:
            what = f"{algorithm.rho_low:g} is more than algorithm.rho_high = {algorithm.rho_high:g}"
            yield Finding(("algorithm", "rho_low"), what, "give less", (*kind, ("algorithm", "rho_high")))
        if algorithm.prior_file is not None and not Path(algorithm.prior_file).is_file():
            what = f"there is no file {algorithm.prior_file}"
            yield Finding(("algorithm", "prior_file"), what, "give a JSON lines file, or delete it", kind)


def _batch(config: Config) -> Iterator[Finding]:
    orchestrator, group = config.orchestrator, config.orchestrator.group_size
    group_key, batch_key = ("orchestrator", "group_size"), ("orchestrator", "batch_size")
    least = config.algorithm.min_group
    if group < least:
        what, fix = f"{group} is too small for {config.algorithm.type}", f"give at least {least}"
        if config.algorithm.type == "evpo":
            what, fix = f'{what} with scope "group"', f'{fix}, or algorithm.scope = "batch"'
        yield Finding(group_key, what, fix, (("algorithm", "type"), ("algorithm", "scope")))
    if orchestrator.batch_size % group:
        up = -(-orchestrator.batch_size // group) * group
        what = f"{orchestrator.batch_size} is not a multiple of orchestrator.group_size = {group}"
        yield Finding(batch_key, what, f"give {up}, or another group size", (group_key,))
    num_groups = orchestrator.batch_size // group
    for name, role in (("policy", config.policy), ("value", config.value)):
        if role is not None and role.mini_batches > max(1, num_groups):
            what = f"{role.mini_batches} mini-batches of whole groups, but a batch has {num_groups} groups"
            yield Finding((name, "mini_batches"), what, f"give at most {num_groups}", (group_key, batch_key))
    if orchestrator.max_concurrent_rollouts < group:
        what = f"{orchestrator.max_concurrent_rollouts} is less than one group of {group}"
        key = ("orchestrator", "max_concurrent_rollouts")
        yield Finding(key, what, f"give at least {group}", (group_key,))


def _lengths(config: Config) -> Iterator[Finding]:
    engine_key, engine_limit = ("inference", "max_model_len"), config.inference.max_model_len
    limits: list[tuple[KeyPath, int]] = [
        (engine_key, engine_limit),
        (("policy", "model", "seq_len"), config.policy.model.seq_len),
    ]
    if config.value is not None:
        limits.append((("value", "model", "seq_len"), config.value.model.seq_len))
    for name, sections, bounds in (("env", config.env, limits), ("eval", config.eval, limits[:1])):
        for index, section in enumerate(sections):
            key = (name, index, "max_trace_tokens")
            for path, limit in bounds:
                if section.max_trace_tokens > limit:
                    what = f"{section.max_trace_tokens} tokens do not fit {dotted(path)} = {limit}"
                    yield Finding(key, what, f"lower it to {limit}, or raise {dotted(path)}", (path,))
            if section.max_turn_tokens >= section.max_trace_tokens:
                what = f"{section.max_turn_tokens} leaves no room for a prompt in max_trace_tokens"
                fix = f"give less than {section.max_trace_tokens}"
                yield Finding((name, index, "max_turn_tokens"), what, fix, (key,))
    positions = max_positions(config.model.path)
    if positions is not None and engine_limit > positions:
        what = f"{engine_limit} is more than the model's {positions} positions"
        yield Finding(engine_key, what, f"give at most {positions}", (("model", "path"),))


def _scoring(config: Config) -> Iterator[Finding]:
    """One request scores a whole group: at least a branch a trace, each as long as a trace may get."""
    if config.value is None:
        return
    group, longest = config.orchestrator.group_size, max(env.max_trace_tokens for env in config.env)
    needed = {
        "max_request_branches": (group, "branches"),
        "max_request_tokens": (group * longest, "tokens"),
        "max_request_bytes": (_ID_BYTES * group * (longest + 1), "bytes"),
    }
    for name, (least, unit) in needed.items():
        limit = getattr(config.value, name)
        if limit < least:
            what = f"{limit} is less than a group's one request may hold: {group} traces, {least} {unit}"
            reads = (("orchestrator", "group_size"), *(("env", i, "max_trace_tokens") for i in range(len(config.env))))
            yield Finding(("value", name), what, f"give at least {least}", reads)


def _schedule(config: Config) -> Iterator[Finding]:
    orchestrator, key = config.orchestrator, ("orchestrator", "schedule")
    if orchestrator.schedule != "overlap":
        return
    if config.value is None:
        if not config.algorithm.needs_value:
            what = "there is no [value], so there is nothing to overlap"
            yield Finding(key, what, "delete it", (("value",), ("algorithm", "type")))
        return
    if config.value.refresh == "refreshed":
        what = '"refreshed" needs the critic\'s update, which orchestrator.schedule = "overlap" does not wait for'
        fix = 'give "pre_update", or orchestrator.schedule = "critic_first"'
        yield Finding(("value", "refresh"), what, fix, (key,))
    if orchestrator.max_critic_lag >= ROWS_KEPT:
        what = f"{orchestrator.max_critic_lag} is too far behind: the critic keeps the metrics of {ROWS_KEPT} steps"
        yield Finding(("orchestrator", "max_critic_lag"), what, f"give at most {ROWS_KEPT - 1}", (key,))


def _tasks(config: Config) -> Iterator[Finding]:
    for name, sections in (("env", config.env), ("eval", config.eval)):
        for index, section in enumerate(sections):
            for problem in problems_of(section.type, section.args):
                key, _, what = problem.partition(": ")
                main, _, choices = what.partition(" (")
                main, _, named = main.partition("; ")
                fix = named or (f"use the {choices.rstrip(')')}" if choices else "see the environment's settings")
                path = (name, index, *key.split("."))
                yield Finding(path, main, fix, ((name, index, "type"),))


def _value_range(config: Config) -> Iterator[Finding]:
    """Returns of a known environment must lie within a classification critic's range (gamma draws them towards 0)."""
    if config.value is None or config.value.loss.type == "mse":
        return
    key, (low, high) = ("value", "loss", "range"), config.value.loss.range
    if low >= high:
        yield Finding(key, f"[{low:g}, {high:g}] is no range", "give [low, high] with low below high")
        return
    for index, env in enumerate(config.env):
        bounds = shaped_range(env)
        if bounds is not None:
            least, most = bounds
            if getattr(config.algorithm, "gamma", 1.0) < 1.0:
                least, most = min(least, 0.0), max(most, 0.0)
            if least < low - ROUNDING or most > high + ROUNDING:
                what = (
                    f"returns of env[{index}] ({env.type}) lie in [{least:g}, {most:g}], not within [{low:g}, {high:g}]"
                )
                fix = f"give [{min(least, low):g}, {max(most, high):g}]"
                yield Finding(key, what, fix, (*shaping_keys(index), ("algorithm", "gamma")))


def _environments(config: Config) -> Iterator[Finding]:
    unit_interval_for = "spo" if isinstance(config.algorithm, SpoConfig) else None
    for index, env in enumerate(config.env):
        problems = reward_problems(index, env, unit_interval_for=unit_interval_for)
        for path, what, fix, reads in (*problems, *prefix_problems(index, env)):
            yield Finding(path, what, fix, reads)


def _policy_loss(config: Config) -> Iterator[Finding]:
    policy, key = config.policy, ("policy", "denominator_tokens")
    if policy.denominator == "constant" and policy.denominator_tokens is None:
        fix = "give a sample's tokens, say the longest answer"
        yield Finding(key, 'policy.denominator = "constant" needs it', fix, (("policy", "denominator"),))
    if policy.denominator != "constant" and policy.denominator_tokens is not None:
        fix = 'delete it, or give policy.denominator = "constant"'
        yield Finding(
            key, f'policy.denominator = "{policy.denominator}" has no use for it', fix, (("policy", "denominator"),)
        )
    if policy.kl.level == "reward":
        what = "rewards cannot hold a KL penalty: the critic trains on them before the policy trainer has seen a token"
        yield Finding(("policy", "kl", "level"), what, "delete it: the penalty belongs into the loss")
    if policy.old_logprobs == "recomputed" and config.algorithm.policy_loss == "dis":
        what = f"{config.algorithm.type} masks by the ratio to the rollout itself (arXiv 2607.07508, eq. 1)"
        yield Finding(("policy", "old_logprobs"), what, 'give "rollout"', (("algorithm", "type"),))
    elif policy.old_logprobs == "recomputed" and config.orchestrator.max_off_policy_steps:
        off = f"orchestrator.max_off_policy_steps = {config.orchestrator.max_off_policy_steps}"
        what = (
            f"with {off} the sampler is behind, and a ratio to the trainer's own log-probabilities corrects none of it"
        )
        reads = (("orchestrator", "max_off_policy_steps"), ("algorithm", "type"), ("algorithm", "loss"))
        yield Finding(("policy", "old_logprobs"), what, 'give "rollout", or max_off_policy_steps = 0', reads)


def _trained(config: Config) -> Iterator[Finding]:
    for role, section in (("policy", config.policy), ("value", config.value)):
        if section is not None:
            for path, what, fix, reads in training_problems(role, section, config.model.path):
                yield Finding(path, what, fix, reads)


def _checkpoints(config: Config) -> Iterator[Finding]:
    for path, what, fix, reads in checkpoint_problems(config.checkpoint):
        yield Finding(path, what, fix, reads)


def _packing(config: Config) -> Iterator[Finding]:
    """Costs need sizes that not every `config.json` says; the tiny model's does."""
    folder = model_folder(config.model.path)
    if folder is None or model_problem(config.model.path) is not None:
        return
    missing = ", ".join(missing_sizes(folder))
    for name, role in (("policy", config.policy), ("value", config.value)):
        if missing and role is not None and role.packing.balance == "flops":
            what = f"{folder / 'config.json'} does not say {missing}"
            yield Finding((name, "packing", "balance"), what, 'give "tokens"', (("model", "path"),))


def _model(config: Config) -> Iterator[Finding]:
    found = model_problem(config.model.path) or policy_problem(config.model.path)
    if found is not None:
        yield Finding(("model", "path"), *found)
    parts = other_inputs(config.model.path)
    if parts:
        what = f"the model reads more than text ({', '.join(parts)}), and traces hold token ids alone"
        yield Finding(("model", "path"), what, "name a folder of a language model without these parts")


def _init_from(config: Config) -> Iterator[Finding]:
    if config.value is None:
        return
    if config.value.init_from is None:
        if config.value.min_initial_explained_variance is not None:
            key, fix = ("value", "min_initial_explained_variance"), "delete it, or give value.init_from"
            yield Finding(key, "a critic that starts from nothing explains nothing", fix, (("value", "init_from"),))
        return
    folder = model_folder(config.model.path) if model_problem(config.model.path) is None else None
    for what, fix in init_from_problems(config.value.init_from, config.value.loss, folder):
        yield Finding(("value", "init_from"), what, fix, (("value", "loss"), ("model", "path")))


def _is_broken(path: KeyPath, broken: set[KeyPath]) -> bool:
    return any(path[: len(bad)] == bad for bad in broken)


_CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _critic,
    _algorithm,
    _batch,
    _lengths,
    _scoring,
    _schedule,
    _tasks,
    _value_range,
    _environments,
    _policy_loss,
    _trained,
    _checkpoints,
    _packing,
    _model,
    _init_from,
    deployment_findings,
    machine_findings,
)
