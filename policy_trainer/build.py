"""The policy as every rank of its trainer builds it: the run's first model, what trains of it, its layout."""

from __future__ import annotations

from services.config.context import RunContext
from services.config.schema import Config
from services.model.backbone import Backbone, load_backbone, what_trains
from services.model.logprobs import PolicyModel
from services.model.mesh import Mesh


def build_policy(config: Config, context: RunContext, mesh: Mesh) -> tuple[Backbone, PolicyModel]:
    """The run's first model in the policy's layout."""
    backbone = load_backbone(
        context.model_dir,
        config.policy.model,
        mesh,
        init=context.model_init,
        seed=config.seed,
        prepare=what_trains(config.policy, role="policy", seed=config.seed),
    )
    policy = PolicyModel(backbone.model)
    backbone.complete(policy, methods=("hidden", "both_logits"))
    policy.probe()
    return backbone, policy
