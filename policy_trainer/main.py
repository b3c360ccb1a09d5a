"""The policy trainer: one torchrun group that trains from grids and publishes weights."""

from __future__ import annotations

from pathlib import Path

from policy_trainer.build import build_policy
from policy_trainer.trainer import PolicyTrainer
from services.config.context import load_run
from services.runtime.auth import run_token
from services.runtime.lifecycle import install_stop_handlers, run_rank
from services.training.assemble import check_model, join_group, resume, serve_group
from services.training.control import ServerThread, control_app
from services.training.parts import Part
from services.training.saver import Saver
from services.training.sleeper import Sleeper


def run(run_dir: Path) -> None:
    """Everything one rank of the policy trainer does."""
    config, context = load_run(run_dir)
    ranks, mesh, board = join_group("policy", config, config.policy.model)
    with ranks.during("the start", collective="a collective"):
        backbone, policy = build_policy(config, context, mesh)
        check_model(backbone, policy.hidden, ranks)
        reference = None
        if config.policy.kl.coef > 0 and config.policy.lora is None:
            _, reference = build_policy(config, context, mesh)
        trainer = PolicyTrainer(
            policy,
            backbone,
            ranks,
            board,
            config.policy,
            reference=reference,
            weights_dir=context.run_dir / "weights",
            tokenizer_from=Path(context.model_dir),
            movement_interval_steps=config.monitor.movement_interval_steps,
        )
        part = Part("policy", policy, trainer.optimizer, mesh, ranks, frozenset(backbone.divided), "language_model.")
        if resume(part, board, context, seed=config.seed):
            trainer.publish_again(board.steps_done)
    steps_before = config.value.warmup.critic_only_steps if config.value is not None else 0
    saver = Saver(part, board, context.run_dir, steps_before=steps_before)
    sleeper = Sleeper(part, board, others=(reference,) if reference is not None else ())
    stop = install_stop_handlers()  # a rank that still loads has nothing to lose, and just ends
    server = None
    if ranks.rank == 0:
        app = control_app(board, title="Counterpoint policy trainer", saver=saver, sleeper=sleeper)
        server = ServerThread(app, context.policy_url, token=run_token(context.token_file))
    serve_group(
        trainer,
        ranks,
        mesh,
        board,
        config,
        context,
        stream="policy",
        grid_url=context.policy_grid_url,
        stop=stop,
        server=server,
        saver=saver,
        sleeper=sleeper,
    )


def main() -> None:
    """Entry point of each rank."""
    run_rank("policy", run, description=__doc__)


if __name__ == "__main__":
    main()
