"""The value service: one torchrun group that scores over HTTP and trains from grids."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from services.config.context import load_run
from services.model.shard import whole_tensor
from services.runtime.auth import critic_token
from services.runtime.lifecycle import install_stop_handlers, run_rank
from services.training.assemble import check_model, join_group, resume, serve_group
from services.training.control import ServerThread
from services.training.parts import Part, divided_in_critic
from services.training.saver import Saver
from services.training.sleeper import Sleeper
from value_service.app import score_app
from value_service.build import build_critic
from value_service.commands import CriticCommands
from value_service.loader import Loader
from value_service.scorer import Scorer
from value_service.updater import Updater


def run(run_dir: Path) -> None:
    """Everything one rank of the value service does."""
    config, context = load_run(run_dir)
    assert config.value is not None and context.value_url is not None and context.critic_grid_url is not None
    ranks, mesh, board = join_group("critic", config, config.value.model)
    with ranks.during("the start", collective="a collective"):
        backbone, critic = build_critic(config, context, mesh)
        check_model(backbone, critic.hidden, ranks, head=whole_tensor(critic.head.weight))
        scorer = Scorer(critic, ranks, mesh, board, seq_len=config.value.model.seq_len)
        interval_steps = config.monitor.movement_interval_steps
        updater = Updater(critic, ranks, mesh, config.value, movement_interval_steps=interval_steps)
        part = Part("critic", critic, updater.optimizer, mesh, ranks, divided_in_critic(backbone))
        if resume(part, board, context, seed=config.seed):
            norm = float(whole_tensor(critic.head.weight).norm())
            if ranks.rank == 0:
                logger.info("value head: loaded from {}, norm {:.6g}", context.commit_dir, norm)
    saver = Saver(part, board, context.run_dir)
    sleeper = Sleeper(part, board)
    stop = install_stop_handlers()  # a rank that still loads has nothing to lose, and just ends
    loader = Loader(part, board, config.value, Path(context.model_dir), backbone.model.config)
    server = None
    if ranks.rank == 0:
        app = score_app(
            scorer,
            board,
            config.value,
            vocab_size=backbone.model.config.vocab_size,
            model_name=config.run.name,
            saver=saver,
            sleeper=sleeper,
            loader=loader,
        )
        token = critic_token(config.value.token_file, context.token_file)
        server = ServerThread(app, context.value_url, token=token, body_deadline_s=config.value.body_deadline_s)
    serve_group(
        updater,
        ranks,
        mesh,
        board,
        config,
        context,
        stream="critic",
        grid_url=context.critic_grid_url,
        stop=stop,
        server=server,
        saver=saver,
        sleeper=sleeper,
        source=CriticCommands(scorer, loader),
    )


def main() -> None:
    """Entry point of each rank."""
    run_rank("value", run, description=__doc__)


if __name__ == "__main__":
    main()
