"""The value service: one torchrun group that scores over HTTP and trains from grids."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from services.config.context import RunContext, load_run
from services.config.schema import Config
from services.model.head import Critic
from services.model.load import load_causal_lm
from services.runtime.lifecycle import install_stop_handlers, run_process
from services.training.assemble import check_model, join_group, local_device, serve_group
from services.training.control import ServerThread
from value_service.app import score_app
from value_service.losses import support_of
from value_service.scorer import Scorer
from value_service.updater import Updater


def build_critic(config: Config, context: RunContext) -> tuple[Critic, int]:
    """The critic on the policy's initial backbone, and the vocabulary size."""
    assert config.value is not None
    model = load_causal_lm(context.model_dir, init=context.model_init, seed=config.seed)
    loss = config.value.loss
    support = support_of(loss.type, loss.loss_constants())
    points = None if support is None else support.points.tolist()
    critic = Critic(model, head_init_std=config.value.head.init_std, seed=config.seed, points=points)
    return critic, model.config.vocab_size


def run(run_dir: Path) -> None:
    """Everything one rank of the value service does."""
    stop = install_stop_handlers()
    config, context = load_run(run_dir)
    assert config.value is not None and context.value_url is not None and context.critic_grid_url is not None
    ranks, board = join_group("critic", config)
    critic, vocab_size = build_critic(config, context)
    critic.to(local_device(config))
    check_model(critic.backbone, vocab_size, ranks, critic.head.weight)
    scorer = Scorer(critic, ranks, board, seq_len=config.value.model.seq_len)
    server = None
    if ranks.rank == 0:
        app = score_app(scorer, board, config.value, vocab_size=vocab_size, model_name=config.run.name)
        server = ServerThread(app, context.value_url)
    updater = Updater(critic, ranks, config.value)
    serve_group(
        updater,
        ranks,
        board,
        config,
        context,
        stream="critic",
        grid_url=context.critic_grid_url,
        stop=stop,
        server=server,
        source=scorer,
    )


def main() -> None:
    """Entry point of each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    args = parser.parse_args()
    run_process(f"value-{os.environ.get('RANK', '0')}", args.run_dir, lambda: run(args.run_dir))


if __name__ == "__main__":
    main()
