"""The dry run: every part of the training machinery on random weights, in about a minute, without learning anything.

    python scripts/dummy_run.py [CONFIG ...] [--section.key value]

Notable:
- Starts the real value service and policy trainer on unequal layouts and plays the orchestrator itself; no inference.
- Any model goes: `--model.path dummy:DIR` with a config.json and a tokenizer.json, or a folder with weights.
- Exit 0 only if every check holds; 70 names the first that does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from orchestrator.algorithms import build as build_algorithm
from orchestrator.producer import Group, score_group
from orchestrator.trainers import TrainClient
from services.config.context import RunContext
from services.config.layers import parse_overrides
from services.config.model_path import max_positions
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.cli import split_settings
from services.launch.partial import PartialRun, partial_run
from services.model.snapshot import verify_snapshot
from services.packing.grid import build_grid
from services.runtime.lifecycle import read_failures
from services.runtime.ports import is_free
from services.runtime.roots import project_root
from services.transport.grid_sender import GridSender
from services.transport.score_client import ScoreClient
from services.wire.errors import EXIT_BUG, EXIT_DONE, ConfigError, CounterpointError, DependencyLost
from services.wire.grids import GridItem
from services.wire.messages import ScoreReply
from services.wire.samples import Branch, StopReason, TrainingSample, VersionSpan

DEFAULT_CONFIG = "configs/demo/dummy.toml"
NUM_SINGLE, NUM_BURST = 6, 64
DEADLINE_S = 60.0
PARITY = {"float32": 1e-5, "bfloat16": 3e-2}
CHANGED = 1e-4
"""Values that training should have moved differ by more than this."""


@dataclass
class Finding:
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str
    took_s: float = 0.0


@dataclass
class Stage:
    """What the checks work with."""

    config: Config
    context: RunContext
    scorer: ScoreClient
    critic: TrainClient
    policy: TrainClient
    critic_sender: GridSender
    policy_sender: GridSender
    vocab_size: int
    rng: np.random.Generator
    samples: list[TrainingSample] = field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        """The longest branch that both roles take."""
        assert self.config.value is not None
        positions = max_positions(self.config.model.path) or 10**9
        return min(self.config.value.model.seq_len, self.config.policy.model.seq_len, positions)

    def branches(self, lengths: list[int]) -> list[list[int]]:
        """Random token ids."""
        return [self.rng.integers(self.vocab_size, size=length).tolist() for length in lengths]

    def mixed(self, num: int) -> list[list[int]]:
        """Branches of many lengths, 1 and the longest among them, in random order."""
        lengths = [1, self.max_tokens, *self.rng.integers(2, self.max_tokens, size=num - 2).tolist()]
        return self.branches([int(n) for n in self.rng.permutation(lengths)])

    async def score(self, branches: list[list[int]]) -> ScoreReply:
        """One request."""
        return await self.scorer.score(branches, deadline_s=DEADLINE_S)


# ---- the checks, in order ---------------------------------------------------------------------------------------


async def processes(stage: Stage) -> list[Finding]:
    critic, policy = await stage.critic.status(), await stage.policy.status()
    deployment = stage.config.deployment
    counts = len(critic.pids), len(policy.pids)
    ok = counts == (deployment.num_value_gpus, deployment.num_policy_gpus)
    return [
        Finding(
            "distinct processes",
            ok and len({*critic.pids, *policy.pids}) == sum(counts),
            f"critic DP {counts[0]}, policy DP {counts[1]}",
        )
    ]


async def sparse(stage: Stage) -> list[Finding]:
    before = (await stage.critic.status()).num_forwards
    pause_s = 1.2 * stage.config.runtime.heartbeat_s
    times_ms = []
    for number, branch in enumerate(stage.mixed(NUM_SINGLE)):
        await asyncio.sleep(pause_s if number % 2 else 0.05)
        started = time.monotonic()
        await stage.score([branch])
        times_ms.append(1000 * (time.monotonic() - started))
    num_forwards = (await stage.critic.status()).num_forwards - before
    detail = f"{NUM_SINGLE} requests, {num_forwards} forwards, {np.median(times_ms):.0f} ms each"
    return [Finding("single requests with pauses past a heartbeat", num_forwards == NUM_SINGLE, detail)]


async def burst(stage: Stage) -> list[Finding]:
    short = max(2, stage.max_tokens // 8)  # several requests fit one bin, whatever the number of ranks
    requests = [stage.branches(stage.rng.integers(1, short + 1, size=2).tolist()) for _ in range(NUM_BURST)]
    before = (await stage.critic.status()).num_forwards
    started = time.monotonic()
    replies = await asyncio.gather(*(stage.score(branches) for branches in requests))
    took_s = time.monotonic() - started
    num_forwards = (await stage.critic.status()).num_forwards - before
    tokens = sum(len(branch) for branches in requests for branch in branches)
    detail = f"{NUM_BURST} requests, {num_forwards} forwards a rank, {tokens / took_s:,.0f} tokens/s"
    findings = [Finding("a burst is packed together", num_forwards < NUM_BURST, detail)]
    some = stage.rng.choice(NUM_BURST, 4, replace=False).tolist()
    worst = 0.0
    for number in some:
        worst = max(worst, difference(replies[number], await alone(stage, requests[number])))
    return [*findings, parity(stage, "each reply of the burst belongs to its request", worst)]


async def order(stage: Stage) -> list[Finding]:
    branches = stage.mixed(16)
    batched = await stage.score(branches)
    spread = float(np.std(batched.bootstrap_values))
    findings = [parity(stage, "batched equals single, in order", difference(batched, await alone(stage, branches)))]
    reverse = await stage.score(branches[::-1])
    turned = ScoreReply(reverse.values[::-1], reverse.bootstrap_values[::-1], reverse.critic_step)
    findings.append(parity(stage, "the order of branches does not matter", difference(batched, turned)))
    return [*findings, Finding("values differ between branches", spread > 1e-3, f"standard deviation {spread:.3f}")]


async def critic_grid(stage: Stage) -> list[Finding]:
    """Score, credit and pack samples of uneven lengths; train on them while scoring goes on."""
    value = stage.config.value
    assert value is not None
    probe = stage.mixed(4)
    before = await stage.score(probe)
    stage.samples = await credited_samples(stage)
    items = grid(stage, "critic", value.model.seq_len, stage.config.deployment.num_value_gpus, value.loss.type, {})
    during = asyncio.create_task(keep_scoring(stage, probe))
    await stage.critic_sender.send(items, deadline_s=DEADLINE_S)
    row = await stage.critic.wait_step(0, deadline_s=DEADLINE_S)
    replies = [*await during, await stage.score(probe)]
    after = replies[-1]
    moved = difference(before, after)
    torn = max(difference(reply, after if reply.critic_step else before) for reply in replies)
    updates, expected = (await stage.critic.status()).updates_done, value.updates_per_batch
    loss, norm = row["value/loss"], row["value/grad_norm"]
    return [
        layout_finding("critic", items),
        Finding("the critic trained", np.isfinite(loss) and norm > 0, f"loss {loss:.3f}, gradient norm {norm:.3f}"),
        Finding("its updates", updates == expected and after.critic_step == 1, f"{updates} updates, critic step 1"),
        Finding("its values moved", moved > CHANGED, f"by up to {moved:.3f}"),
        parity(stage, f"{len(replies)} replies meanwhile, each from one state of the critic", torn),
    ]


async def policy_grid(stage: Stage) -> list[Finding]:
    """The same samples packed for the policy: one update, one snapshot."""
    policy, algorithm = stage.config.policy, stage.config.algorithm
    constants = algorithm.loss_constants()
    num_ranks = stage.config.deployment.num_policy_gpus
    items = grid(stage, "policy", policy.model.seq_len, num_ranks, algorithm.policy_loss, constants)
    await stage.policy_sender.send(items, deadline_s=DEADLINE_S)
    row = await stage.policy.wait_step(0, deadline_s=DEADLINE_S)
    published = (await stage.policy.status()).published
    version = await asyncio.to_thread(verify_snapshot, Path(published["path"]))
    size = sum(file.stat().st_size for file in Path(published["path"]).iterdir())
    loss, norm, ratio = row["policy/loss"], row["policy/grad_norm"], row.get("policy/ratio_mean", float("nan"))
    detail = f"loss {loss:.3f}, gradient norm {norm:.3f}, mean ratio {ratio:.2f}"
    return [
        layout_finding("policy", items),
        Finding("the policy trained", np.isfinite(loss) and norm > 0, detail),
        Finding("version 1 is complete and verified", version == 1, f"{size / 2**20:.1f} MiB"),
    ]


async def once_each(stage: Stage) -> list[Finding]:
    """What the groups wrote down about the items they trained."""
    findings = []
    for stream, client in (("critic", stage.critic), ("policy", stage.policy)):
        path = stage.context.run_dir / "logs" / f"ledger-{stream}.jsonl"
        rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        entries = [(row["step"], row["rank"]) for row in rows]
        num_ranks = len((await client.status()).pids)
        ok = entries == [(0, rank) for rank in range(num_ranks)] and len({row["item"] for row in rows}) == num_ranks
        findings.append(Finding(f"{stream}: one item per rank, trained once", ok, f"{len(rows)} in the ledger"))
    return findings


CHECKS: list[tuple[str, Callable[[Stage], Coroutine[Any, Any, list[Finding]]]]] = [
    ("looking at the processes", processes),
    ("sparse scoring", sparse),
    ("a burst of scoring", burst),
    ("order and parity", order),
    ("a critic grid, with scoring in between", critic_grid),
    ("a policy grid", policy_grid),
    ("the ledgers", once_each),
]


# ---- helpers of the checks --------------------------------------------------------------------------------------


def difference(one: ScoreReply, other: ScoreReply) -> float:
    """The largest difference between two replies to the same branches."""
    flat = [np.concatenate([*reply.values, reply.bootstrap_values]) for reply in (one, other)]
    return float(np.abs(flat[0] - flat[1]).max())


async def alone(stage: Stage, branches: list[list[int]]) -> ScoreReply:
    """Each branch by a request of its own, one after another."""
    replies = [await stage.score([branch]) for branch in branches]
    return ScoreReply([r.values[0] for r in replies], [r.bootstrap_values[0] for r in replies], replies[0].critic_step)


def parity(stage: Stage, name: str, worst: float) -> Finding:
    """Two ways to the same values agree."""
    limit = PARITY[stage.config.model.dtype]
    return Finding(name, worst <= limit, f"within {worst:.1e} (limit {limit:.0e})")


async def keep_scoring(stage: Stage, probe: list[list[int]]) -> list[ScoreReply]:
    """Score the same branches until a reply comes from the trained critic."""
    replies: list[ScoreReply] = []
    while not replies or not replies[-1].critic_step:
        replies += await asyncio.gather(*(stage.score(probe) for _ in range(3)))
        await asyncio.sleep(0.01)
    return replies


async def credited_samples(stage: Stage) -> list[TrainingSample]:
    """Random answers with random rewards: scored by one request, credited by the run's algorithm.

    One branch more than the critic has ranks, no two of which fit one bin: some ranks must fill up with dummies.
    """
    longest = stage.max_tokens
    lengths = np.linspace(longest, longest // 2 + 1, stage.config.deployment.num_value_gpus + 1).astype(int).tolist()
    samples = []
    for number, token_ids in enumerate(stage.branches(lengths)):
        num_prompt = max(1, len(token_ids) // 3)
        mask = np.arange(len(token_ids)) >= num_prompt
        branch = Branch(
            token_ids=np.array(token_ids, dtype=np.uint32),
            action_mask=mask,
            loss_mask=mask.copy(),
            logprobs=np.where(mask, -np.log(stage.vocab_size), 0.0).astype(np.float32),
            version_spans=[VersionSpan(num_prompt, len(token_ids), 0)],
        )
        samples.append(TrainingSample(f"{number}/0", str(number), branch, float(number % 2), StopReason.TERMINATED))
    await score_group(Group([], samples), stage.scorer, deadline_s=DEADLINE_S)
    build_algorithm(stage.config.algorithm).credit([[sample] for sample in samples])
    return samples


def grid(stage: Stage, stream, seq_len: int, num_data_ranks: int, loss: str, constants: dict) -> list[GridItem]:
    """The samples packed for one role."""
    return build_grid(
        stage.samples,
        stream=stream,
        seq_len=seq_len,
        num_data_ranks=num_data_ranks,
        run_id=stage.context.run_id,
        epoch=stage.context.epoch,
        step=0,
        policy_version=0,
        temperature=stage.config.orchestrator.temperature,
        loss_name=loss,
        loss_constants=constants,
    )


def layout_finding(stream: str, items: list[GridItem]) -> Finding:
    """Equal micro-batch counts on all ranks; the critic's grid is made so that some of several ranks need dummies."""
    counts = [item.arrays["sample_counts"].tolist() for item in items]
    num_dummies = sum(row.count(0) for row in counts)
    samples = [sum(row) for row in counts]
    ok = len({len(row) for row in counts}) == 1 and (stream != "critic" or len(items) == 1 or num_dummies > 0)
    detail = f"micro-batches {len(counts[0])}, samples by rank {samples}, dummies {num_dummies}"
    return Finding(f"{stream} grid", ok, detail)


# ---- the run around them ----------------------------------------------------------------------------------------


async def perform(run: PartialRun, config: Config, console: Console) -> list[Finding]:
    """All checks in order, up to the first that fails."""
    context = run.plan.context
    assert context.value_url is not None and context.critic_grid_url is not None
    identity = {"run_id": context.run_id, "epoch": context.epoch}
    deployment = config.deployment
    model_config = msgspec.json.decode((Path(context.model_dir) / "config.json").read_bytes())
    scorer = ScoreClient(context.value_url)
    senders = [
        GridSender(context.critic_grid_url, stream="critic", num_data_ranks=deployment.num_value_gpus, **identity),
        GridSender(context.policy_grid_url, stream="policy", num_data_ranks=deployment.num_policy_gpus, **identity),
    ]
    findings: list[Finding] = []
    async with aiohttp.ClientSession() as session:
        stage = Stage(
            config,
            context,
            scorer,
            TrainClient(session, "critic", context.value_url),
            TrainClient(session, "policy", context.policy_url),
            *senders,
            vocab_size=model_config.get("vocab_size") or model_config["text_config"]["vocab_size"],
            rng=np.random.default_rng(config.seed),
        )
        try:
            for what, function in CHECKS:
                with progress(console, what):
                    findings += await timed(what, while_all_live(run, function(stage)))
                if not all(finding.ok for finding in findings):
                    break
        finally:
            for sender in senders:
                await sender.close()
            await scorer.close()
    return findings


async def while_all_live(run: PartialRun, check: Coroutine[Any, Any, list[Finding]]) -> list[Finding]:
    """Findings of a check, or at once the name of the process that ended meanwhile."""

    async def watch() -> list[Finding]:
        while (failure := run.failure()) is None:
            await asyncio.sleep(0.5)
        raise DependencyLost(failure)

    tasks = [asyncio.create_task(check), asyncio.create_task(watch())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return await done.pop()


async def timed(what: str, check: Awaitable[list[Finding]]) -> list[Finding]:
    """Findings of one check with its time; an error of ours is a finding too."""
    started = time.monotonic()
    try:
        findings = await check
    except CounterpointError as error:
        findings = [Finding(what, False, f"{type(error).__name__}: {error}")]
    findings[0].took_s = time.monotonic() - started
    return findings


def dry_run(config: Config, console: Console) -> list[Finding]:
    """Start, check, stop, and look at what is left."""
    started = time.monotonic()
    findings: list[Finding] = []
    waiting_view = progress(console, "starting value service and policy trainer")

    def on_wait(waiting: list[str]) -> None:
        if isinstance(waiting_view, Status):
            waiting_view.update(f"waiting for {' and '.join(waiting)} to load ({time.monotonic() - started:.0f} s)")

    with contextlib.ExitStack() as stack:
        with waiting_view:
            run = stack.enter_context(
                partial_run(config, ["policy", "value"], run_id="dummy", overwrite=True, on_wait=on_wait)
            )
        took_s = time.monotonic() - started
        ranks = config.deployment.num_value_gpus + config.deployment.num_policy_gpus
        findings.append(Finding("value service and policy trainer are ready", True, f"{ranks} ranks", took_s))
        findings += asyncio.run(perform(run, config, console))
        stopped = time.monotonic()
    took_s = time.monotonic() - stopped
    run_dir = run.plan.context.run_dir
    failures = [f"{record.name} failed" for record in read_failures(run_dir)]
    left = [f"{name} killed" for name in run.killed] + failures + left_behind(run)
    findings.append(Finding("everything has ended by itself", not left, "; ".join(left) or "nothing is left", took_s))
    return findings


def left_behind(run: PartialRun) -> list[str]:
    """Listening ports and living processes that name the run directory."""
    found = [f"{name} {port} still taken" for name, port in run.plan.ports.items() if not is_free(port)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # ended meanwhile
            if run.plan.context.dir.encode() in words:
                found.append(f"process {entry.name} still runs")
    return found


def progress(console: Console, what: str) -> contextlib.AbstractContextManager[object]:
    """A spinner on a terminal, else a line."""
    if console.is_terminal:
        return console.status(f"{what} ...")
    print(f"{what} ...", flush=True)
    return contextlib.nullcontext()


def show(findings: list[Finding], console: Console) -> None:
    """One table."""
    table = Table("", "check", "found", "s", title="dry run")
    table.columns[3].justify = "right"
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]FAILED[/]"
        table.add_row(
            mark, escape(finding.name), escape(finding.detail), f"{finding.took_s:.1f}" if finding.took_s else ""
        )
    console.print(table)


def main() -> int:
    """Entry point; returns the exit code."""
    settings, paths = split_settings(sys.argv[1:])
    if "-h" in paths or "--help" in paths:
        print(__doc__)
        return EXIT_DONE
    if not paths:
        os.chdir(project_root())
        paths = [DEFAULT_CONFIG]
    console = Console()
    started = time.monotonic()
    try:
        config = resolve(paths, parse_overrides(settings)).config
        if config.value is None:
            raise ConfigError(["value: the dry run needs a critic; fix: add a [value] table"])
        findings = dry_run(config, console)
    except CounterpointError as error:
        print(f"dry run: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    show(findings, console)
    failed = [finding for finding in findings if not finding.ok]
    if failed:
        print(f"dry run FAILED: {failed[0].name}: {failed[0].detail}", file=sys.stderr)
        return EXIT_BUG
    console.print(f"all {len(findings)} checks hold, {time.monotonic() - started:.0f} s; logs in {config.run.dir}/logs")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
