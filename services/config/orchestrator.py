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
    schedule: Literal["critic_first"] = "critic_first"
    """The critic's grid is applied before the policy's is sent."""
    max_off_policy_steps: int = Field(default=1, ge=0)
    """A trace whose oldest action token is more than this many versions behind is dropped. 0 = fully on-policy."""
    max_concurrent_rollouts: int = Field(default=128, ge=1)
    """Rollouts in flight at once."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes log-probabilities at the same one."""
    max_bad_fraction: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of the last `bad_window` finished rollouts was invalid."""
    bad_window: int = Field(default=200, ge=1)
    """Finished rollouts over which `max_bad_fraction` is taken."""
    rollout_deadline_s: float = Field(default=600.0, gt=0)
    """A rollout that takes longer is dropped as `deadline`."""
    score_deadline_s: float = Field(default=120.0, gt=0)
    """Deadline of one scoring request, retries included."""
    step_deadline_s: float = Field(default=600.0, gt=0)
    """Deadline of one trainer step, from sending its grid to seeing it done."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the status page on loopback; 0 = the planner picks one."""
    policy_grid_port: int = Field(default=0, ge=0, le=65535)
    """Port the policy's data ranks fetch grids from; 0 = the planner picks one."""
    critic_grid_port: int = Field(default=0, ge=0, le=65535)
    """Port the critic's data ranks fetch grids from; 0 = the planner picks one."""


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
