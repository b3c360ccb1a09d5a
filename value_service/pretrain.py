"""A critic trained on files of recorded returns: one torchrun group, no grids over sockets, no HTTP.

Notable:
- The critic, its layout, its optimizer step and its checkpoint are those of the value service. Every data rank reads
  the whole batch and builds the same grid, of which it takes its own item: so the gradient is the same in any layout.
- Targets are the files' returns (value lambda 1); there is no old value, so nothing is clipped to one.
- A commit holds the critic and how many batches it has seen; what comes next follows from that number, the seed and the
  files. A run that goes on from it has the same bits as one that was never interrupted.
- SIGTERM: commit after the update under way, then end.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from loguru import logger

from services.config.context import RunContext, load_run
from services.config.corpus import manifests_of
from services.config.identity import identity_of
from services.config.schema import Config
from services.model.mesh import Mesh
from services.model.shard import whole_tensor
from services.packing.cost import cost_of_role
from services.packing.grid import build_grid
from services.runtime.commits import Commits
from services.runtime.durable import write_atomic
from services.runtime.lifecycle import install_stop_handlers, run_rank
from services.runtime.manifests import write_manifest
from services.runtime.progress import Progress, ProgressFile
from services.training.assemble import check_model, join_group, resume
from services.training.checkpoint import save
from services.training.optimizer import add_sums
from services.training.parts import Part, divided_in_critic
from services.training.preflight import agree
from services.training.ranks import Ranks
from services.wire.errors import ConfigError
from services.wire.grids import GridItem
from services.wire.samples import TrainingSample
from services.wire.value_rows import read_manifest
from value_service.build import build_critic
from value_service.losses import FitMoments, TraceFit, summarize
from value_service.pretrain_data import Batches, RowIndex, RowReader, build_index
from value_service.pretrain_export import export_pretrained
from value_service.updater import Updater

DATA_ROLE, DATA_STATE = "data", "state.json"
_AT_SCORING = "value/explained_variance_at_scoring"
"""Nobody scored the rows: the updater's row has it all the same."""


class DataState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`state.json` of the role "data"."""

    format: int = 1
    num_done: int
    """batches"""
    corpus: dict[str, Any]
    """what a run that goes on must agree with"""
    metrics_bytes: int
    time_s: float
    """since the start, earlier starts included"""


class Rows:
    """`metrics.jsonl` of a pretraining run, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._path.stat().st_size if self._path.exists() else 0

    def cut(self, num_bytes: int) -> None:
        """Go on after so many bytes."""
        if self._path.exists():
            os.truncate(self._path, min(num_bytes, self.num_bytes))

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; floats are rounded to nine digits, what is not finite is left out."""
        clean = {
            name: float(f"{value:.9g}") if isinstance(value, float) else value
            for name, value in row.items()
            if not (isinstance(value, float) and not abs(value) < float("inf"))
        }
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(clean) + b"\n")


class Pretraining:
    """The run, on every rank."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        part: Part,
        updater: Updater,
        index: RowIndex,
        *,
        vocab_size: int,
    ) -> None:
        """Begin at the first batch, or where the commit of `context` was.

        Args:
            config: As `services.config.corpus.pretraining_config` makes it.
            context: Of the run.
            part: The critic in its layout, its commit loaded already.
            updater: Its trainer.
            index: Of the rows, the same on every rank.
            vocab_size: Ids that the model knows.

        Raises:
            ConfigError: the commit is of other rows.
        """
        assert config.value is not None and config.value.pretrain is not None
        self._config, self._value, self._settings = config, config.value, config.value.pretrain
        self._context, self._part, self._updater, self._index = context, part, updater, index
        self._ranks: Ranks = part.ranks
        self._mesh: Mesh = part.mesh
        self._reader = RowReader(index, vocab_size=vocab_size, max_tokens=config.value.model.seq_len)
        self.batches = Batches(
            index.training, seed=config.seed, batch_size=self._settings.batch_size, epochs=self._settings.epochs
        )
        self._corpus = corpus_of(config)
        self._commits = Commits(context.run_dir / "checkpoints")
        self._rows, self._progress = Rows(context.run_dir / "metrics.jsonl"), ProgressFile(context.run_dir)
        self._started = time.monotonic()
        self.num_done = 0
        self._committed = self._measured = -1
        self.held_out: float | None = None
        """explained variance of all held-out tokens when they were measured last"""
        if context.commit_dir is not None:
            self._go_on_from(Path(context.commit_dir))

    def _go_on_from(self, commit: Path) -> None:
        state = msgspec.json.decode((commit / DATA_ROLE / DATA_STATE).read_bytes(), type=DataState)
        problems = [
            f"value.pretrain: {key} is {self._corpus[key]!r}, in {commit} it was {before!r}; fix: give what it was"
            for key, before in state.corpus.items()
            if self._corpus[key] != before
        ]
        if problems:
            raise ConfigError(problems)
        self.num_done = self._committed = state.num_done
        self._started = time.monotonic() - state.time_s
        if self._ranks.rank == 0:
            self._commits.sweep()
            self._rows.cut(state.metrics_bytes)

    def run(self, stop: threading.Event) -> bool:
        """Train to the end, or until `stop` is set on some rank; then commit.

        Returns:
            Whether it is the end.
        """
        self._show("")
        for position, numbers in self.batches.rest(self.batches.position(self.num_done)):
            self._update(numbers, epoch=(self.num_done // self.batches.per_epoch))
            assert self.batches.position(self.num_done) == position
            interval = self._settings.eval_interval_updates
            if interval and self.num_done % interval == 0:
                self._measure()
            is_stopping = any(row[0] for row in self._ranks.gather_ints([int(stop.is_set())]))
            if is_stopping or self._config.checkpoint.is_due(self.num_done):
                self.commit()
            if is_stopping:
                return False
        self._measure()
        self.commit()
        return True

    def finish(self) -> None:
        """Say that everything is there (rank 0)."""
        self._show("exported", is_finished=True)

    def _update(self, numbers: Any, *, epoch: int) -> None:
        """One optimizer step on one batch."""
        step = self.num_done
        with self._ranks.during(f"update {step}", collective="a forward or backward pass"):
            item = self._item(self._reader.read(numbers), step)
            row = self._updater.train(item)
        self.num_done += 1
        if self._ranks.rank == 0:
            row.pop(_AT_SCORING)
            self._rows.write(self._place("pretrain") | {"epoch": epoch, "rows": len(numbers)} | row)
            self._show(_seen(row))

    def _item(self, samples: list[TrainingSample], step: int) -> GridItem:
        """This data rank's part of the grid, the same on all ranks that share it."""
        value, mesh = self._value, self._mesh
        items = build_grid(
            samples,
            stream="critic",
            seq_len=value.model.seq_len,
            num_data_ranks=mesh.num_data_ranks,
            run_id=self._context.run_id,
            epoch=self._context.epoch,
            step=step,
            policy_version=0,
            temperature=1.0,
            loss_name=value.loss.type,
            loss_constants=value.loss.loss_constants(),
            cost=cost_of_role(value.packing, Path(self._context.model_dir), has_vocabulary=False),
            max_samples=value.packing.max_samples,
        )
        item = items[mesh.data_rank]
        agree(step, item, self._ranks, cp=mesh.cp)
        return item

    def _measure(self) -> None:
        """Fit on the held-out rows: a metrics row of all of them, and one of each policy."""
        if self._measured == self.num_done:
            return
        self._measured = self.num_done
        all_tokens, all_traces, all_sums = FitMoments(), TraceFit(), dict[str, float]()
        rows = []
        for policy, name in enumerate(self._index.policies):
            numbers = self._index.held_out(policy)
            if not len(numbers):
                continue
            tokens, traces, sums = self._fit_of(numbers)
            rows.append({"policy_id": name, "rows": len(numbers)} | summarize(sums, tokens, None, traces))
            all_tokens, all_traces = all_tokens.merge(tokens), all_traces.merge(traces)
            add_sums(all_sums, sums)
        if not rows or self._ranks.rank != 0:
            return
        overall = summarize(all_sums, all_tokens, None, all_traces)
        self.held_out = overall["value/explained_variance"]
        for row in ({"rows": sum(row["rows"] for row in rows)} | overall, *rows):
            self._rows.write(self._place("held_out") | row)
        logger.info("held out after {} updates: {}", self.num_done, _seen(overall))
        self._show(f"held out: {_seen(overall)}", now=True)

    def _fit_of(self, numbers: Any) -> tuple[FitMoments, TraceFit, dict[str, float]]:
        """Pooled over all ranks."""
        tokens, traces, sums = FitMoments(), TraceFit(), dict[str, float]()
        with self._ranks.during("a measurement", collective="a forward pass"):
            for start in range(0, len(numbers), self._settings.batch_size):
                samples = self._reader.read(numbers[start : start + self._settings.batch_size])
                more_tokens, more_traces, more_sums = self._updater.measure(self._item(samples, self.num_done))
                tokens, traces = tokens.merge(more_tokens), traces.merge(more_traces)
                add_sums(sums, more_sums)
            pooled = [
                FitMoments.pooled(self._ranks.gather_f64(fit.to_list())) for fit in (tokens, traces.means, traces.first)
            ]
            shares = self._ranks.gather_bytes(np.array(traces.pairs, dtype="<f8").tobytes())
            pairs = np.frombuffer(b"".join(shares), dtype="<f8").reshape(-1, 2).tolist()
            total: dict[str, float] = {}
            for row in self._ranks.gather_bytes(msgspec.msgpack.encode(sums)):
                add_sums(total, msgspec.msgpack.decode(row, type=dict[str, float]))
        return pooled[0], TraceFit(pooled[1], pooled[2], tuple((y, v) for y, v in pairs)), total

    def commit(self) -> None:
        """Commit critic and position; every rank calls it.

        Raises:
            CannotWrite: the disk does not take it.
        """
        if self._committed == self.num_done:
            return
        step, is_first = self.num_done, self._ranks.rank == 0
        part = self._context.run_dir / "checkpoints" / f".step_{step:06d}.part"
        if is_first:
            self._commits.begin(step)
        self._ranks.all_true(True)  # the folder is there
        save(part / "critic", self._part, steps_done=step)
        if is_first:
            write_manifest(part / "critic", {"role": "critic", "step": step, "steps_done": step})
            (part / DATA_ROLE).mkdir()
            state = DataState(
                num_done=step,
                corpus=self._corpus,
                metrics_bytes=self._rows.num_bytes,
                time_s=time.monotonic() - self._started,
            )
            write_atomic(part / DATA_ROLE / DATA_STATE, msgspec.json.encode(state))
            write_manifest(part / DATA_ROLE, {"num_done": step})
            identity = identity_of(self._config, Path(self._context.model_dir))
            run = {"run_id": self._context.run_id, "epoch": self._context.epoch}
            self._commits.commit(step, ("critic", DATA_ROLE), identity=identity, **run)
            keep = self._config.checkpoint
            self._commits.prune(keep_last=keep.keep_last, keep_every=keep.keep_every_steps)
        self._ranks.all_true(True)  # nobody ends before it is whole
        self._committed = step

    def _place(self, stream: str) -> dict[str, Any]:
        """What every metrics row begins with; `step` counts updates from 0."""
        time_s = round(time.monotonic() - self._started, 3)
        return {"step": self.num_done - 1, "stream": stream, "time_s": time_s}

    def _show(self, note: str, *, now: bool = False, is_finished: bool = False) -> None:
        if self._ranks.rank == 0:
            progress = Progress(self.num_done, self.batches.num_updates, "updates", note, is_finished)
            self._progress.show(progress, now=now or is_finished)


def corpus_of(config: Config) -> dict[str, Any]:
    """What the position of a commit speaks of: a run that goes on from it must have the same; epochs may be more."""
    assert config.value is not None and config.value.pretrain is not None
    pretrain = config.value.pretrain
    sums = [read_manifest(Path(name))[1].sha256 for name in pretrain.files]
    return {
        "files": hashlib.sha256("\n".join(sums).encode()).hexdigest()[:16],
        "held_out_fraction": pretrain.held_out_fraction,
        "batch_size": pretrain.batch_size,
    }


def _seen(row: dict[str, Any]) -> str:
    """What a person wants to see of a row while it goes by."""
    names = {"loss": "value/loss", "EV": "value/explained_variance"}
    return " ".join(f"{short} {row[name]:.4f}" for short, name in names.items() if row.get(name) is not None)


def shared_index(config: Config, ranks: Ranks, *, vocab_size: int) -> RowIndex:
    """The index of all rows on every rank; rank 0 alone reads the files for it.

    Raises:
        ConfigError: bad rows, each with file and line.
    """
    assert config.value is not None and config.value.pretrain is not None
    data = None
    if ranks.rank == 0:
        started, pretrain = time.monotonic(), config.value.pretrain
        index = build_index(
            pretrain.files,
            seed=config.seed,
            held_out_fraction=pretrain.held_out_fraction,
            vocab_size=vocab_size,
            max_tokens=config.value.model.seq_len,
        )
        num_held_out = len(index) - len(index.training)
        logger.info("checked {} rows in {:.1f} s, {} held out", len(index), time.monotonic() - started, num_held_out)
        if not num_held_out:
            logger.warning("no row is held out: nothing will tell how the critic does on prompts it has not seen")
        data = index.to_bytes()
    return RowIndex.from_bytes(ranks.broadcast_bytes(data))


def run(run_dir: Path) -> None:
    """Everything one rank does."""
    stop = install_stop_handlers()
    config, context = load_run(run_dir)
    assert config.value is not None
    ranks, mesh, board = join_group("critic", config, config.value.model)
    with ranks.during("the start", collective="a collective"):
        manifests_of(config, Path(context.model_dir))
        backbone, critic = build_critic(config, context, mesh)
        check_model(backbone, critic.hidden, ranks, head=whole_tensor(critic.head.weight))
        interval_steps = config.monitor.movement_interval_steps
        updater = Updater(critic, ranks, mesh, config.value, movement_interval_steps=interval_steps)
        part = Part("critic", critic, updater.optimizer, mesh, ranks, divided_in_critic(backbone))
        resume(part, board, context, seed=config.seed)
        vocab_size = backbone.model.config.vocab_size
        index = shared_index(config, ranks, vocab_size=vocab_size)
    ranks.set_deadline(config.runtime.collective_deadline_s, mesh.groups)
    pretraining = Pretraining(config, context, part, updater, index, vocab_size=vocab_size)
    is_end = pretraining.run(stop)
    ranks.close()
    if is_end and ranks.rank == 0:
        export_pretrained(run_dir, pretraining.num_done, index, held_out=pretraining.held_out)
        pretraining.finish()


def main() -> None:
    """Entry point of each rank."""
    run_rank("value", run, description=__doc__)


if __name__ == "__main__":
    main()
