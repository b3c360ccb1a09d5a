"""Law 1 for every loss and every choice around it: two ranks compute the gradient and the step of one process.

Notable:
- Each setting runs with two data ranks and with two context ranks, against one process on the same samples.
- A setting names metrics that prove that it had something to do: a clip that never clips would agree for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from policy_trainer.trainer import PolicyTrainer
from services.config.train import PolicyConfig, TrainModelConfig, ValueConfig
from services.model.backbone import Backbone, load_backbone
from services.model.head import Critic
from services.model.mesh import Mesh
from services.packing.grid import build_grid
from services.training.board import StatusBoard
from services.training.ranks import Ranks
from services.wire.grids import GridItem
from tests.architectures import build
from tests.processes.cases import case, layouts
from value_service.losses.support import Support
from value_service.updater import Updater

ARCHITECTURE = "qwen3"
STEP = {"lr": 1e-2, "max_grad_norm": 1e9, "eps": 1e-3}
"""A step that is not mere signs, so that it says how large gradients were, and leaves them as they are."""
SUPPORT = Support(0.0, 1.0, 11)
SUPPORT_CONSTANTS = {"low": 0.0, "high": 1.0, "num_bins": 11.0, "pad_bins": 3.0}


@dataclass(frozen=True)
class Setting:
    """One loss with its surroundings."""

    loss: str
    constants: dict[str, float]
    config: dict[str, Any] = field(default_factory=dict)
    """of the role"""
    grid: dict[str, Any] = field(default_factory=dict)
    """more arguments of `build_grid`"""
    at_work: tuple[str, ...] = ()
    """metrics that are not 0 in this batch"""


DIS = ("dis", {"eps_low": 0.3, "eps_high": 0.5})
PPO = ("ppo_clip", {"eps_low": 0.2, "eps_high": 0.3})
POLICY = {
    "dis": Setting(*DIS, at_work=("policy/dis_reject_low", "policy/dis_reject_high")),
    "ppo_clip": Setting(*PPO, at_work=("policy/clip_fraction",)),
    "ppo_clip_with_dual_clip": Setting(
        PPO[0], PPO[1] | {"dual_clip": 1.4}, at_work=("policy/clip_fraction", "policy/dual_clip_fraction")
    ),
    "entropy_bonus": Setting(*DIS, config={"entropy_coef": 0.5}, at_work=("policy/entropy",)),
    "sequence_mean": Setting(*DIS, grid={"denominator": "sequence_mean"}),
    "constant_denominator": Setting(*PPO, grid={"denominator": "constant", "denominator_tokens": 7}),
    "mini_batches": Setting(*DIS, grid={"num_mini_batches": 3}),
    "old_logprobs_recomputed": Setting(
        *PPO,
        config={"old_logprobs": "recomputed"},
        grid={"num_mini_batches": 3},
        at_work=("policy/log_ratio_abs_mean", "policy/kl_rollout"),
    ),
    "everything_at_once": Setting(
        PPO[0],
        PPO[1] | {"dual_clip": 1.4},
        config={"old_logprobs": "recomputed", "entropy_coef": 0.1, "kl": {"coef": 0.3, "type": "k3"}},
        grid={"num_mini_batches": 2, "denominator": "sequence_mean"},
        at_work=("policy/kl_reference", "policy/entropy"),
    ),
} | {
    f"kl_{kind}{'_unbiased' if unbiased else ''}": Setting(
        *DIS,
        config={"kl": {"coef": 0.5, "type": kind, "unbiased": unbiased}},
        at_work=("policy/kl_reference",),
    )
    for kind in ("k1", "k2", "k3")
    for unbiased in (False, True)
}
CRITIC = {
    "mse": Setting("mse", {}),
    "mse_with_clip": Setting("mse", {"clip": 0.5}, at_work=("value/clip_fraction",)),
    "two_hot": Setting("two_hot", SUPPORT_CONSTANTS, at_work=("value/entropy", "value/target_oob_fraction")),
    "hl_gauss": Setting("hl_gauss", SUPPORT_CONSTANTS | {"sigma_ratio": 0.75}, at_work=("value/entropy",)),
    "several_updates": Setting("hl_gauss", SUPPORT_CONSTANTS | {"sigma_ratio": 0.75}, config={"updates_per_batch": 3}),
}


def write_models(folder: Path, ranks: Ranks) -> None:
    """The model, and another to be the reference, which then has something to say."""
    layouts.write_model(folder, ARCHITECTURE, ranks)
    (folder / "reference").mkdir(exist_ok=True)
    if ranks.rank == 0 and not (folder / "reference" / "model.safetensors").exists():
        build(folder / "reference", ARCHITECTURE, seed=2).save_pretrained(folder / "reference")
    ranks.all_true(True)


def grid(setting: Setting, stream: Any, num_data_ranks: int) -> list[GridItem]:
    """The batch; one sample's targets hold the critic's own value."""
    samples = layouts.samples()
    samples[3].bootstrapped = True
    return build_grid(
        samples,
        stream=stream,
        seq_len=layouts.SEQ_LEN,
        num_data_ranks=num_data_ranks,
        run_id="run",
        epoch=1,
        step=0,
        policy_version=0,
        temperature=layouts.TEMPERATURE,
        loss_name=setting.loss,
        loss_constants=setting.constants,
        **setting.grid,
    )


def train_policy(folder: Path, setting: Setting, mesh: Mesh, ranks: Ranks) -> tuple[dict, Backbone, torch.nn.Module]:
    """One grid through the policy trainer of a layout."""
    config = PolicyConfig.model_validate({"optim": STEP, "model": {"cp": mesh.cp}} | setting.config)
    backbone, policy = layouts.policy_in(folder, mesh, config.model)
    reference = layouts.policy_in(folder / "reference", mesh, config.model)[1] if config.kl.coef > 0 else None
    trainer = PolicyTrainer(
        policy,
        backbone,
        ranks,
        StatusBoard("policy"),
        config,
        weights_dir=folder / "weights",
        tokenizer_from=folder,
        reference=reference,
    )
    return trainer.train(grid(setting, "policy", mesh.num_data_ranks)[mesh.data_rank]), backbone, policy


def train_critic(folder: Path, setting: Setting, mesh: Mesh, ranks: Ranks) -> tuple[dict, Backbone, torch.nn.Module]:
    """One grid through the critic's updater of a layout."""
    config = ValueConfig.model_validate({"optim": STEP, "model": {"cp": mesh.cp}} | setting.config)
    backbone = load_backbone(folder, TrainModelConfig(cp=mesh.cp), mesh)
    points = None if setting.loss == "mse" else SUPPORT.points.tolist()
    critic = Critic(backbone.model, head_init_std=0.3, seed=3, points=points)
    backbone.complete(critic, methods=("hidden", "outputs"), exact=(critic.head,))
    updater = Updater(critic, ranks, mesh, config)
    return updater.train(grid(setting, "critic", mesh.num_data_ranks)[mesh.data_rank]), backbone, critic


TRAIN = {"policy": train_policy, "critic": train_critic}
SETTINGS = {"policy": POLICY, "critic": CRITIC}


def outcome(
    folder: Path, role: str, name: str, mesh: Mesh, ranks: Ranks
) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Metrics row, gradients of the last update, and weights after it, whole on every rank."""
    row, backbone, model = TRAIN[role](folder, SETTINGS[role][name], mesh, ranks)
    gradients = layouts.whole(backbone, role, layouts.gradients_of(model))
    return row, gradients, layouts.whole(backbone, role, dict(model.named_parameters()))


def _add(role: str, name: str) -> None:
    def run(ranks: Ranks, folder: Path) -> None:
        write_models(folder, ranks)
        alone_row, alone_gradients, alone_weights = outcome(folder, role, name, Mesh(), Ranks())
        for metric in SETTINGS[role][name].at_work:
            assert abs(alone_row[metric]) > 1e-3, (metric, alone_row[metric])
        assert role == "policy" or 0.2 < alone_row["value/bootstrapped_fraction"] < 0.5
        assert min(float(gradient.norm()) for gradient in alone_gradients.values()) > 0
        for cp in (1, 2):
            mesh = Mesh.join(cp=cp, ep=1, device=torch.device("cpu"))
            row, gradients, weights = outcome(folder, role, name, mesh, ranks)
            layouts.assert_rows_close(row, alone_row)
            assert layouts.largest_difference(gradients, alone_gradients) < layouts.RELATIVE, f"gradients, cp {cp}"
            assert layouts.largest_difference(weights, alone_weights) < layouts.RELATIVE, f"weights, cp {cp}"

    run.__name__, run.__module__ = f"{role}_{name}", __name__
    case(2)(run)


for _role, _settings in SETTINGS.items():
    for _name in _settings:
        _add(_role, _name)
