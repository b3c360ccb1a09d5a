"""The critic as every rank of the value service builds it: backbone, head, layout."""

from __future__ import annotations

from pathlib import Path

from services.config.context import RunContext
from services.config.schema import Config
from services.model.backbone import Backbone, load_backbone, what_trains
from services.model.head import Critic
from services.model.init_from import critic_source
from services.model.mesh import Mesh
from value_service.losses import support_of


def build_critic(config: Config, context: RunContext, mesh: Mesh) -> tuple[Backbone, Critic]:
    """The critic in its layout, on the run's model or on the folder of `value.init_from`."""
    assert config.value is not None
    gamma = getattr(config.algorithm, "gamma", 1.0)
    source = critic_source(config.value, model_dir=Path(context.model_dir), model_init=context.model_init, gamma=gamma)
    backbone = load_backbone(
        source.folder,
        config.value.model,
        mesh,
        role="value",
        init=source.init,
        seed=config.seed,
        prepare=what_trains(config.value, role="value", seed=config.seed),
    )
    loss = config.value.loss
    support = support_of(loss.type, loss.loss_constants())
    points = None if support is None else support.points.tolist()
    critic = Critic(backbone.model, head_init_std=config.value.head.init_std, seed=config.seed, points=points)
    source.fill_head(critic.head, mesh)
    backbone.model.set_output_embeddings(None)  # pyright: ignore[reportArgumentType] - a critic has no use for it
    backbone.complete(critic, methods=("hidden", "outputs"), exact=(critic.head,))
    return backbone, critic
