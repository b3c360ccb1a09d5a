"""Training samples for tests of credit assignment and packing."""

from __future__ import annotations

import numpy as np

from services.wire.samples import Branch, StopReason, TrainingSample, VersionSpan, validate_branch


def make_sample(
    action_mask,
    *,
    reward=1.0,
    values=None,
    stop_reason=StopReason.TERMINATED,
    bootstrap_value=0.0,
    trace_id="t0",
    group_id="g0",
    loss_mask=None,
    step_rewards=None,
    prompt=1,
) -> TrainingSample:
    """A valid sample: `prompt` tokens, then the tokens the mask and values speak of."""
    mask = np.concatenate([np.zeros(prompt, dtype=bool), np.array(action_mask, dtype=bool)])
    num_tokens = len(mask)

    def padded(numbers, dtype):
        return None if numbers is None else np.concatenate([np.zeros(prompt, dtype), np.array(numbers, dtype=dtype)])

    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    branch = Branch(
        token_ids=np.arange(num_tokens, dtype=np.uint32),
        action_mask=mask,
        loss_mask=mask.copy() if loss_mask is None else padded(loss_mask, bool),
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=[VersionSpan(int(a), int(b), 0) for a, b in edges.reshape(-1, 2)],
        step_rewards=padded(step_rewards, np.float64),
    )
    validate_branch(branch)
    return TrainingSample(
        trace_id=trace_id,
        group_id=group_id,
        branch=branch,
        reward=reward,
        stop_reason=stop_reason,
        values=padded(values, np.float64),
        bootstrap_value=bootstrap_value,
    )
