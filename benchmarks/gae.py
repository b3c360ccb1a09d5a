"""How fast is GAE: one long masked trace and a batch of shorter ones, beside torchrl and plain loops in torch.

    OMP_NUM_THREADS=1 python -m benchmarks.gae      # compares torchrl's vectorised GAE where torchrl is installed

Writes the table to benchmarks/results/gae.md. Wall-clock and CPU seconds of the thread, best and median over ROUNDS
of REPEATS calls of ours and one of each other.
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
ROUNDS = 4
REPEATS = 50
SHAPES = [(1, 131_072), (64, 16_384)]
Pair = tuple[np.ndarray, np.ndarray]
"""Advantages and returns, each [num, length]."""
TURN = 512
"""Tokens of a turn; every second turn is an observation."""
HEAD = f"""# GAE: one trace of 131,072 tokens, and 64 of 16,384

Half of the tokens are actions, in turns of {TURN}. Milliseconds of one thread, best / median of
{ROUNDS * REPEATS} calls (torchrl and loops {ROUNDS}), in {ROUNDS} rounds. The machine had other work at the time, so
the best is what counts: ratios are of the best, and CPU time is the fair one for what runs so long that no call was
undisturbed.

- **ours**: from arrays to arrays in f64, trace by trace as a batch is credited: inputs checked, observations skipped,
  the memory for the results new in every call.
- **torchrl f32**: its vectorised GAE on the action tokens alone, as it knows no masks, and in f32: in f64 it asks for
  32 GiB here.
- **torch loop, batched**: one pass over the tokens for all traces at once, f64, masked by arithmetic as a batch must
  be.
- **torch loop, by trace**: one trace after the other, the same operations on single numbers; one trace is measured and
  multiplied by their number.

Differences are the largest from ours.

| traces x tokens | what | wall ms | CPU ms | times ours, wall | times ours, CPU | difference |
|---|---|---|---|---|---|---|"""


def traces(num: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Values, action masks, rewards, each [num, length], and lambda."""
    rng = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(length) // TURN % 2 == 1, (num, length)).copy()
    rewards = np.zeros((num, length))
    rewards[:, -1] = rng.integers(0, 2, size=num)
    return rng.random((num, length)), mask, rewards, length_adaptive_lambda(int(mask[0].sum()), 1.5)


def ours(values: np.ndarray, mask: np.ndarray, rewards: np.ndarray, lam: float) -> Pair:
    whole = np.empty((2, *values.shape))  # one array, as `orchestrator.algorithms.credit.assign_gae` does
    for row, (v, m, r) in enumerate(zip(values, mask, rewards, strict=True)):
        skip_observation_gae(v, m, r, gamma=1.0, lam=lam, out=whole[:, row])
    return whole[0], whole[1]


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
    """The vectorised GAE of torchrl; None where it is missing."""
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


def timed(function: Callable[[], Pair | None], repeats: int) -> tuple[list[tuple[float, float]], Pair | None]:
    """Wall and CPU seconds of each call, and what the last one returned."""
    seconds, numbers = [], None
    for _ in range(repeats):
        numbers = None  # given back before the clock starts
        started, started_cpu = time.perf_counter(), time.thread_time()
        numbers = function()
        seconds.append((time.perf_counter() - started, time.thread_time() - started_cpu))
    return seconds, numbers


def rows_of(num: int, length: int) -> list[str]:
    """The lines of one shape."""
    values, mask, rewards, lam = traces(num, length)
    reference = ours(values, mask, rewards, lam)
    ways = {
        "ours": (ours, REPEATS, num),
        "torchrl f32": (torchrl_gae, 1, num),
        "torch loop, batched": (torch_loop, 1, num),
    }
    if num > 1:
        ways["torch loop, by trace"] = (torch_loop, 1, 1)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    lines: dict[str, str] = {}
    for _ in range(ROUNDS):  # each way meets the machine in several of its moods
        for name, (function, repeats, taken) in ways.items():
            inputs = values[:taken], mask[:taken], rewards[:taken], lam
            more, numbers = timed(lambda function=function, inputs=inputs: function(*inputs), repeats)
            if numbers is None:
                lines[name] = f"| {num} x {length:,} | {name} | not installed | | | | |"
                continue
            seconds[name] += more
            own = np.array(seconds[name]) * (num / taken)  # [calls, 2]
            best, median, base = own.min(axis=0), np.median(own, axis=0), np.min(seconds["ours"], axis=0)
            shown = [f"{a * 1e3:,.2f} / {b * 1e3:,.2f}" for a, b in zip(best, median, strict=True)]
            ratios = [f"{ratio:,.1f}" for ratio in best / base]
            difference = max(float(np.abs(x[:taken] - y).max()) for x, y in zip(reference, numbers, strict=True))
            lines[name] = f"| {num} x {length:,} | {name} | {' | '.join([*shown, *ratios, f'{difference:.1e}'])} |"
            print(lines[name], flush=True)
    return list(lines.values())


def main() -> None:
    torch.set_num_threads(1)
    lines = [HEAD, *(line for shape in SHAPES for line in rows_of(*shape))]
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}"
    lines += ["", f"Made by `OMP_NUM_THREADS=1 python -m benchmarks.gae`; {platform.machine()}, {versions}.", ""]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
