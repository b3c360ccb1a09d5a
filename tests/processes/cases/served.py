"""A group that follows commands in a case, while a thread beside rank 0 asks it for things over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from services.config.system import RuntimeConfig
from services.runtime.ports import PortReservation
from services.training.board import StatusBoard
from services.training.control import ServerThread, control_app
from services.training.farewell import Farewell
from services.training.group import TrainGroup
from services.training.ranks import Ranks
from services.training.saver import Saver
from services.training.sleeper import Sleeper
from services.transport.grid_receiver import GridReceiver
from tests.processes.cases.checkpoints import Role


def serve(
    role: Role,
    ranks: Ranks,
    board: StatusBoard,
    folder: Path,
    ask: Callable[[str], None],
    *,
    saver: Saver,
    sleeper: Sleeper | None = None,
) -> None:
    """Run the policy's group of two until `ask`, called on rank 0 with its URL, returns or raises."""
    stop = threading.Event()
    with PortReservation(["http", "grid"]) as reserved:
        url, grid_url = f"http://127.0.0.1:{reserved.ports['http']}", f"tcp://127.0.0.1:{reserved.ports['grid']}"
    receiver = GridReceiver(
        grid_url,
        stream="policy",
        run_id="run",
        epoch=1,
        data_rank=ranks.rank,
        num_data_ranks=2,
        first_step=board.steps_done,
    )
    group = TrainGroup(
        role.trainer,
        ranks,
        role.part.mesh,
        receiver,
        board,
        runtime=RuntimeConfig(),
        farewell=Farewell(stop, board, "http://127.0.0.1:1", grace_s=1.0),
        ledger=folder / "ledger.jsonl",
        saver=saver,
        sleeper=sleeper,
    )

    def run() -> None:
        try:
            ask(url)
        finally:
            stop.set()

    server = ServerThread(control_app(board, title="policy", saver=saver, sleeper=sleeper), url)
    asker = threading.Thread(target=run)
    if ranks.rank == 0:
        server.start()
        asker.start()
    group.run()
    receiver.close()
    if ranks.rank == 0:
        asker.join()
        server.stop()
