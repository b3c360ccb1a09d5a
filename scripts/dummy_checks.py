"""What the dry run checks, in order: processes, scoring, order and parity, a critic grid, a policy grid, the ledgers.

Notable:
- The checks play the orchestrator with its own parts: credit, packing, senders, clients.
- Everything random is drawn from the configuration's seed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orchestrator.algorithms import build as build_algorithm
from orchestrator.producer import Group, score_group
from orchestrator.trainers import TrainClient
from services.config.context import RunContext
from services.config.model_path import max_positions
from services.config.schema import Config
from services.model.snapshot import verify_snapshot
from services.packing.grid import build_grid
from services.transport.grid_sender import GridSender
from services.transport.score_client import ScoreClient
from services.wire.grids import GridItem
from services.wire.messages import ScoreReply
from services.wire.samples import Branch, StopReason, TrainingSample, VersionSpan

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
    config = stage.config
    counts = len(critic.pids), len(policy.pids)
    ok = counts == (config.num_value_gpus, config.deployment.num_policy_gpus)
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
    num_ranks, constants = stage.config.num_value_data_ranks, value.loss.loss_constants()
    items = grid(stage, "critic", value.model.seq_len, num_ranks, value.loss.type, constants)
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
    num_ranks = stage.config.num_policy_data_ranks
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
    lengths = np.linspace(longest, longest // 2 + 1, stage.config.num_value_gpus + 1).astype(int).tolist()
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


CHECKS: list[tuple[str, Callable[[Stage], Coroutine[Any, Any, list[Finding]]]]] = [
    ("looking at the processes", processes),
    ("sparse scoring", sparse),
    ("a burst of scoring", burst),
    ("order and parity", order),
    ("a critic grid, with scoring in between", critic_grid),
    ("a policy grid", policy_grid),
    ("the ledgers", once_each),
]
