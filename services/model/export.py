"""From all tensors of a role to a Hugging Face folder that stands by itself.

    policy    a causal language model, as `save_pretrained` writes it, adapters added in
    critic    a model for token classification whose `score` is the value head; where transformers has no such class,
              the backbone and `value_head.safetensors` beside it
    both      tokenizer files, and `counterpoint.json` (services.config.exported) with what the numbers mean

Notable:
- A critic's logits at position t are the value of the state after token t: what a run calls the value at t + 1.
- Hub names, and fused experts split again, are transformers' business: tensors go through the architecture on meta.
- Every tensor of the architecture must be there, once and in its shape: what is missing would be random numbers to
  whoever loads the folder (a value head that nobody trained, say).
- Everything is float32, as it was trained. A folder appears under its name only when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from services.config.exported import (
    FACTS_FILE,
    HEAD_FILE,
    CriticFacts,
    HeadSupport,
    PolicyFacts,
    SupportFacts,
    tokenizer_sha256,
)
from services.model.backbone import Prepare
from services.model.load import head_features
from services.model.lora import is_adapter_name, merged_state_dict
from services.model.snapshot import MANIFEST, TOKENIZER_FILES, verify_snapshot
from services.runtime.durable import rename_dir
from services.wire.errors import CannotWrite, ConfigError, ContractError

State = Mapping[str, torch.Tensor]
_BACKBONE, _HEAD = "backbone.", "head."


# ---------------------------------------------------------------------------------------------------------------------
# The two roles


def export_policy(
    state: State, model_dir: Path, out: Path, *, run: str, source: str, prepare: Prepare | None = None
) -> Path:
    """Write a causal language model.

    Args:
        state: All tensors by the names of `named_parameters()` (and of saved buffers) in training.
        model_dir: Folder of the run's model: architecture and tokenizer.
        out: Must not exist, or be empty.
        run: Name of the run.
        source: Where in its directory the tensors were.
        prepare: What put adapters into the model in training (`services.model.backbone.what_trains`).

    Returns:
        `out`, absolute.

    Raises:
        ContractError: the tensors are not those of the architecture.
        CannotWrite: the disk does not take it; nothing is left under the final name.
    """
    model = _causal_lm(model_dir)
    plain = _without_adapters(state, _causal_lm(model_dir), prepare)
    _check_complete(model, plain)
    facts = PolicyFacts(run=run, source=source, tokenizer_sha256=tokenizer_sha256(model_dir))

    def write(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=plain)
        _copy((*TOKENIZER_FILES, "generation_config.json"), model_dir, folder)
        _write_facts(facts, folder)

    return _write_folder(out, write)


def export_critic(
    state: State,
    model_dir: Path,
    out: Path,
    *,
    support: HeadSupport,
    gamma: float,
    run: str,
    source: str,
    prepare: Prepare | None = None,
) -> Path:
    """Write a critic: backbone, value head and what its outputs mean.

    Args:
        state: All tensors by the names of `services.model.head.Critic`.
        model_dir: Folder that the critic started from: architecture and tokenizer.
        out: Must not exist, or be empty.
        support: What the head's outputs mean.
        gamma: Discount of the returns that it learned.
        run: Name of the run.
        source: Where in its directory the tensors were.
        prepare: What put adapters into the backbone in training.

    Returns:
        `out`, absolute.

    Raises:
        ContractError: the tensors are not those of the architecture, or the head is not one for `support`.
        CannotWrite: the disk does not take it; nothing is left under the final name.
    """
    language_model = _causal_lm(model_dir)
    backbone: Any = language_model.base_model
    own = {name.removeprefix(_BACKBONE): tensor for name, tensor in state.items() if name.startswith(_BACKBONE)}
    head = {name.removeprefix(_HEAD): tensor for name, tensor in state.items() if name.startswith(_HEAD)}
    if len(own) + len(head) != len(state):
        strange = min(name for name in state if not name.startswith((_BACKBONE, _HEAD)))
        raise ContractError(f"the critic's state has the unknown {strange}")
    plain = _without_adapters(own, _causal_lm(model_dir), prepare, within_base=True)
    _check_complete(backbone, plain)
    _check_head(head, support, head_features(language_model))
    classifier = _token_classifier(model_dir, backbone, num_outputs=len(head["bias"]))
    facts = CriticFacts(
        form="backbone_and_head" if classifier is None else "token_classification",
        support=support,
        points=head["points"].tolist() if "points" in head else None,
        gamma=gamma,
        run=run,
        source=source,
        tokenizer_sha256=tokenizer_sha256(model_dir),
    )

    def write(folder: Path) -> None:
        if classifier is None:
            backbone.config.counterpoint = facts.model_dump(mode="json")
            backbone.save_pretrained(folder, state_dict=plain)
            save_file({name: tensor.contiguous() for name, tensor in head.items()}, folder / HEAD_FILE)
        else:
            classifier.config.counterpoint = facts.model_dump(mode="json")
            whole = {f"{classifier.base_model_prefix}.{name}": tensor for name, tensor in plain.items()}
            whole |= {"score.weight": head["weight"], "score.bias": head["bias"]}
            classifier.save_pretrained(folder, state_dict=whole)
        _copy(TOKENIZER_FILES, model_dir, folder)
        _write_facts(facts, folder)

    return _write_folder(out, write)


def copy_snapshot(snapshot: Path, model_dir: Path, out: Path, *, run: str, source: str) -> Path:
    """Write a published snapshot of the policy, which is a causal language model already.

    Args:
        snapshot: `weights/v000012`.
        model_dir: Folder of the run's model.
        out: Must not exist, or be empty.
        run: Name of the run.
        source: Where in its directory the snapshot is.

    Returns:
        `out`, absolute.

    Raises:
        ContractError: a file is missing or differs from the manifest.
        ConfigError: the snapshot is an adapter alone.
        CannotWrite: the disk does not take it; nothing is left under the final name.
    """
    verify_snapshot(snapshot)
    if not any(snapshot.glob("model*.safetensors")):
        fix = 'export a commit, or train with policy.lora.publish = "merged"'
        raise ConfigError([f"policy.lora.publish: {snapshot} holds an adapter alone; fix: {fix}"])
    facts = PolicyFacts(run=run, source=source, tokenizer_sha256=tokenizer_sha256(snapshot))

    def write(folder: Path) -> None:
        _copy(("generation_config.json",), model_dir, folder)
        _copy(tuple(path.name for path in sorted(snapshot.iterdir()) if path.name != MANIFEST), snapshot, folder)
        _write_facts(facts, folder)

    return _write_folder(out, write)


# ---------------------------------------------------------------------------------------------------------------------
# Architectures, on the meta device


def _causal_lm(model_dir: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _token_classifier(model_dir: Path, backbone: nn.Module, *, num_outputs: int) -> PreTrainedModel | None:
    """The class that computes backbone and head, on meta; None where transformers has none that does just that."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return None
    config.num_labels = num_outputs
    config.classifier_dropout = 0.0
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32).eval()
    head = getattr(model, "score", None)
    fits = isinstance(head, nn.Linear) and head.bias is not None and head.out_features == num_outputs
    return model if fits and type(model.base_model) is type(backbone) else None


def _without_adapters(
    state: State, adapted: PreTrainedModel, prepare: Prepare | None, *, within_base: bool = False
) -> dict[str, torch.Tensor]:
    """The plain model's tensors; `adapted` becomes the model as it was in training."""
    if not any(is_adapter_name(name) for name in state):
        return dict(state)
    if prepare is None:
        raise ContractError("the state has adapters, and nothing says which")
    prepare(adapted)
    return merged_state_dict(state, adapted.base_model if within_base else adapted)


def _check_complete(model: nn.Module, state: State) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                expected[f"{prefix}.{leaf}" if prefix else leaf] = tuple(buffer.shape)
    kind = type(model).__name__
    for problem, names in (("lacks", set(expected) - set(state)), ("has the unknown", set(state) - set(expected))):
        if names:
            raise ContractError(f"a state of {kind} {problem} {min(names)} ({len(names)} such)")
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise ContractError(f"a state of {kind} has {name} {list(state[name].shape)}, not {list(shape)}")


def _check_head(head: State, support: HeadSupport, width: int) -> None:
    expected = {"weight": [1, width], "bias": [1]}
    if isinstance(support, SupportFacts):
        num_points = support.num_points
        expected = {"weight": [num_points, width], "bias": [num_points], "points": [num_points]}
    found = {name: list(tensor.shape) for name, tensor in head.items()}
    if found != expected:
        raise ContractError(f"the value head is {found}, and a head for {support} {expected}")
    if isinstance(support, SupportFacts):
        inner = head["points"][support.pad_bins :][: support.num_bins]
        ends = [float(inner[0]), float(inner[-1])]
        if not torch.allclose(torch.tensor(ends), torch.tensor([support.low, support.high])):
            raise ContractError(f"the value head has points on {ends}, and not {support}")


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def _write_folder(out: Path, write: Callable[[Path], None]) -> Path:
    out = out.resolve()
    part = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CannotWrite(f"cannot write {out}: {error.strerror or error}") from error
    rename_dir(part, out)
    return out


def _copy(names: tuple[str, ...], source: Path, folder: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_facts(facts: PolicyFacts | CriticFacts, folder: Path) -> None:
    (folder / FACTS_FILE).write_text(facts.model_dump_json(indent=1) + "\n")
