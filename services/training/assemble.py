"""The parts every train process is assembled from: join the group, check the model, serve until told to stop."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from loguru import logger

from services.config.context import RunContext
from services.config.schema import Config
from services.config.train import TrainModelConfig
from services.model.backbone import Backbone
from services.model.layout import PackedLayout
from services.model.mesh import Mesh
from services.model.selftest import Hidden, check_packing
from services.runtime.auth import grid_key
from services.runtime.commits import Commits
from services.training.board import StatusBoard
from services.training.checkpoint import load, seed_anew
from services.training.control import ServerThread
from services.training.farewell import Farewell
from services.training.group import CommandSource, Trainer, TrainGroup
from services.training.parts import Part
from services.training.ranks import Ranks
from services.training.saver import Saver
from services.training.sleeper import Sleeper
from services.transport.grid_receiver import GridReceiver
from services.wire.errors import PreflightError
from services.wire.grids import Stream

SAME = 1e-6
"""Ranks that share experts do their rows in another order: hidden states may differ by rounding."""


def join_group(role: str, config: Config, layout: TrainModelConfig) -> tuple[Ranks, Mesh, StatusBoard]:
    """Join the torchrun group in its layout and make its status board, with every rank's pid on it."""
    if config.deployment.device == "cpu":
        torch.set_num_threads(1)
    startup_deadline_s = config.runtime.startup_deadline_s  # rank 0 loads the model while the others wait for it
    ranks = Ranks.join(deadline_s=startup_deadline_s, device=config.deployment.device)
    mesh = Mesh.join(cp=layout.cp, ep=layout.ep, device=_local_device(config))
    ranks.set_deadline(startup_deadline_s, mesh.groups)
    board = StatusBoard(role)
    board.progress(pids=[row[0] for row in ranks.gather_ints([os.getpid()])])
    return ranks, mesh, board


def _local_device(config: Config) -> torch.device:
    """Where this rank's model lives: the CPU, or the GPU of its local rank."""
    if config.deployment.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def check_model(backbone: Backbone, hidden: Hidden, ranks: Ranks, *, head: torch.Tensor | None = None) -> None:
    """Packed equals alone on the real model in its layout, and every rank has the same numbers.

    Args:
        backbone: The model.
        hidden: Its hidden states by the module that was sharded around it.
        ranks: The group.
        head: A value head's whole weight.

    Raises:
        ConfigError: when the architecture cannot be packed.
        PreflightError: when the ranks' weights differ.
    """
    model, mesh = backbone.model, backbone.mesh
    name, vocab_size = type(model).__name__, model.config.vocab_size
    worst = check_packing(hidden, vocab_size, name=name, mesh=mesh, dtype=backbone.dtype)
    row = torch.arange(1, 9, device=mesh.device) * 11 % vocab_size
    with torch.no_grad():
        states = hidden(row, PackedLayout.of([8], mesh.device)).double()
    sums = [float(states.sum()), float(states.square().sum())]
    rows = ranks.gather_f64(sums)
    scale = max(abs(total) for row_ in rows for total in row_)
    if any(abs(x - y) > SAME * scale for other in rows for x, y in zip(other, sums, strict=True)):
        raise PreflightError(f"ranks start from different weights: {rows}")
    if head is not None:
        heads = ranks.gather_f64([float(head.double().sum()), float(head.double().square().sum())])
        if any(other != heads[0] for other in heads):
            raise PreflightError(f"ranks start from different value heads: {heads}")
    logger.info("packed equals alone within {:.1e}; {} rank(s) start equal", worst, ranks.size)


def resume(part: Part, board: StatusBoard, context: RunContext, *, seed: int) -> bool:
    """Continue from the commit that the run starts from, if it does; every rank calls it, as the last thing it loads.

    Args:
        part: The role in its layout, as it starts without a commit.
        board: Told how many steps are done.
        context: Names the commit.
        seed: The run's.

    Returns:
        Whether there was a commit.
    """
    if context.commit_dir is None:
        seed_anew(seed, 0, part.ranks.rank)
        return False
    folder = Path(context.commit_dir)
    step = int(folder.name.removeprefix("step_"))
    with Commits(folder.parent).reading(step, verify=()) as commit:  # `load` hashes its share
        state = load(commit.role(part.role), part, seed=seed)
    board.progress(steps_done=state.steps_done, updates_done=state.num_updates)
    return True


def serve_group(
    trainer: Trainer,
    ranks: Ranks,
    mesh: Mesh,
    board: StatusBoard,
    config: Config,
    context: RunContext,
    *,
    stream: Stream,
    grid_url: str,
    stop: threading.Event,
    server: ServerThread | None,
    saver: Saver,
    sleeper: Sleeper,
    source: CommandSource | None = None,
) -> None:
    """Receive grids and follow commands until `stop`; rank 0 also listens on HTTP.

    Where roles take turns on a device, the group is asleep before anybody can ask it for anything.
    """
    if config.deployment.sharing != "none":
        with ranks.during("the start", collective="a collective"):
            sleeper.fall_asleep()
    ranks.set_deadline(config.runtime.collective_deadline_s, mesh.groups)
    receiver = None
    if mesh.cp_rank == 0:
        receiver = GridReceiver(
            grid_url,
            stream=stream,
            run_id=context.run_id,
            epoch=context.epoch,
            data_rank=mesh.data_rank,
            num_data_ranks=mesh.num_data_ranks,
            first_step=board.steps_done,
            key=grid_key(context.token_file),
        )
    group = TrainGroup(
        trainer,
        ranks,
        mesh,
        receiver,
        board,
        runtime=config.runtime,
        farewell=Farewell(stop, board, context.orchestrator_url, grace_s=config.runtime.shutdown_grace_s),
        ledger=context.run_dir / "logs" / f"ledger-{stream}.jsonl",
        saver=saver,
        sleeper=sleeper,
        source=source,
    )
    if not sleeper.is_asleep:
        board.enter("idle", "a grid or a request")
    if server is not None:
        server.start()
    try:
        group.run()
    finally:
        if receiver is not None:
            receiver.close()
        if server is not None:
            server.stop()
    ranks.close()
