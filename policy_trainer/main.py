"""The policy trainer: one torchrun group that trains from grids and publishes weights."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from policy_trainer.trainer import PolicyTrainer
from services.config.context import load_run
from services.model.load import load_causal_lm
from services.runtime.lifecycle import install_stop_handlers, run_process
from services.training.assemble import check_model, join_group, local_device, serve_group
from services.training.control import ServerThread, control_app


def run(run_dir: Path) -> None:
    """Everything one rank of the policy trainer does."""
    stop = install_stop_handlers()
    config, context = load_run(run_dir)
    ranks, board = join_group("policy", config)
    model = load_causal_lm(context.model_dir, init=context.model_init, seed=config.seed)
    model.to(local_device(config))  # pyright: ignore[reportArgumentType]
    check_model(model.base_model, model.config.vocab_size, ranks, next(model.parameters()))
    trainer = PolicyTrainer(
        model,
        ranks,
        board,
        config.policy,
        weights_dir=context.run_dir / "weights",
        tokenizer_from=Path(context.model_dir),
    )
    server = None
    if ranks.rank == 0:
        server = ServerThread(control_app(board, title="Counterpoint policy trainer"), context.policy_url)
    serve_group(
        trainer,
        ranks,
        board,
        config,
        context,
        stream="policy",
        grid_url=context.policy_grid_url,
        stop=stop,
        server=server,
    )


def main() -> None:
    """Entry point of each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    args = parser.parse_args()
    run_process(f"policy-{os.environ.get('RANK', '0')}", args.run_dir, lambda: run(args.run_dir))


if __name__ == "__main__":
    main()
