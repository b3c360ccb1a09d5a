"""`[orchestrator]`, `[[env]]` and `[[eval]]`: what is rolled out, and how batches are made up."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.config.base import Section


class OrchestratorConfig(Section):
    """How the loop runs."""

    max_steps: int = Field(default=100, ge=1)
    """Policy steps of the run."""
    batch_size: int = Field(default=64, ge=1)
    """Valid finished traces per step (whole groups; the last group may exceed it)."""
    group_size: int = Field(default=1, ge=1)
    """Rollouts per prompt; must divide batch_size."""
    schedule: Literal["critic_first", "overlap"] = "critic_first"
    """ "critic_first": the critic's grid is applied before the policy's is sent. "overlap": both go at once."""
    max_critic_lag: int = Field(default=1, ge=0)
    """With "overlap": grids that the critic may be behind when the next is sent; 0 waits, but beside the policy."""
    max_off_policy_steps: int = Field(default=1, ge=0)
    """A trace whose oldest action token is more than this many versions behind is dropped. 0 = fully on-policy."""
    max_concurrent_rollouts: int = Field(default=128, ge=1)
    """Rollouts in flight at once."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes log-probabilities at the same one."""
    max_bad_fraction: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of the last `bad_window` finished rollouts was invalid; at 1 only when
    `bad_window` rollouts, and as long as one may take, went by without a single valid group."""
    bad_window: int = Field(default=200, ge=1)
    """Finished rollouts over which `max_bad_fraction` is taken."""
    rollout_deadline_s: float = Field(default=600.0, gt=0)
    """A rollout that takes longer is dropped as `deadline`."""
    score_deadline_s: float = Field(default=120.0, gt=0)
    """Deadline of one scoring request, retries included."""
    step_deadline_s: float = Field(default=600.0, gt=0)
    """Deadline of one trainer step: from sending its grid, or the end of the step before it where that is later, to
    seeing it done."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the status page on loopback; 0 = the planner picks one."""
    policy_grid_port: int = Field(default=0, ge=0, le=65535)
    """Port the policy's data ranks fetch grids from; 0 = the planner picks one."""
    critic_grid_port: int = Field(default=0, ge=0, le=65535)
    """Port the critic's data ranks fetch grids from; 0 = the planner picks one."""


class RewardConfig(Section):
    """`[env.reward]`: what the algorithm sees of an environment's reward; `reward/mean` stays the environment's own.

    shaped = clip(scale * reward + offset - overlong_penalty * ramp - length_penalty * max(0, n - length_free_tokens)),
    where n counts the sampled tokens of the rollout. The ramp is DAPO's soft overlong punishment (arXiv 2503.14476,
    eq. 13): 0 up to `overlong_limit_tokens - overlong_buffer_tokens`, then linear to 1 at the limit and beyond.
    """

    scale: float = Field(default=1.0, gt=0)
    """Factor on the reward, and on the rewards of single turns where the environment gives them."""
    offset: float = 0.0
    """Added after scaling, once a rollout."""
    clip: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """[low, high] around the result, penalties included; rewards of single turns are not clipped. None = no bounds."""
    overlong_limit_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens at which the overlong punishment is full; None = no such punishment."""
    overlong_buffer_tokens: int | None = Field(default=None, ge=1)
    """Tokens below the limit over which it grows; goes with the limit."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """The full punishment, in units of the shaped reward."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Taken away for each sampled token beyond `length_free_tokens`."""
    length_free_tokens: int = Field(default=0, ge=0)
    """Sampled tokens that cost nothing."""

    def range_of(self, low: float, high: float, max_tokens: int) -> tuple[float, float]:
        """Bounds of the shaped reward, given those of the environment's and the most tokens that can be sampled."""
        least = self.scale * low + self.offset
        limit, buffer = self.overlong_limit_tokens, self.overlong_buffer_tokens
        if limit is not None and buffer is not None and max_tokens > limit - buffer:
            least -= self.overlong_penalty
        least -= self.length_penalty * max(0, max_tokens - self.length_free_tokens)
        most = self.scale * high + self.offset
        if self.clip is not None:
            least, most = (min(max(bound, self.clip[0]), self.clip[1]) for bound in (least, most))
        return least, most


class EnvConfig(Section):
    """One `[[env]]`: an environment to train on."""

    type: str
    """Name in `orchestrator.environments`: add, reverse, guess."""
    weight: float = Field(default=1.0, gt=0)
    """Share of prompts drawn from this environment."""
    max_turns: int = Field(default=8, ge=1)
    """Model turns before the trace is cut as truncated_turns."""
    max_turn_tokens: int = Field(default=16, ge=1)
    """New tokens per model turn; a turn cut by this limit ends the trace as truncated_length."""
    max_trace_tokens: int = Field(default=256, ge=2)
    """Prompt, observations and answers together; reaching it ends the trace as truncated_length."""
    args: dict[str, Any] = {}
    """The environment's own settings, checked by the environment."""
    reward: RewardConfig = RewardConfig()
    prefix_file: str | None = None
    """JSON lines of recorded traces: each rollout continues one of them from a cut (arXiv 2603.21383) instead of
    starting at the task's beginning. `max_turns` and `max_trace_tokens` count the prefix. None = whole episodes."""
    prefix_cut: Literal["entropy", "index"] = "entropy"
    """Where a recorded trace is cut: before its least certain turn, or at the `cut` that its row names."""

    @property
    def max_sampled_tokens(self) -> int:
        """Most tokens that a rollout can sample: each turn's limit, and a prompt of at least one token."""
        return min(self.max_turns * self.max_turn_tokens, self.max_trace_tokens - 1)


class EvalConfig(Section):
    """One `[[eval]]`: greedy evaluation on a fixed list of tasks."""

    type: str
    interval_steps: int = Field(default=0, ge=0)
    """Evaluate every so many steps besides before the first and after the last; 0 = only those two."""
    num_tasks: int = Field(default=100, ge=1)
    """The first so many tasks of the environment, fewer if it has fewer."""
    temperature: float = Field(default=0.0, ge=0)
    """0 = greedy."""
    max_turns: int = Field(default=8, ge=1)
    max_turn_tokens: int = Field(default=16, ge=1)
    max_trace_tokens: int = Field(default=256, ge=2)
    args: dict[str, Any] = {}
