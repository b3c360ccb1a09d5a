"""Run by torchrun: every case of this world size, one after the other, in one process group.

Writes {case name: [what went wrong on each rank, empty where nothing]}.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import msgspec
import torch

from services.runtime.lifecycle import leave
from services.training.ranks import Ranks
from tests.processes import cases

CHARACTERS_KEPT = 3000


def main() -> None:
    out, wanted = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    torch.set_num_threads(1)
    cases.load_all()
    ranks = Ranks.join(deadline_s=60)
    results: dict[str, list[str]] = {}
    for (world, name), function in cases.CASES.items():
        if world != ranks.size or wanted not in name:
            continue
        folder = out.parent / f"{world}-{name}"
        folder.mkdir(exist_ok=True)
        try:
            function(ranks, folder)
            wrong = ""
        except Exception:  # the case's own failure is its result
            wrong = traceback.format_exc()[-CHARACTERS_KEPT:]
        results[name] = [reply.decode() for reply in ranks.gather_bytes(wrong.encode())]
        if ranks.rank == 0:
            out.write_bytes(msgspec.json.encode(results))
    ranks.close()
    leave()


if __name__ == "__main__":
    main()
