"""Both roles' trainers around a given model, in one process or in the layout of a process group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from policy_trainer.trainer import PolicyTrainer
from services.config.train import PolicyConfig, ValueConfig
from services.model.backbone import Backbone
from services.model.head import Critic
from services.model.logprobs import PolicyModel
from services.model.mesh import Mesh
from services.model.selftest import Hidden
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from value_service.updater import Updater


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same architecture on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config)


def policy_of(model: PreTrainedModel, **options: Any) -> PolicyModel:
    """A probed policy model in one process."""
    policy = PolicyModel(model, **options)
    policy.probe()
    return policy


def trainer_of(
    model: PreTrainedModel, config: PolicyConfig, *, folder: Path = Path("none"), board: StatusBoard | None = None
) -> PolicyTrainer:
    """A policy trainer in one process; a reference is a copy of the model as it is now."""
    return PolicyTrainer(
        policy_of(model),
        Backbone(model, skeleton_of(model)),
        Ranks(),
        board or StatusBoard("policy"),
        config,
        weights_dir=folder / "weights",
        tokenizer_from=folder,
        reference=policy_of(copy.deepcopy(model).requires_grad_(False)) if config.kl.coef > 0 else None,
    )


def updater_of(critic: Critic, config: ValueConfig, **options: Any) -> Updater:
    """A critic's updater in one process."""
    return Updater(critic, Ranks(), Mesh(), config, **options)


def hidden_of(model: PreTrainedModel) -> Hidden:
    """The hidden states of a model in one process."""
    return PolicyModel(model).hidden
