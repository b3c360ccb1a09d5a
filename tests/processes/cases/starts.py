"""Critics that start from an exported folder in a layout, and commits of that layout that become folders again."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from services.config.train import TrainModelConfig, TwoHotConfig, ValueConfig
from services.model.backbone import load_backbone
from services.model.export import export_critic
from services.model.head import Critic
from services.model.init_from import critic_source
from services.model.mesh import Mesh
from services.model.shard import whole_tensor
from services.training.checkpoint import save
from services.training.export_run import read_role_state
from services.training.optimizer import Optimizer
from services.training.parts import Part
from services.training.ranks import Ranks
from tests.exports import FACTS, POINTS, SUPPORT, base_of, bytes_of, critic_of, state_of, write_critic
from tests.processes.cases import case


@case(2)
def a_folder_goes_through_a_sharded_critic_and_its_commit_unchanged(ranks: Ranks, folder: Path) -> None:
    """Scenario: export, start on two ranks that share the experts, commit, export. Result: the same bytes."""
    base, first = folder / "base", folder / "first"
    if ranks.rank == 0:
        base_of(base, "qwen3-moe")
        write_critic(critic_of(base), base, first)
    ranks.all_true(True)
    loss = TwoHotConfig(type="two_hot", bins=5, range=[-1.0, 1.0], pad=1)
    value = ValueConfig(init_from=str(first), loss=loss, model=TrainModelConfig(ep=2))
    mesh = Mesh.join(cp=1, ep=2, device=torch.device("cpu"))
    source = critic_source(value, model_dir=base, model_init="pretrained", gamma=0.9)
    backbone = load_backbone(source.folder, value.model, mesh, role="value", init=source.init)
    critic = Critic(backbone.model, head_init_std=0.5 + ranks.rank, seed=ranks.rank, points=POINTS)
    source.fill_head(critic.head, mesh)
    backbone.complete(critic, methods=("hidden", "outputs"), exact=(critic.head,))
    head = [*whole_tensor(critic.head.weight).flatten().tolist(), *whole_tensor(critic.head.bias).tolist()]
    assert all(other == head for other in ranks.gather_f64(head))
    assert any(head)

    optimizer = Optimizer(critic, value.optim.model_copy(update={"lr": 0.1}), ranks, warmup_updates=0)
    prefix = f"{type(backbone.model).base_model_prefix}."
    divided = frozenset(f"backbone.{name.removeprefix(prefix)}" for name in backbone.divided)
    save(folder / "commit", Part("critic", critic, optimizer, mesh, ranks, divided), steps_done=0)
    ranks.all_true(True)
    if ranks.rank == 0:
        state, expected = read_role_state(folder / "commit"), state_of(critic_of(base))
        assert set(state) == set(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
        export_critic(state, first, folder / "second", support=SUPPORT, gamma=0.9, **FACTS)
        assert bytes_of(first) == bytes_of(folder / "second")
        assert json.loads((first / "counterpoint.json").read_text())["points"] == POINTS
