"""The dry run: every part of the training machinery on random weights, in about a minute, without learning anything.

    python scripts/dummy_run.py [CONFIG ...] [--cuda] [--section.key value]

Notable:
- Starts the real value service and policy trainer on unequal layouts and plays the orchestrator itself; no inference.
- Any model goes: `--model.path dummy:DIR` with a config.json and a tokenizer.json, or a folder with weights.
- `--cuda` puts the two groups on GPUs; there need be none for inference, which is not started.
- Exit 0 only if every check holds; 70 names the first that does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from dummy_checks import CHECKS, Finding, Stage
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from orchestrator.trainers import TrainClient
from services.config.layers import parse_overrides
from services.config.resolve import resolve
from services.config.schema import Config
from services.launch.cli import split_settings
from services.launch.partial import PartialRun, partial_run
from services.runtime.auth import critic_token, grid_key, run_token
from services.runtime.lifecycle import read_failures
from services.runtime.ports import is_free
from services.runtime.roots import project_root
from services.transport.grid_sender import GridSender
from services.transport.http import make_session
from services.transport.score_client import ScoreClient
from services.wire.errors import EXIT_BUG, EXIT_DONE, ConfigError, CounterpointError, DependencyLost

DEFAULT_CONFIG = "configs/demo/dummy.toml"


async def perform(run: PartialRun, config: Config, console: Console) -> list[Finding]:
    """All checks in order, up to the first that fails."""
    context = run.plan.context
    assert context.value_url is not None and context.critic_grid_url is not None
    identity = {"run_id": context.run_id, "epoch": context.epoch}
    model_config = msgspec.json.decode((Path(context.model_dir) / "config.json").read_bytes())
    assert config.value is not None
    token, key = run_token(context.token_file), grid_key(context.token_file)
    value_token = critic_token(config.value.token_file, context.token_file)
    scorer = ScoreClient(context.value_url, token=value_token)
    num_policy, num_value = config.num_policy_data_ranks, config.num_value_data_ranks
    senders = [
        GridSender(context.critic_grid_url, stream="critic", num_data_ranks=num_value, key=key, **identity),
        GridSender(context.policy_grid_url, stream="policy", num_data_ranks=num_policy, key=key, **identity),
    ]
    findings: list[Finding] = []
    async with make_session(token=token) as session, make_session(token=value_token) as critic_session:
        stage = Stage(
            config,
            context,
            scorer,
            TrainClient(critic_session, "critic", context.value_url),
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
        ranks = config.num_value_gpus + config.deployment.num_policy_gpus
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
    arguments = [word for word in sys.argv[1:] if word != "--cuda"]
    settings, paths = split_settings(arguments)
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
        if len(arguments) < len(sys.argv) - 1:
            config = config.on_cuda()
        if config.value is None:
            raise ConfigError(["value: the dry run needs a critic; fix: add a [value] table"])
        if config.deployment.sharing != "none":
            what = "the dry run has policy and critic at work together"
            raise ConfigError([f'deployment.sharing: {what}; fix: delete it, or give "none"'])
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
