"""Reward shaping: what an algorithm sees of a rollout's reward, as a function that changes nothing it is given.

Paper: arXiv 2503.14476, eq. 13 (soft overlong punishment).

Notable:
- The trace keeps the environment's reward, which `reward/mean` reports. Only the sample, what credit is assigned from,
  gets the shaped one: so whatever the algorithm does with rewards (baselines, equal-reward filters, trackers) it does
  with shaped ones.
- Shaping comes after admission: a reward that is not finite makes a trace invalid before anything is added to it.
- Rewards of single turns are scaled as the outcome is. Offset, penalties and clip act once a rollout, on the outcome.
- Without any setting the sample's reward and branch are the trace's own.

Deviations:
- The limit counts the sampled tokens of all turns of a rollout, observations left out; the paper has one answer. A
  token that several branches share counts once.
- The limit is a key of its own, not the engine's: a longer rollout may be allowed and keep the full punishment.
"""

from __future__ import annotations

import dataclasses

from services.config.orchestrator import RewardConfig
from services.wire.samples import Branch, Trace, TrainingSample


def overlong_ramp(num_tokens: int, limit_tokens: int, buffer_tokens: int) -> float:
    """0 up to `limit - buffer` tokens, then linear, 1 from the limit on: minus eq. 13.

    Args:
        num_tokens: Sampled tokens of a rollout.
        limit_tokens: L_max.
        buffer_tokens: L_cache, at least 1.
    """
    return min(1.0, max(0, num_tokens - (limit_tokens - buffer_tokens)) / buffer_tokens)


def shaped_reward(reward: float, num_tokens: int, config: RewardConfig) -> float:
    """The outcome reward as the algorithm sees it: not less for a higher reward, not more for a longer rollout.

    Args:
        reward: The environment's.
        num_tokens: Sampled tokens of the rollout.
        config: `[env.reward]`.
    """
    shaped = config.scale * reward + config.offset
    if config.overlong_limit_tokens is not None and config.overlong_buffer_tokens is not None:
        ramp = overlong_ramp(num_tokens, config.overlong_limit_tokens, config.overlong_buffer_tokens)
        shaped -= config.overlong_penalty * ramp
    shaped -= config.length_penalty * max(0, num_tokens - config.length_free_tokens)
    return shaped if config.clip is None else min(max(shaped, config.clip[0]), config.clip[1])


def shape(samples: list[TrainingSample], trace: Trace, config: RewardConfig) -> list[TrainingSample]:
    """Copies of a trace's samples with shaped rewards.

    Args:
        samples: One per trainable branch of the trace.
        trace: An admitted trace.
        config: `[env.reward]` of its environment.

    Returns:
        New samples in the same order, whose branches share every array but `step_rewards`.
    """
    num_tokens = sum(int(branch.loss_mask.sum()) for branch in trace.branches)
    reward = shaped_reward(trace.reward, num_tokens, config)
    return [
        dataclasses.replace(sample, reward=reward, branch=_scaled_steps(sample, config.scale)) for sample in samples
    ]


def _scaled_steps(sample: TrainingSample, scale: float) -> Branch:
    branch = sample.branch
    if branch.step_rewards is None or scale == 1.0:
        return branch
    return dataclasses.replace(branch, step_rewards=branch.step_rewards * scale)
