"""Cross-checks: what no single section can know.

Notable:
- Each check names every path it reads; none speaks about a value that was itself broken.
- Nothing is changed anywhere: ports are probed by binding and letting go, folders are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.config.algorithm import EitherLossKeys, SpoConfig
from services.config.checkpoint import checkpoint_problems
from services.config.env_settings import ROUNDING, prefix_problems, reward_problems, shaped_range, shaping_keys
from services.config.exported import init_from_problems, policy_problem
from services.config.layers import Layers, Problem
from services.config.layout import layout_problems
from services.config.listener import listener_problems
from services.config.machine import can_bind, num_gpus
from services.config.model_path import max_positions, missing_sizes, model_folder, model_problem
from services.config.parts import training_problems
from services.config.schema import Config
from services.config.tasks import problems_of
from services.config.toml_lines import KeyPath, dotted
from services.wire.messages import ROWS_KEPT

PORT_KEYS: dict[str, KeyPath] = {
    "inference_http_port": ("inference", "port"),
    "policy_http_port": ("policy", "port"),
    "policy_grid_port": ("orchestrator", "policy_grid_port"),
    "value_http_port": ("value", "port"),
    "critic_grid_port": ("orchestrator", "critic_grid_port"),
    "orchestrator_http_port": ("orchestrator", "port"),
}
"""Every port of a run, and the key that can fix it."""
PROJECT_ROOT = Path(__file__).resolve().parents[2]
_CRITIC_PORTS = frozenset({"value_http_port", "critic_grid_port"})


@dataclass(frozen=True)
class Finding:
    """A problem, before its line is known."""

    path: KeyPath
    what: str
    fix: str
    reads: tuple[KeyPath, ...] = ()
    """Further paths the check depends on."""


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
    findings += _value_gpus_without_value(config, layers)
    return [
        Problem(layers.where(finding.path), finding.path, finding.what, finding.fix)
        for finding in findings
        if about(finding) and not any(_is_broken(path, broken) for path in (finding.path, *finding.reads))
    ]


def port_names(config: Config) -> list[str]:
    """Names of the ports that a run needs; without a critic none of the critic's."""
    return [name for name in PORT_KEYS if config.value is not None or name not in _CRITIC_PORTS]


def fixed_ports(config: Config) -> dict[str, int]:
    """The ports that the configuration fixes, by name."""
    ports = {}
    for name in port_names(config):
        section, key = PORT_KEYS[name]
        port = getattr(getattr(config, str(section)), str(key))
        if port:
            ports[name] = port
    return ports


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


def _value_gpus_without_value(config: Config, layers: Layers) -> Iterator[Finding]:
    key = ("deployment", "num_value_gpus")
    if config.value is None and not config.algorithm.needs_value and key in layers.origins:
        yield Finding(key, "there is no [value] to give GPUs to", "delete it", (("value",), ("algorithm", "type")))


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


def _trained(config: Config) -> Iterator[Finding]:
    for role, section in (("policy", config.policy), ("value", config.value)):
        if section is not None:
            for path, what, fix, reads in training_problems(role, section, config.model.path):
                yield Finding(path, what, fix, reads)


def _checkpoints(config: Config) -> Iterator[Finding]:
    for path, what, fix, reads in checkpoint_problems(config.checkpoint):
        yield Finding(path, what, fix, reads)


def _layouts(config: Config) -> Iterator[Finding]:
    deployment = config.deployment
    roles = [("policy", config.policy.model, deployment.num_policy_gpus)]
    if config.value is not None:
        roles.append(("value", config.value.model, deployment.num_value_gpus))
    for role, layout, num_ranks in roles:
        key = ("deployment", f"num_{role}_gpus")
        for path, what, fix, reads in layout_problems(role, layout, num_ranks, key, config.model.path):
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


def _ports(config: Config) -> Iterator[Finding]:
    seen: dict[int, KeyPath] = {}
    for name, port in fixed_ports(config).items():
        path = PORT_KEYS[name]
        if port in seen:
            fix = "give each its own, or remove them so that ports are chosen"
            yield Finding(path, f"port {port} is also {dotted(seen[port])}", fix, (seen[port],))
        elif not can_bind(port):
            fix = "free it, give another, or remove the key so that a port is chosen"
            yield Finding(path, f"port {port} is taken on 127.0.0.1", fix)
        seen.setdefault(port, path)


def _listener(config: Config) -> Iterator[Finding]:
    for key, what, fix, others in listener_problems(config.value) if config.value is not None else ():
        yield Finding(("value", key), what, fix, tuple(("value", other) for other in others))


def _deadlines(config: Config) -> Iterator[Finding]:
    runtime, key = config.runtime, ("runtime", "collective_deadline_s")
    if runtime.heartbeat_s >= runtime.collective_deadline_s:
        what = f"an idle group would end at its own heartbeat, every runtime.heartbeat_s = {runtime.heartbeat_s:g} s"
        yield Finding(key, what, f"give more than {runtime.heartbeat_s:g}", (("runtime", "heartbeat_s"),))


def _devices(config: Config) -> Iterator[Finding]:
    deployment = config.deployment
    if deployment.num_inference_gpus > 1:
        what = f"{deployment.num_inference_gpus} inference engines are not available"
        yield Finding(("deployment", "num_inference_gpus"), what, "give 1")
    if deployment.device == "cpu":
        return
    num_value = deployment.num_value_gpus if config.value is not None else 0
    needed = deployment.num_policy_gpus + num_value + deployment.num_inference_gpus
    visible = num_gpus()
    if needed > visible:
        what = f"{needed} GPUs are needed (policy, critic and inference together), but {visible} are here"
        fix = 'lower deployment.num_*_gpus, or choose device = "cpu"'
        yield Finding(("deployment", "device"), what, fix)


def _engine(config: Config) -> Iterator[Finding]:
    if config.inference.engine != "vllm":
        return
    if config.model.path.startswith("dummy:"):
        what = "vLLM cannot start from the same random weights as the trainers"
        fix = 'choose engine = "local", or a model with weights'
        yield Finding(("inference", "engine"), what, fix, (("model", "path"),))
    python = PROJECT_ROOT / config.inference.vllm_python  # an absolute path stays as it is
    if not (python.is_file() and os.access(python, os.X_OK)):
        written = ("inference", "vllm_python")
        fix = 'run `make test-vllm` or scripts/install_vllm_cpu.sh, name another, or choose engine = "local"'
        yield Finding(("inference", "engine"), f"vLLM's interpreter {python} does not exist", fix, (written,))


def _is_broken(path: KeyPath, broken: set[KeyPath]) -> bool:
    return any(path[: len(bad)] == bad for bad in broken)


_CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _critic,
    _algorithm,
    _batch,
    _lengths,
    _schedule,
    _tasks,
    _value_range,
    _environments,
    _policy_loss,
    _trained,
    _checkpoints,
    _layouts,
    _packing,
    _model,
    _init_from,
    _ports,
    _listener,
    _deadlines,
    _devices,
    _engine,
)
