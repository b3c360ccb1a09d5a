"""One step of a job as the launcher holds it: `srun`, and a pipe through which its tasks can be asked to end.

Usage: `python -m services.launch.srun_step srun words...`

Notable:
- srun answers SIGTERM by killing its tasks at once. SIGTERM and SIGINT to this process therefore go through srun's
  standard input to `services.launch.on_node` on every node, as one byte each, and from there to the process.
- Its end closes the pipe, and the tasks end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from services.runtime.guard import ASKING


def main(command: list[str]) -> int:
    """Run srun; its exit code, or 128 + the signal that ended it."""
    read, write = os.pipe()
    for number in ASKING:
        signal.signal(number, lambda number, _: _tell(write, number))
    step = subprocess.Popen(command, stdin=read)
    os.close(read)
    code = step.wait()
    return code if code >= 0 else 128 - code


def _tell(write: int, number: int) -> None:
    with contextlib.suppress(OSError):  # srun has ended
        os.write(write, bytes([number]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
