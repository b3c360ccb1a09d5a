"""Small valid groups of rollouts for tests, every number from a seed or written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from services.wire.rollouts import Group
from services.wire.samples import Branch, StopReason, Trace, TrainingSample, VersionSpan


def make_branch(num_tokens: int, rng: np.random.Generator, *, version: int = 7, step_rewards: bool = False) -> Branch:
    """The second half is sampled, its last token by the next version."""
    mask = np.arange(num_tokens) >= (num_tokens + 1) // 2
    start = num_tokens - int(mask.sum())
    spans = [VersionSpan(start, num_tokens - 1, version)] if start < num_tokens - 1 else []
    return Branch(
        token_ids=rng.integers(0, 261, num_tokens).astype(np.uint32),
        action_mask=mask,
        loss_mask=mask & (rng.random(num_tokens) < 0.8),
        logprobs=np.where(mask, -rng.random(num_tokens), 0).astype(np.float32),
        version_spans=[*spans, VersionSpan(num_tokens - 1, num_tokens, version + 1)],
        step_rewards=np.where(mask, rng.random(num_tokens), 0.0) if step_rewards else None,
    )


def make_group(
    *,
    lengths: tuple[tuple[int, ...], ...] = ((4, 3), (6,)),
    seed: int = 0,
    order: int = 5,
    critic_step: int = 2,
    scored: bool = True,
    name: str = "3",
    prompt_id: str = "add:12+3=",
) -> Group:
    """One trace for each entry of `lengths`, with a branch of each of its lengths; the first trace has step rewards,
    which are shaped in its first sample."""
    rng = np.random.default_rng(seed)
    traces, samples = [], []
    for number, of_branches in enumerate(lengths):
        branches = [make_branch(num, rng, step_rewards=number == 0) for num in of_branches]
        trace = Trace(
            f"{name}/{number}",
            name,
            "add",
            "12+3=",
            branches,
            float(rng.random()),
            list(StopReason)[number % 3],
            num_turns=number + 1,
            duration_s=float(rng.random()),
        )
        traces.append(trace)
        for position, branch in enumerate(branches):
            shaped = branch
            if branch.step_rewards is not None and position == 0:
                shaped = replace(branch, step_rewards=branch.step_rewards * 0.5)
            samples.append(
                TrainingSample(
                    trace.trace_id,
                    name,
                    shaped,
                    trace.reward - 0.25,
                    trace.stop_reason,
                    values=rng.standard_normal(len(branch.token_ids)) if scored else None,
                    bootstrap_value=float(rng.standard_normal()) if scored else 0.0,
                    critic_step=critic_step if scored else -1,
                    prompt_id=prompt_id,
                )
            )
    return Group(traces, samples, order)


def as_data(value: Any) -> Any:
    """Anything of a group as plain data, for comparison by ==; arrays with their types."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_data(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, list):
        return [as_data(item) for item in value]
    return value
