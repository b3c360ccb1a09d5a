"""The orchestrator process: build the parts, wait for everyone, run the loop."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from orchestrator.assemble import Orchestra
from services.config.context import load_run
from services.runtime.lifecycle import install_stop_handlers, run_process
from services.wire.errors import EXIT_PREEMPTED

EXIT_TERMINATED = 143
COMMIT_SHARE = 0.6
"""Of `runtime.shutdown_grace_s`: when the step under way has not ended by then, it is abandoned."""


async def conduct(run_dir: Path) -> None:
    """Run until the last step; at SIGTERM or SIGINT commit between two steps and end, if there is time for that."""
    this = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert this is not None
    orchestra: Orchestra | None = None
    config, context = load_run(run_dir)

    def ask() -> None:
        if orchestra is None or not orchestra.is_conducting:  # a start that did nothing yet
            this.cancel()
            return
        orchestra.request_commit()
        loop.call_later(COMMIT_SHARE * config.runtime.shutdown_grace_s, this.cancel)

    stop = install_stop_handlers(lambda: loop.call_soon_threadsafe(ask))
    try:
        async with Orchestra(config, context) as orchestra:
            await orchestra.play()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        sys.exit(EXIT_TERMINATED)
    if orchestra.is_preempted:
        sys.exit(EXIT_PREEMPTED)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    args = parser.parse_args()
    run_process("orchestrator", args.run_dir, lambda: uvloop.run(conduct(args.run_dir)))


if __name__ == "__main__":
    main()
