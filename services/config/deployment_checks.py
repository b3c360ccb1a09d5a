"""Cross-checks of `[deployment]`: do the roles fit the nodes, the models their GPUs, and the keys each other.

Notable:
- Of a job (`kind = "slurm"`) the nodes have `gpus_per_node` GPUs; how many this machine has says nothing.
- On CPU a "gpu" is a rank: ranks are as many as one likes, but an engine is one process. Turns are the same as on
  GPUs, to be tried: memory is given back and taken again, and nobody computes out of turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.config.finding import Finding
from services.config.layout import attention_heads, layout_problems
from services.config.machine import num_gpus
from services.config.schema import Config
from services.config.toml_lines import KeyPath

_SECTION = "deployment"
_KIND, _SHARING, _DEVICE = ((_SECTION, name) for name in ("kind", "sharing", "device"))
_PER_NODE = (_SECTION, "gpus_per_node")
_TRAIN_NODES, _POLICY = (_SECTION, "num_train_nodes"), (_SECTION, "num_policy_gpus")
_VALUE, _VALUE_NODES = (_SECTION, "num_value_gpus"), (_SECTION, "num_value_nodes")
_VALUE_PER_NODE = (_SECTION, "num_value_gpus_per_train_node")
_INFERENCE, _INFERENCE_NODES = (_SECTION, "num_inference_gpus"), (_SECTION, "num_inference_nodes")
_TP, _ENGINE = ("inference", "tp"), ("inference", "engine")
CRITIC_KEYS = (_VALUE, _VALUE_NODES, _VALUE_PER_NODE)
"""The keys that say how many GPUs the critic has, and where."""


def deployment_findings(config: Config) -> Iterator[Finding]:
    """Everything that is wrong with the sizes of a run."""
    yield from _nodes_need_a_job(config)
    yield from _critic_keys(config)
    yield from _sharing(config)
    yield from _engines(config)
    yield from _divisions(config)
    yield from _model_layouts(config)
    yield from _capacity(config)


def beyond_this_machine(config: Config) -> list[str]:
    """Why a command that works on this machine alone cannot take the configuration, as lines of a ConfigError."""
    if config.deployment.kind == "local":
        return []
    what = 'this command works on one machine, and "slurm" is for `counterpoint run`'
    return [f"deployment.kind: {what}; fix: give --deployment.kind local, and sizes that fit it"]


def _nodes_need_a_job(config: Config) -> Iterator[Finding]:
    deployment = config.deployment
    if deployment.kind == "slurm":
        if config.value is not None and config.value.host != "127.0.0.1":
            what = "a job gives every process the address of its own node"
            yield Finding(("value", "host"), what, "delete it", (_KIND,))
        return
    for key, least in ((_TRAIN_NODES, 1), (_VALUE_NODES, 0), (_INFERENCE_NODES, 0)):
        number = getattr(deployment, str(key[1]))
        if number > least:
            what = f'{number} beyond this machine: deployment.kind = "local" has one node'
            yield Finding(key, what, 'delete it, or give deployment.kind = "slurm"', (_KIND,))


def _critic_keys(config: Config) -> Iterator[Finding]:
    """One key says where the critic is; none of them without a critic."""
    deployment = config.deployment
    given = [key for key in CRITIC_KEYS if getattr(deployment, str(key[1]))]
    if config.value is None:
        if not config.algorithm.needs_value:
            for key in given:
                reads = (("value",), ("algorithm", "type"))
                yield Finding(key, "there is no [value] to give GPUs to", "delete it", reads)
        return
    if deployment.num_value_nodes and deployment.num_value_gpus_per_train_node:
        what = f"deployment.num_value_nodes = {deployment.num_value_nodes} has the critic on nodes of its own already"
        yield Finding(_VALUE_PER_NODE, what, "delete one of the two", (_VALUE_NODES,))
    for key in (_VALUE_NODES, _VALUE_PER_NODE):
        if deployment.num_value_gpus is not None and key in given and deployment.sharing == "none":
            what = f"deployment.{key[1]} = {getattr(deployment, str(key[1]))} says already how many the critic has"
            yield Finding(_VALUE, what, "delete one of the two", (key,))
            break


def _sharing(config: Config) -> Iterator[Finding]:
    deployment, kind = config.deployment, config.deployment.sharing
    if kind == "none":
        return
    num = deployment.num_policy_gpus
    if kind == "time_train" and config.value is None and not config.algorithm.needs_value:
        what = "there is no [value] that could take turns with the policy"
        yield Finding(_SHARING, what, "delete it", (("value",), ("algorithm", "type")))
    for key in (_VALUE_NODES, _VALUE_PER_NODE):
        if config.value is not None and getattr(deployment, str(key[1])):
            what = f'deployment.sharing = "{kind}" gives the critic the policy\'s {num} GPUs'
            yield Finding(key, what, "delete one of the two", (_SHARING,))
    if config.value is not None and deployment.num_value_gpus not in (None, num):
        what = f"{deployment.num_value_gpus} are not the policy's {num} GPUs, on which the critic takes turns"
        yield Finding(_VALUE, what, f"delete it, or give {num}", (_SHARING, _POLICY))
    if config.value is not None and config.orchestrator.schedule == "overlap":
        what = f'critic and policy cannot both be at work with deployment.sharing = "{kind}"'
        yield Finding(("orchestrator", "schedule"), what, 'give "critic_first"', (_SHARING,))
    if kind == "time" and deployment.num_inference_nodes:
        what = 'deployment.sharing = "time" has inference on the policy\'s nodes'
        yield Finding(_INFERENCE_NODES, what, 'delete it, or give "time_train"', (_SHARING,))
    elif kind == "time" and deployment.num_inference_gpus != num:
        what = f"{deployment.num_inference_gpus} are not the policy's {num} GPUs, on which inference takes turns"
        yield Finding(_INFERENCE, what, f"give {num}", (_SHARING, _POLICY))


def _engines(config: Config) -> Iterator[Finding]:
    deployment, tp = config.deployment, config.inference.tp
    if tp > 1 and config.inference.engine == "local":
        yield Finding(_TP, "the local engine is one process on one device", 'give 1, or engine = "vllm"', (_ENGINE,))
    if tp > 1 and deployment.device == "cpu":
        yield Finding(_TP, "on CPU an engine is one process", 'give 1, or deployment.device = "cuda"', (_DEVICE,))
    if deployment.num_inference_gpus % tp:
        what = f"{deployment.num_inference_gpus} GPUs are not whole engines of inference.tp = {tp}"
        fix = f"give {_up(deployment.num_inference_gpus, tp)}, or another tp"
        yield Finding(_INFERENCE, what, fix, (_TP,))
    heads = attention_heads(config.model.path)
    if heads is not None and heads % tp:
        what = f"{tp} GPUs cannot share the model's {heads} attention heads"
        yield Finding(_TP, what, f"give a divisor of {heads}", (("model", "path"),))
    if config.num_engines > 1 and config.inference.port:
        what = f"{config.num_engines} engines cannot share one port"
        yield Finding(("inference", "port"), what, "delete it, so that ports are chosen", (_INFERENCE, _TP))


def _divisions(config: Config) -> Iterator[Finding]:
    """Roles that span nodes have as many GPUs on each; an engine lies within one."""
    deployment, tp = config.deployment, config.inference.tp
    num_train, num_policy = deployment.num_train_nodes, deployment.num_policy_gpus
    if num_policy % num_train:
        what = f"{num_policy} do not divide over deployment.num_train_nodes = {num_train}"
        yield Finding(_POLICY, what, f"give {_up(num_policy, num_train)}, or other nodes", (_TRAIN_NODES,))
    nodes = deployment.num_inference_nodes
    nodes_key = _INFERENCE_NODES
    if deployment.sharing == "time" and not nodes:
        nodes, nodes_key = num_train, _TRAIN_NODES
    if nodes > 1 and deployment.num_inference_gpus % tp == 0 and deployment.num_inference_gpus % (nodes * tp):
        num, whole = deployment.num_inference_gpus, f"engines of inference.tp = {tp}" if tp > 1 else "GPUs"
        what = f"{num} do not divide over deployment.{nodes_key[1]} = {nodes} as whole {whole}"
        yield Finding(_INFERENCE, what, f"give {_up(num, nodes * tp)}, or other nodes", (nodes_key, _TP, _SHARING))


def _model_layouts(config: Config) -> Iterator[Finding]:
    """Each role's cp and ep against its GPUs and its model."""
    deployment = config.deployment
    roles = [("policy", config.policy.model, deployment.num_policy_gpus, _POLICY)]
    if config.value is not None:
        key = next((key for key in CRITIC_KEYS[1:] if getattr(deployment, str(key[1]))), _VALUE)
        roles.append(("value", config.value.model, config.num_value_gpus, _SHARING if _shares(config) else key))
    for role, layout, num_ranks, key in roles:
        for path, what, fix, reads in layout_problems(role, layout, num_ranks, key, config.model.path):
            yield Finding(path, what, fix, reads)


def _shares(config: Config) -> bool:
    return config.deployment.sharing != "none"


def _capacity(config: Config) -> Iterator[Finding]:
    """GPUs of the fullest node against those that there are."""
    deployment = config.deployment
    if deployment.device == "cpu":
        return
    reads: tuple[KeyPath, ...] = (_POLICY, *CRITIC_KEYS, _INFERENCE, _TRAIN_NODES, _INFERENCE_NODES, _SHARING)
    needs = gpus_needed(config)
    if deployment.kind == "local":
        needed, visible = sum(needs["train"].values()), num_gpus()
        if needed > visible:
            what = f"{needed} GPUs are needed ({_listed(needs['train'])}), but {visible} are here"
            fix = 'lower deployment.num_*_gpus, or choose device = "cpu"'
            yield Finding(_DEVICE, what, fix, (_KIND, *reads))
        return
    for name, roles in needs.items():
        needed, there = sum(roles.values()), deployment.gpus_per_node
        if needed > there:
            what = f"{there} are too few: {needed} are needed on {_NODE_NAMES[name]} ({_listed(roles)})"
            fix = "lower the roles' numbers, or spread them: num_train_nodes, num_value_nodes, num_inference_nodes"
            yield Finding(_PER_NODE, what, fix, (_KIND, *reads))


_NODE_NAMES = {"train": "the first train node", "inference": "each inference node"}


def gpus_needed(config: Config) -> dict[str, dict[str, int]]:
    """GPUs of each role on the fullest node of each kind; roles that take turns count once, under the policy."""
    deployment = config.deployment
    first = {"policy": -(-deployment.num_policy_gpus // deployment.num_train_nodes)}
    if config.value is not None and not _shares(config) and not deployment.num_value_nodes:
        first["critic"] = -(-deployment.num_critic_gpus // deployment.num_critic_nodes)
    if deployment.num_inference_nodes:
        own = {"inference": -(-deployment.num_inference_gpus // deployment.num_inference_nodes)}
        return {"train": first, "inference": own}
    if deployment.sharing != "time":
        first["inference"] = deployment.num_inference_gpus
    return {"train": first}


def _listed(roles: dict[str, int]) -> str:
    return ", ".join(f"{role} {num}" for role, num in roles.items())


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
