"""The parts every train process is assembled from: join the group, check the model, serve until told to stop."""

from __future__ import annotations

import os
import threading

import torch
from loguru import logger
from torch import nn

from services.config.context import RunContext
from services.config.schema import Config
from services.model.selftest import check_packing
from services.training.board import StatusBoard
from services.training.control import ServerThread
from services.training.group import CommandSource, Trainer, TrainGroup
from services.training.ranks import Ranks
from services.transport.grid_receiver import GridReceiver
from services.wire.errors import PreflightError
from services.wire.grids import Stream


def join_group(role: str, config: Config) -> tuple[Ranks, StatusBoard]:
    """Join the torchrun group and make its status board, with every rank's pid on it."""
    if config.deployment.device == "cpu":
        torch.set_num_threads(1)
    ranks = Ranks.join(deadline_s=config.runtime.collective_deadline_s, device=config.deployment.device)
    board = StatusBoard(role)
    board.progress(pids=[row[0] for row in ranks.gather_ints([os.getpid()])])
    return ranks, board


def local_device(config: Config) -> torch.device:
    """Where this rank's model lives: the CPU, or the GPU of its local rank."""
    if config.deployment.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def check_model(backbone: nn.Module, vocab_size: int, ranks: Ranks, fingerprint: torch.Tensor) -> None:
    """Packed equals alone on the real model, and every rank starts from the same numbers.

    Raises:
        ConfigError: when the architecture cannot be packed.
        PreflightError: when the ranks' weights differ.
    """
    worst = check_packing(backbone, vocab_size)
    first = next(backbone.parameters())
    sums = [float(fingerprint.double().sum()), float(first.double().sum()), float(first.double().square().sum())]
    rows = ranks.gather_f64(sums)
    if any(row != rows[0] for row in rows):
        raise PreflightError(f"ranks start from different weights: {rows}")
    logger.info("packed equals alone within {:.1e}; {} rank(s) start equal", worst, ranks.size)


def serve_group(
    trainer: Trainer,
    ranks: Ranks,
    board: StatusBoard,
    config: Config,
    context: RunContext,
    *,
    stream: Stream,
    grid_url: str,
    stop: threading.Event,
    server: ServerThread | None,
    source: CommandSource | None = None,
) -> None:
    """Receive grids and follow commands until `stop`; rank 0 also listens on HTTP."""
    receiver = GridReceiver(
        grid_url,
        stream=stream,
        run_id=context.run_id,
        epoch=context.epoch,
        data_rank=ranks.rank,
        num_data_ranks=ranks.size,
    )
    group = TrainGroup(
        trainer,
        ranks,
        receiver,
        board,
        runtime=config.runtime,
        stop=stop,
        ledger=context.run_dir / "logs" / f"ledger-{stream}.jsonl",
        source=source,
    )
    if server is not None:
        server.start()
    board.enter("idle", "a grid or a request")
    try:
        group.run()
    finally:
        receiver.close()
        if server is not None:
            server.stop()
    ranks.close()
