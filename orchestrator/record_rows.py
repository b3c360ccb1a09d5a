"""Rows for pretraining a critic, from rollouts of the configured environments by the configured model.

    RUN_DIR/rows/rows.jsonl, manifest.json

Notable:
- Rollouts, admission and shaping are a run's own; nobody scores and nobody trains. Dropped rollouts are counted by
  cause, and others take their place.
- A return is what came after, by the run's gamma: no value of any critic is in it. With `algorithm.truncation` =
  "bootstrap" nobody knows the return of a cut trace: these are dropped and counted.
- Suffixes: of each rollout with a second turn one turn boundary is drawn, the environment brought to where it was, and
  the episode ended anew so many times (arXiv 2603.21383). The mean over these is what the state at the cut is worth.
- The files get their names when they are complete.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from loguru import logger

from orchestrator.admission import Outcomes
from orchestrator.algorithms.credit import TRUNCATED, token_rewards
from orchestrator.algorithms.gae import skip_observation_gae
from orchestrator.environments import build_training
from orchestrator.producer import Group, Producer
from orchestrator.record_cuts import Cut, CutTasks, KnownTasks, cuts_of
from orchestrator.tasks import TaskStream
from orchestrator.tokenizer import Tokenizer
from services.config.context import RunContext, load_run
from services.config.env_settings import shaped_range
from services.config.exported import tokenizer_sha256
from services.config.schema import Config
from services.inference.client import EngineClient
from services.runtime.durable import rename_dir, write_atomic
from services.runtime.lifecycle import install_stop_handlers, run_process
from services.runtime.progress import Progress, ProgressFile
from services.wire.samples import TrainingSample
from services.wire.value_rows import MANIFEST, FileFacts, RowsManifest, ValueRow, encode_row, write_manifest

FOLDER, ROWS = "rows", "rows.jsonl"
EXIT_TERMINATED = 143
POLL_S = 0.2


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    rows: int
    """whole rollouts"""
    suffixes: int
    """of each one's prefix; 0 = none"""
    policy_id: str


class RowsFile:
    """The rows as they come, in a folder that gets its name at the end."""

    def __init__(self, run_dir: Path) -> None:
        self._out = run_dir / FOLDER
        self._part = run_dir / f".{FOLDER}.part"
        self._part.mkdir()
        self._file = (self._part / ROWS).open("wb")
        self._digest = hashlib.sha256()
        self.num_rows = 0
        self._least, self._most = np.inf, -np.inf

    def add(self, row: ValueRow, outcome: float) -> None:
        """Write one row.

        Args:
            row: Complete.
            outcome: Its trace's reward, as an algorithm would see it.
        """
        line = encode_row(row)
        self._file.write(line)
        self._digest.update(line)
        self.num_rows += 1
        self._least, self._most = min(self._least, outcome), max(self._most, outcome)

    def close(self, config: Config, model_dir: Path) -> Path:
        """Write the manifest and give the folder its name.

        Raises:
            CannotWrite: the disk does not take it.
        """
        self._file.close()
        bounds = [shaped_range(env) for env in config.env]
        known = [bound for bound in bounds if bound is not None]
        if len(known) < len(bounds):  # an environment that does not say where its rewards lie
            known.append((float(self._least), float(self._most)))
        manifest = RowsManifest(
            files={ROWS: FileFacts(self._digest.hexdigest(), self.num_rows)},
            tokenizer_sha256=tokenizer_sha256(model_dir),
            gamma=getattr(config.algorithm, "gamma", 1.0),
            reward_range=[min(low for low, _ in known), max(high for _, high in known)],
            truncation=config.algorithm.truncation,
        )
        write_atomic(self._part / MANIFEST, write_manifest(self._part, manifest))
        rename_dir(self._part, self._out)
        return self._out


def row_of(sample: TrainingSample, *, name: str, policy_id: str, gamma: float, cut: Cut | None = None) -> ValueRow:
    """One trainable branch as a row.

    Args:
        sample: With its shaped reward; of a suffix its prefix is prompt.
        name: The row's id.
        policy_id: Who sampled.
        gamma: Discount.
        cut: What the sample continues.
    """
    branch, prefix = sample.branch, {}
    mask = branch.action_mask.astype(int)
    if cut is not None:
        mask[: len(cut.action_mask)] = cut.action_mask  # what was sampled there was; the reader masks it
        prefix = {"prefix_tokens": len(cut.action_mask), "suffix_of": cut.name}
    returns = None
    if branch.step_rewards is not None:
        zeros = np.zeros(sample.num_tokens)
        _, targets = skip_observation_gae(zeros, branch.action_mask, token_rewards(sample), gamma=gamma, lam=1.0)
        returns = targets.tolist()
    return ValueRow(
        id=name,
        prompt_id=sample.prompt_id,
        policy_id=policy_id,
        token_ids=branch.token_ids.tolist(),
        action_mask=mask.tolist(),
        outcome=float(sample.reward) if returns is None else None,
        returns=returns,
        stop_reason=sample.stop_reason,
        **prefix,
    )


class RowsRecorder:
    """One recording."""

    def __init__(self, config: Config, context: RunContext, wanted: Wanted, engines: list[EngineClient]) -> None:
        """Prepare it; the engines are ready.

        Args:
            config: Of the run.
            context: Of the run.
            wanted: What to record.
            engines: Of the policy.
        """
        self._config, self._context, self._wanted, self._engines = config, context, wanted, engines
        self._tokenizer = Tokenizer(Path(context.model_dir))
        self._gamma = getattr(config.algorithm, "gamma", 1.0)
        self._rows = RowsFile(context.run_dir)
        self._progress = ProgressFile(context.run_dir)
        self._dropped: Counter[str] = Counter()
        self._num_done = self._num_total = 0
        self._cuts: list[Cut] = []

    async def run(self) -> Path:
        """Record; the folder with the files.

        Raises:
            BadData: too many rollouts are invalid.
            DependencyLost: the engine is gone.
        """
        self._num_total = self._wanted.rows
        await self._whole_rollouts()
        if self._wanted.suffixes:
            self._num_total += len(self._cuts) * self._wanted.suffixes
            await self._continued()
        folder = self._rows.close(self._config, Path(self._context.model_dir))
        self._show(f"{self._rows.num_rows} rows", is_finished=True)
        logger.info("recorded {} rows in {}; dropped: {}", self._rows.num_rows, folder, self._told_drops())
        return folder

    async def _whole_rollouts(self) -> None:
        config = self._config
        tasks = KnownTasks([(build_training(env, self._tokenizer), env) for env in config.env], config.seed)
        outcomes = self._outcomes()
        producer = self._producer(
            tasks,
            outcomes,
            config.orchestrator.group_size,
            lambda pending: self._num_done + pending < self._wanted.rows,
        )
        async with self._running(producer):
            while self._num_done < self._wanted.rows:
                group = await producer.next_group()
                producer.poke()
                task = tasks.given.pop(group.traces[0].group_id)
                self._take(group, outcomes, lambda sample, branch: self._write(sample, _name(sample, branch), None))
                if self._wanted.suffixes:
                    self._cuts += cuts_of(group, task, seed=config.seed)

    async def _continued(self) -> None:
        tasks, outcomes = CutTasks(self._cuts), self._outcomes()
        producer = self._producer(tasks, outcomes, self._wanted.suffixes, lambda _pending: tasks.num_left > 0)

        def write(sample: TrainingSample, branch: int) -> None:
            cut = tasks.cut_of(sample.group_id)
            number = sample.trace_id.rpartition("/")[2]
            self._write(sample, f"{cut.name}/{number}" + (f"/{branch}" if branch else ""), cut)

        async with self._running(producer):
            while tasks.num_left or producer.num_in_flight or producer.num_ready:  # a group may lose all its rollouts
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await producer.ready()
                while producer.num_ready:
                    self._take(await producer.next_group(), outcomes, write)

    @contextlib.asynccontextmanager
    async def _running(self, producer: Producer) -> AsyncIterator[None]:
        """Rollouts go on within the block."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(producer.run())
            yield
            task.cancel()

    def _producer(
        self, tasks: TaskStream, outcomes: Outcomes, group_size: int, may_start: Callable[[int], bool]
    ) -> Producer:
        config = self._config
        concurrent = max(group_size, config.orchestrator.max_concurrent_rollouts)
        changes = {"group_size": group_size, "max_concurrent_rollouts": concurrent}
        return Producer(
            config.orchestrator.model_copy(update=changes),
            tasks,
            list(self._engines),
            None,
            outcomes,
            seed=config.seed,
            max_tokens=config.value.model.seq_len if config.value is not None else config.policy.model.seq_len,
            min_group=1,
            may_start=may_start,
            max_token_id=self._tokenizer.max_token_id,
        )

    def _outcomes(self) -> Outcomes:
        orchestrator = self._config.orchestrator
        return Outcomes(
            max_bad_fraction=orchestrator.max_bad_fraction,
            window=orchestrator.bad_window,
            num_concurrent=orchestrator.max_concurrent_rollouts,
        )

    def _take(self, group: Group, outcomes: Outcomes, write: Callable[[TrainingSample, int], None]) -> None:
        """Write a finished group's rows."""
        branches: Counter[str] = Counter()
        for sample in group.samples:
            if self._config.algorithm.truncation == "bootstrap" and sample.stop_reason in TRUNCATED:
                self._dropped["truncated"] += 1
            else:
                write(sample, branches[sample.trace_id])
            branches[sample.trace_id] += 1
        self._num_done += len(group.traces)
        self._dropped.update(outcomes.take_counts())
        drops = self._told_drops()
        self._show(f"{self._rows.num_rows} rows" + (f", dropped: {drops}" if self._dropped else ""))

    def _write(self, sample: TrainingSample, name: str, cut: Cut | None) -> None:
        row = row_of(sample, name=name, policy_id=self._wanted.policy_id, gamma=self._gamma, cut=cut)
        self._rows.add(row, sample.reward)

    def _told_drops(self) -> str:
        return ", ".join(f"{count} {cause}" for cause, count in self._dropped.most_common()) or "none"

    def _show(self, note: str, *, is_finished: bool = False) -> None:
        progress = Progress(self._num_done, self._num_total, "rollouts", note, is_finished)
        self._progress.show(progress, now=is_finished)


def _name(sample: TrainingSample, branch: int) -> str:
    return f"{sample.trace_id}/{branch}" if branch else sample.trace_id


async def conduct(run_dir: Path, wanted: Wanted) -> None:
    """Record; at SIGTERM or SIGINT end without files."""
    this, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert this is not None
    config, context = load_run(run_dir)
    stop = install_stop_handlers(lambda: loop.call_soon_threadsafe(this.cancel))
    tokenizer = Tokenizer(Path(context.model_dir))
    clear_cache = config.inference.clear_cache_on_update
    engines = [
        EngineClient(url, eos_token_id=tokenizer.eos_token_id, clear_cache=clear_cache)
        for url in context.inference_urls
    ]
    try:
        async with asyncio.TaskGroup() as ready:
            for engine in engines:
                ready.create_task(engine.wait_ready(config.runtime.startup_deadline_s))
        await RowsRecorder(config, context, wanted, engines).run()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        sys.exit(EXIT_TERMINATED)
    finally:
        for engine in engines:
            await engine.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    parser.add_argument("--rows", type=int, required=True, help="whole rollouts")
    parser.add_argument("--suffixes", type=int, default=0, help="of each one's prefix")
    parser.add_argument("--policy-id", required=True, help="who samples")
    args = parser.parse_args()
    wanted = Wanted(args.rows, args.suffixes, args.policy_id)
    run_process("recorder", args.run_dir, lambda: uvloop.run(conduct(args.run_dir, wanted)))


if __name__ == "__main__":
    main()
