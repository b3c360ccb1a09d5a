"""A data rank as a process of its own: takes items and writes each into a ledger, the stand-in for training.

Usage: python receiver_child.py ADDRESS LEDGER MODE, where MODE is "train", or "hold" to receive and never take.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from services.transport.grid_receiver import GridReceiver


def main(address: str, ledger: Path, mode: str) -> None:
    step = len(ledger.read_text().splitlines())
    receiver = GridReceiver(
        address, stream="policy", run_id="run", epoch=1, data_rank=0, num_data_ranks=1, first_step=step
    )
    print("ready", flush=True)
    while mode == "hold":
        if receiver.waiting_step() is not None:
            print("received", flush=True)
            time.sleep(60)
        time.sleep(0.01)
    with ledger.open("a") as file:
        while True:
            item = receiver.take(step, deadline_s=60)
            file.write(f"policy {item.header.step} 0 {item.header.digest}\n")
            file.flush()
            os.fsync(file.fileno())
            print(f"trained {step}", flush=True)
            step += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
