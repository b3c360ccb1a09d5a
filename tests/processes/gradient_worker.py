"""Run by torchrun: gradients of both roles on one batch, by this group and by one process alone.

Rank 0 writes, for each role, the group's gradient, one process's on the same samples, and an independent float64
reference that runs each sequence alone through the architecture's own attention.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from policy_trainer.trainer import PolicyTrainer
from services.config.train import OptimConfig, PolicyConfig, TrainModelConfig, ValueConfig
from services.model.backbone import load_backbone
from services.model.head import Critic
from services.model.logprobs import PolicyModel
from services.model.mesh import Mesh
from services.model.shard import whole_tensor
from services.packing.grid import build_grid
from services.runtime.lifecycle import leave
from services.training.board import StatusBoard
from services.training.preflight import agree
from services.training.ranks import Ranks
from services.wire.errors import PreflightError
from services.wire.grids import GridItem
from services.wire.samples import Branch, StopReason, TrainingSample, VersionSpan
from value_service.updater import Updater

SEQ_LEN = 40
TEMPERATURE = 0.7


@functools.cache
def samples(model_dir: str) -> list[TrainingSample]:
    """Nine samples of mixed lengths, with gaps of observation tokens; nothing divides evenly.

    Rollout log-probabilities lie around the model's own, so that ratios fall inside and outside the mask's window.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    rng = np.random.default_rng(3)
    out = []
    for i, length in enumerate([5, 31, 12, 2, 40, 9, 17, 3, 22]):
        mask = rng.random(length) < 0.6
        mask[0] = False
        mask[-1] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        spans = [VersionSpan(int(a), int(b), 4) for a, b in edges.reshape(-1, 2)]
        token_ids = rng.integers(0, 261, length)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(token_ids)[None], use_cache=False).logits[0] / TEMPERATURE
        own = torch.log_softmax(logits, -1)[torch.arange(length - 1), torch.from_numpy(token_ids[1:])].numpy()
        own = np.concatenate([[0.0], own]) + rng.normal(0, 0.5, length)
        logprobs = np.where(mask, own, 0).astype(np.float32)
        branch = Branch(token_ids.astype(np.uint32), mask, mask.copy(), logprobs, spans)
        sample = TrainingSample(f"t{i}", f"g{i}", branch, 1.0, StopReason.TERMINATED)
        sample.values = np.where(mask, rng.random(length), 0)
        sample.advantages = np.where(mask, rng.standard_normal(length), 0)
        sample.returns = np.where(mask, rng.random(length), 0)
        out.append(sample)
    return out


def grid(model_dir: str, stream, num_data_ranks: int, loss_name: str, constants: dict[str, float]) -> list[GridItem]:
    """The batch packed for so many data ranks."""
    return build_grid(
        samples(model_dir),
        stream=stream,
        seq_len=SEQ_LEN,
        num_data_ranks=num_data_ranks,
        run_id="run",
        epoch=1,
        step=0,
        policy_version=4,
        temperature=TEMPERATURE,
        loss_name=loss_name,
        loss_constants=constants,
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by name, whole."""
    return {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def mesh_of(ranks: Ranks) -> Mesh:
    """All ranks as data ranks."""
    return Mesh() if ranks.size == 1 else Mesh.join(cp=1, ep=1, device=torch.device("cpu"))


def critic_gradient(model_dir: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The critic's gradient in this group; the weights stay as they are."""
    mesh = mesh_of(ranks)
    backbone = load_backbone(model_dir, TrainModelConfig(), mesh)
    critic = Critic(backbone.model, head_init_std=0.1, seed=1)
    backbone.complete(critic, methods=("hidden", "outputs"), exact=(critic.head,))
    updater = Updater(critic, ranks, mesh, ValueConfig(optim=OptimConfig(lr=0.0, max_grad_norm=1e9)))
    updater.train(grid(model_dir, "critic", ranks.size, "mse", {})[ranks.rank])
    return gradients(critic)


def policy_gradient(model_dir: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The policy's gradient in this group."""
    backbone = load_backbone(model_dir, TrainModelConfig(), mesh_of(ranks))
    policy = PolicyModel(backbone.model)
    backbone.complete(policy, methods=("hidden", "both_logits"))
    policy.probe()
    trainer = PolicyTrainer(
        policy,
        backbone,
        ranks,
        StatusBoard("policy"),
        PolicyConfig(optim=OptimConfig(lr=0.0, max_grad_norm=1e9)),
        weights_dir=Path("/nonexistent"),
        tokenizer_from=Path(model_dir),
    )
    trainer.train(grid(model_dir, "policy", ranks.size, "dis", {"eps_low": 0.3, "eps_high": 5.0})[ranks.rank])
    return gradients(policy.language_model)


def reference_gradients(model_dir: str) -> dict[str, dict[str, torch.Tensor]]:
    """Both gradients in float64, sequence by sequence, by formulas written out here."""
    batch = samples(model_dir)
    num_tokens = sum(int(s.branch.loss_mask.sum()) for s in batch)
    policy = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float64)
    language_model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float64)
    critic = Critic(language_model, head_init_std=0.1, seed=1)
    weight = critic.head.weight.detach().double().requires_grad_()
    bias = critic.head.bias.detach().double().requires_grad_()
    policy_loss = critic_loss = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        ids = torch.tensor(sample.branch.token_ids.astype(np.int64))
        logits = policy(input_ids=ids[None], use_cache=False).logits[0].double() / TEMPERATURE
        hidden = language_model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        t_n = torch.from_numpy(np.flatnonzero(sample.branch.loss_mask))
        rollout, advantage, target = (
            torch.from_numpy(x.astype(np.float32)).double()[t_n]
            for x in (sample.branch.logprobs, sample.advantages, sample.returns)
        )
        logprob = torch.log_softmax(logits[t_n - 1], -1).gather(1, ids[t_n, None])[:, 0]
        ratio = torch.exp(logprob.detach() - rollout)
        kept = (ratio > 0.7) & (ratio < 6.0)
        policy_loss = policy_loss - (kept * ratio * advantage * logprob).sum() / num_tokens
        value = hidden[t_n - 1] @ weight[0] + bias[0]
        critic_loss = critic_loss + (0.5 * (value - target) ** 2).sum() / num_tokens
    policy_loss.backward()
    critic_loss.backward()
    critic_grads = {f"backbone.{n}": p.grad for n, p in language_model.base_model.named_parameters()}
    critic_grads |= {"head.weight": weight.grad, "head.bias": bias.grad}
    return {"policy": gradients(policy), "critic": critic_grads}


def preflight_messages(model_dir: str, ranks: Ranks) -> dict[str, list[str]]:
    """What each rank is told when the last rank is starved, holds another step, another grid, or another's item."""
    own = grid(model_dir, "critic", ranks.size, "mse", {})
    mine = own[ranks.rank]
    is_last = ranks.rank == ranks.size - 1
    later = GridItem(msgspec.structs.replace(mine.header, step=1), mine.arrays)
    foreign = GridItem(msgspec.structs.replace(mine.header, grid_digest="f" * 64), mine.arrays)
    cases = {"starved": None, "step": later, "grid": foreign, "swapped": own[0], "agreed": mine}
    told: dict[str, list[str]] = {}
    for name, other in cases.items():
        try:
            agree(0, other if is_last else mine, ranks)
            message = ""
        except PreflightError as error:
            message = str(error)
        told[name] = [reply.decode() for reply in ranks.gather_bytes(message.encode())]
    return told


def main() -> None:
    model_dir, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Ranks.join(deadline_s=60)
    result = {
        "critic": {"group": critic_gradient(model_dir, ranks)},
        "policy": {"group": policy_gradient(model_dir, ranks)},
    }
    told = preflight_messages(model_dir, ranks)
    if ranks.rank == 0:
        out.with_suffix(".json").write_bytes(msgspec.json.encode(told))
        result["critic"]["alone"] = critic_gradient(model_dir, Ranks())
        result["policy"]["alone"] = policy_gradient(model_dir, Ranks())
        for role, reference in reference_gradients(model_dir).items():
            result[role]["reference"] = reference
        torch.save(result, out)
    ranks.all_true(True)
    ranks.close()
    leave()


if __name__ == "__main__":
    main()
