"""Both train groups as processes: a commit made over HTTP, and new processes that take it up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.config.context import RunContext, load_run
from services.model.snapshot import verify_snapshot
from services.packing.grid import build_grid
from services.runtime.commits import Commits
from services.runtime.manifests import write_manifest
from services.transport.grid_sender import GridSender
from services.wire.grids import Stream
from tests.runs import ROOT, get, post, processes, wait_until
from tests.samples import make_sample

NUM_RANKS = {"policy_trainer": 1, "value_service": 2}
PROBE = {"batched_token_ids": [[5, 6, 7, 8, 9], [9, 8, 7]]}
OVERRIDES = [
    ("value.head.init_std", "0.1"),
    ("value.warmup.critic_only_steps", "0"),
    ("policy.optim.lr", "0.001"),
    ("value.optim.lr", "0.01"),
]


def train(context: RunContext, stream: Stream, step: int) -> dict[str, Any]:
    """Have a group train the grid of `step`; its row."""
    url, grid_url, loss, constants = {
        "policy": (context.policy_url, context.policy_grid_url, "dis", {"eps_low": 0.5, "eps_high": 5.0}),
        "critic": (context.value_url, context.critic_grid_url, "mse", {}),
    }[stream]
    assert grid_url is not None
    num_data_ranks = NUM_RANKS["policy_trainer" if stream == "policy" else "value_service"]
    samples = []
    for i in range(4):
        sample = make_sample([1] * (4 + i), values=[0.0] * (4 + i), trace_id=f"t{i}", prompt=3)
        on = sample.branch.action_mask
        sample.returns, sample.advantages = np.where(on, float(i % 2), 0.0), np.where(on, float(i % 2) - 0.5, 0.0)
        samples.append(sample)
    items = build_grid(
        samples,
        stream=stream,
        seq_len=64,
        num_data_ranks=num_data_ranks,
        run_id=context.run_id,
        epoch=context.epoch,
        step=step,
        policy_version=step,
        temperature=1.0,
        loss_name=loss,
        loss_constants=constants,
    )

    async def send() -> None:
        identity = {"run_id": context.run_id, "epoch": context.epoch}
        sender = GridSender(grid_url, stream=stream, num_data_ranks=num_data_ranks, **identity)
        try:
            await sender.send(items, deadline_s=60)
        finally:
            await sender.close()

    asyncio.run(send())
    wait_until(lambda: status(url)["steps_done"] == step + 1, deadline_s=60, what=f"{stream} step {step}")
    row = status(url)["rows"][str(step)]
    return {name: number for name, number in row.items() if not name.startswith("time/")}


def status(url: str | None) -> dict[str, Any]:
    reply = get(f"{url}/status")
    assert reply is not None
    return reply


def scores(context: RunContext) -> Any:
    code, reply = post(f"{context.value_url}/v1/score", PROBE)
    assert code == 200
    return reply


@contextmanager
def restarted(run_dir: Path, module: str) -> Iterator[None]:
    """One group anew, as the launcher starts it."""
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS[module])),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", f"{module}.main", "--run-dir", str(run_dir)),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    null = subprocess.DEVNULL
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=null, stderr=null) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def is_idle(url: str | None) -> bool:
    reply = get(f"{url}/status")
    return reply is not None and reply["state"] == "idle"


def test_new_processes_score_publish_and_train_on_as_the_old_ones_would_have(tmp_path: Path, tiny_model: Path) -> None:
    """Scenario: a step, a commit, another step; then new processes, with the published weights gone. Result: the same
    scores and weights as at the commit, and the same second step."""
    run_dir = tmp_path / "run"
    overrides = [("model.path", str(tiny_model)), *OVERRIDES]
    with processes(run_dir, ["policy", "value"], "configs/demo/sao.toml", *overrides) as (_, context):
        train(context, "policy", 0)
        train(context, "critic", 0)
        committed = scores(context)
        commits = Commits(run_dir / "checkpoints")
        part = commits.begin(1)
        for role, url in (("policy", context.policy_url), ("critic", context.value_url)):
            assert post(f"{url}/checkpoint", {"step": 2})[0] == 409
            code, reply = post(f"{url}/checkpoint", {"step": 1})
            assert (code, reply["role"]) == (200, role), reply
        rows = {stream: train(context, stream, 1) for stream in ("policy", "critic")}
        assert scores(context)["values"] != committed["values"]
    (part / "orchestrator").mkdir()
    write_manifest(part / "orchestrator", {})
    commits.commit(1, ["policy", "critic", "orchestrator"], run_id=context.run_id, epoch=1, identity={})
    weights = run_dir / "weights" / "v000001" / "model.safetensors"
    published = weights.read_bytes()
    weights.unlink()

    resumed = context.model_copy(update={"epoch": 2, "commit_dir": str(commits.path(1)), "pids": {}})
    (run_dir / "run.json").write_text(json.dumps(resumed.model_dump()))
    assert load_run(run_dir)[1] == resumed
    with ExitStack() as stack:
        for module in NUM_RANKS:
            stack.enter_context(restarted(run_dir, module))
        for url in (resumed.policy_url, resumed.value_url):
            wait_until(lambda url=url: is_idle(url), deadline_s=120, what=f"{url} to be ready")
        assert scores(resumed) == committed
        assert "value head: loaded from" in (run_dir / "logs" / "value-0.log").read_text()
        policy = status(resumed.policy_url)
        assert (policy["steps_done"], policy["published"]["version"]) == (1, 1)
        assert verify_snapshot(weights.parent) == 1 and weights.read_bytes() == published
        assert sorted(path.name for path in (run_dir / "weights").iterdir()) == ["v000001"]
        assert {stream: train(resumed, stream, 1) for stream in ("policy", "critic")} == rows
