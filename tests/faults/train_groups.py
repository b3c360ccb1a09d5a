"""A critic group of two real ranks for tests that hurt it: its grids, its processes, and what it says as it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.config.context import RunContext
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.blame import Blame, find_blame
from services.launch.models import MODELS_DIR
from services.launch.partial import PartialRun, partial_run
from services.packing.grid import build_grid
from services.runtime.lifecycle import FailureRecord, read_failures
from services.runtime.logs import log_path
from services.transport.grid_sender import GridSender
from services.wire.grids import GridItem
from tests.runs import ROOT, get, processes_of, wait_until
from tests.samples import make_sample

RUN_ID = "hurt"
SEQ_LEN = 64
DEADLINE_S = 4.0
"""`runtime.collective_deadline_s`."""
MARGIN_S = 8.0
"""For threads to be joined and interpreters to end on a loaded machine."""
ENDLESS = ("value.updates_per_batch", "100000")
"""Makes a step that nobody waits for the end of."""


def config_of(run_dir: Path, model: Path, *settings: tuple[str, str]) -> Config:
    """The demo's critic with short deadlines and a seeded head that is not zero."""
    overrides = [
        ("run.dir", str(run_dir)),
        ("model.path", str(model)),
        ("value.head.init_std", "0.1"),
        ("value.model.seq_len", str(SEQ_LEN)),
        ("value.updates_per_batch", "1"),
        ("inference.max_model_len", "64"),
        ("runtime.collective_deadline_s", str(DEADLINE_S)),
        ("runtime.heartbeat_s", "0.5"),
        ("runtime.shutdown_grace_s", "3"),
    ]
    return resolve([ROOT / "configs" / "demo" / "sao.toml"], [*overrides, *settings]).config


def grid(step: int = 0, *, run_id: str = RUN_ID, extreme: float | None = None) -> list[GridItem]:
    """Six samples of 7 to 12 tokens with targets of 1 and 0; with `extreme`, that is what one of sample 4 is."""
    samples = []
    for number in range(6):
        size = 4 + number
        sample = make_sample([1] * size, values=[0.0] * size, trace_id=f"t{number}", prompt=3)
        sample.returns = np.where(sample.branch.action_mask, float(number % 2), 0.0)
        if extreme is not None and number == 4:
            sample.returns[-1] = extreme
        samples.append(sample)
    return build_grid(
        samples,
        stream="critic",
        seq_len=SEQ_LEN,
        num_data_ranks=2,
        run_id=run_id,
        epoch=1,
        step=step,
        policy_version=step,
        temperature=1.0,
        loss_name="mse",
        loss_constants={},
    )


def send(context: RunContext, items: list[GridItem], *, deadline_s: float = 60) -> None:
    """Deliver a grid as the orchestrator does."""

    async def deliver() -> None:
        assert context.critic_grid_url is not None
        sender = GridSender(context.critic_grid_url, stream="critic", run_id=context.run_id, epoch=1, num_data_ranks=2)
        try:
            await sender.send(items, deadline_s=deadline_s)
        finally:
            await sender.close()

    asyncio.run(deliver())


@dataclass
class Group:
    """A running critic group."""

    context: RunContext
    pids: list[int]
    """by rank"""
    run: PartialRun | None = None
    """None where a launcher owns it"""

    @staticmethod
    def when_ready(context: RunContext, run: PartialRun | None = None) -> Group:
        """Wait for it."""
        url = context.value_url
        wait_until(lambda: get(f"{url}/readyz") is not None, deadline_s=120, what="the critic")
        status = get(f"{url}/status")
        assert status is not None and len(status["pids"]) == 2
        return Group(context, status["pids"], run)

    def status(self) -> dict[str, Any]:
        """What rank 0 says about the group."""
        reply = get(f"{self.context.value_url}/status")
        assert reply is not None
        return reply

    def begin_step(self) -> None:
        """Send a grid and return when all ranks have begun to train on it."""
        send(self.context, grid(run_id=self.context.run_id))
        ledger = self.context.run_dir / "logs" / "ledger-critic.jsonl"
        wait_until(lambda: ledger.is_file() and ledger.stat().st_size > 0, deadline_s=30, what="the step to begin")
        time.sleep(0.5)  # the ledger is written right before the first update

    def blamed(self, *, within_s: float) -> Blame:
        """Whom a launcher would name, once the whole group has ended by itself."""
        run = self.run
        assert run is not None
        wait_until(run.fleet.exits, deadline_s=within_s, what="the group to end")
        blame = find_blame(self.context.run_dir, run.processes, run.fleet.exits())
        assert blame is not None
        return blame

    def log(self) -> str:
        """The output of the torchrun agent and of both ranks."""
        return log_path(self.context.run_dir, "value").read_text()


@contextmanager
def critic_group(run_dir: Path, model: Path, *settings: tuple[str, str]) -> Iterator[Group]:
    """Start a group and wait until it is ready; afterwards nothing of it may be left."""
    config = config_of(run_dir, model, *settings)
    with partial_run(config, ["value"], run_id=RUN_ID, models_dir=ROOT / MODELS_DIR) as run:
        group = Group.when_ready(run.plan.context, run)
        yield group
    assert not processes_of(run_dir)
    assert all(is_gone(pid) for pid in group.pids)


def record_of(run_dir: Path, rank: int, *, within_s: float) -> FailureRecord:
    """The failure record that a rank of the critic leaves."""
    found: list[FailureRecord] = []

    def is_there() -> bool:
        found[:] = [record for record in read_failures(run_dir) if record.name == f"value-{rank}"]
        return bool(found)

    wait_until(is_there, deadline_s=within_s, what=f"the failure record of rank {rank}")
    return found[0]


def is_gone(pid: int) -> bool:
    """Whether no living process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
