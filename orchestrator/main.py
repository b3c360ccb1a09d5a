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

EXIT_TERMINATED = 143


async def conduct(run_dir: Path) -> None:
    """Run until the last step, or until SIGTERM or SIGINT."""
    this = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert this is not None

    def cancel() -> None:
        loop.call_soon_threadsafe(this.cancel)

    stop = install_stop_handlers(cancel)
    config, context = load_run(run_dir)
    try:
        async with Orchestra(config, context) as orchestra:
            await orchestra.play()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        sys.exit(EXIT_TERMINATED)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory")
    args = parser.parse_args()
    run_process("orchestrator", args.run_dir, lambda: uvloop.run(conduct(args.run_dir)))


if __name__ == "__main__":
    main()
