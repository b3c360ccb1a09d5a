"""How far a step in any layout is from the same step by one process: loss, gradient, step.

    python -m benchmarks.layouts [--ranks 4] [--cuda]

Gloo ranks on the CPU, or NCCL ranks on GPUs, float32; models of two layers with random weights, samples of mixed
lengths (of one action token, not divisible, dummies where ranks are many), a KL term for the policy, K = 2 updates for
the critic. Of the gradients the largest difference of any tensor, relative to its norm; of the step the difference of
the whole, relative to its norm. The comparison is that of the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from services.runtime.lifecycle import leave
from services.training.ranks import Ranks
from tests.processes.cases.layouts import ARCHITECTURES, compare, device

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = [(1, 1), (2, 1), (4, 1)]
"""(cp, ep), for every model; DP = ranks / cp."""
EXPERT_LAYOUTS = [(1, 2), (2, 2), (1, 4), (4, 4)]


def measure(folder: Path) -> None:
    torch.set_num_threads(1)
    if device().type == "cuda":
        torch.cuda.set_device(device())
    ranks = Ranks.join(deadline_s=120, device=device().type)
    if ranks.rank == 0:
        print("| model | role | CP | DP | EP | loss | gradient | step |")
        print("|---|---|---|---|---|---|---|---|")
    for name in ARCHITECTURES:
        model_dir = folder / name.replace(" ", "_")
        model_dir.mkdir(exist_ok=True)
        for role in ("policy", "critic"):
            for cp, ep in LAYOUTS + (EXPERT_LAYOUTS if "moe" in name else []):
                if max(cp, ep) > ranks.size:
                    continue
                found = compare(model_dir, name, ranks, role=role, cp=cp, ep=ep)
                if ranks.rank == 0:
                    numbers = " | ".join(f"{x:.1e}" for x in (found.loss, found.gradient, found.step))
                    print(f"| {name} | {role} | {cp} | {ranks.size // cp} | {ep} | {numbers} |", flush=True)
    ranks.close()
    leave()


def main() -> None:
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
            *("-m", "benchmarks.layouts", folder),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        if args.cuda:
            env["CASES_ON_CUDA"] = "1"
        sys.exit(subprocess.run(argv, env=env, check=False).returncode)


if __name__ == "__main__":
    main()
