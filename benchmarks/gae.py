"""How fast is GAE: one long masked trace and a batch of shorter ones, beside torchrl and a plain loop in torch.

    OMP_NUM_THREADS=1 python -m benchmarks.gae      # compares torchrl's vectorised GAE where torchrl is installed

Writes the table to benchmarks/results/gae.md. Wall-clock seconds and the CPU seconds of the thread, best and median of
REPEATS; the loop runs once.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from orchestrator.algorithms.gae import length_adaptive_lambda, skip_observation_gae

RESULT = Path(__file__).parent / "results" / "gae.md"
REPEATS = 30
SHAPES = [(1, 131_072), (64, 16_384)]
Pair = tuple[np.ndarray, np.ndarray]
"""Advantages and returns, each [num, length]."""
TURN = 512
"""Tokens of a turn; every second turn is an observation."""


def traces(num: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Values, action masks, rewards, each [num, length], and lambda."""
    rng = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(length) // TURN % 2 == 1, (num, length)).copy()
    rewards = np.zeros((num, length))
    rewards[:, -1] = rng.integers(0, 2, size=num)
    return rng.random((num, length)), mask, rewards, length_adaptive_lambda(int(mask[0].sum()), 1.5)


def ours(values: np.ndarray, mask: np.ndarray, rewards: np.ndarray, lam: float) -> Pair:
    rows = [skip_observation_gae(v, m, r, gamma=1.0, lam=lam) for v, m, r in zip(values, mask, rewards, strict=True)]
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def torch_loop(values: np.ndarray, mask: np.ndarray, rewards: np.ndarray, lam: float) -> Pair:
    """One pass over the tokens, a batch at a time, masked by arithmetic as a batch must be."""
    value, reward = torch.from_numpy(values), torch.from_numpy(rewards)
    acts = torch.from_numpy(mask).to(torch.float64)
    next_value = torch.zeros(len(values), dtype=torch.float64)
    advantage = torch.zeros(len(values), dtype=torch.float64)
    columns = []
    for t in range(values.shape[1] - 1, -1, -1):
        m = acts[:, t]
        stepped = reward[:, t] + 1.0 * next_value - value[:, t] + 1.0 * lam * advantage
        advantage = m * stepped + (1 - m) * advantage
        next_value = m * value[:, t] + (1 - m) * next_value
        columns.append(m * advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages.numpy(), (advantages + acts * value).numpy()


def torchrl_gae(values: np.ndarray, mask: np.ndarray, rewards: np.ndarray, lam: float) -> Pair | None:
    """The vectorised GAE of torchrl on the action tokens alone, as it knows no masks; None where it is missing.

    In f32: its convolution over tokens asks for n^2 numbers in f64, 32 GiB here.
    """
    try:
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate
    except ImportError:
        return None
    num = len(values)
    value, reward = (torch.from_numpy(array[mask].reshape(num, -1, 1)).float() for array in (values, rewards))
    next_value = torch.cat([value[:, 1:], torch.zeros(num, 1, 1, dtype=value.dtype)], dim=1)
    done = torch.zeros_like(value, dtype=torch.bool)
    done[:, -1] = True
    numbers = vec_generalized_advantage_estimate(1.0, lam, value, next_value, reward, done)
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    advantages[mask], returns[mask] = (tensor.numpy().reshape(-1) for tensor in numbers)
    return advantages, returns


def timed(function: Callable[[], Pair | None], repeats: int) -> tuple[list[float], list[float], Pair | None]:
    """Wall and CPU seconds of each repetition, in order of size, and what the last one returned."""
    wall, cpu, numbers = [], [], None
    for _ in range(repeats):
        started, started_cpu = time.perf_counter(), time.thread_time()
        numbers = function()
        wall.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - started_cpu)
    return sorted(wall), sorted(cpu), numbers


def largest_difference(a: Pair, b: Pair) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# GAE: one trace of 131,072 tokens, and 64 of 16,384",
        "",
        f"Half of the tokens are actions, in turns of {TURN}. Milliseconds of one thread, best / median of {REPEATS}",
        "calls (torchrl 3, the loop 1). Ours goes from arrays to arrays in f64, checks its inputs and skips",
        "observations. The loop is one pass over the tokens in torch operations, f64, masked by arithmetic. torchrl's",
        "vectorised GAE gets the action tokens alone, as it knows no masks, and f32: in f64 it asks for 32 GiB here.",
        "Ratios are of medians; differences are the largest from ours.",
        "",
        "| traces x tokens | what | wall ms | CPU ms | times ours, wall | times ours, CPU | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for num, length in SHAPES:
        inputs = traces(num, length)
        reference = ours(*inputs)  # the first call makes the scratch memory
        base: tuple[float, float] | None = None
        for name, function, repeats in (
            ("ours", ours, REPEATS),
            ("torchrl f32", torchrl_gae, 3),
            ("torch loop", torch_loop, 1),
        ):
            wall, cpu, numbers = timed(lambda function=function, inputs=inputs: function(*inputs), repeats)
            if numbers is None:
                lines.append(f"| {num} x {length:,} | {name} | not installed | | | | |")
                continue
            base = base or (wall[repeats // 2], cpu[repeats // 2])
            shown = [" / ".join(f"{s[i] * 1e3:,.2f}" for i in sorted({0, repeats // 2})) for s in (wall, cpu)]
            ratios = [f"{s[repeats // 2] / b:,.1f}" for s, b in zip((wall, cpu), base, strict=True)]
            difference = f"{largest_difference(reference, numbers):.1e}"
            lines.append(f"| {num} x {length:,} | {name} | {' | '.join([*shown, *ratios, difference])} |")
            print(lines[-1], flush=True)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    lines += ["", f"Made by `OMP_NUM_THREADS=1 python -m benchmarks.gae`; {platform.machine()}, {versions}.", ""]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
