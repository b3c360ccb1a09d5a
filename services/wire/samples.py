"""A rollout as data: traces, their branches, and the training samples made from them.

Legend: T tokens of a branch. Arrays have exactly T entries; off the mask they are 0 and nobody reads them.

Notable:
- `action_mask[t]` is true where the model sampled token t. `loss_mask[t]` is true where t also trains in this copy.
  Credit runs on the action mask, losses on the loss mask.
- `values[t]` is the critic's value of the state *before* token t; `values[0] = 0`.
- The stop reason is data from whoever stopped the rollout, never inferred from token ids or widths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from services.wire.errors import ContractError


class StopReason(StrEnum):
    """Why a trace ended."""

    TERMINATED = "terminated"
    """The environment ended it: solved, failed, or the model said it was done."""
    TRUNCATED_LENGTH = "truncated_length"
    """Cut by a token limit while the model was still speaking or the environment still asking."""
    TRUNCATED_TURNS = "truncated_turns"
    """Cut by the turn limit."""
    ABORTED = "aborted"
    """Something outside the task broke; never trained on."""


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` of a branch were sampled by policy `version`."""

    start: int
    end: int
    version: int


@dataclass(slots=True)
class Branch:
    """One token sequence of a trace, root to leaf.

    Example: prompt "3+4=" and answer "7<end>": token_ids [5 ids + 2 ids], action_mask [0,0,0,0,0,1,1].
    """

    token_ids: np.ndarray
    """[T] u32"""
    action_mask: np.ndarray
    """[T] bool"""
    loss_mask: np.ndarray
    """[T] bool, a subset of action_mask"""
    logprobs: np.ndarray
    """[T] f32, of the sampled distribution at the sampling temperature; 0 off the action mask"""
    version_spans: list[VersionSpan]
    """cover exactly the action tokens, in order"""
    step_rewards: np.ndarray | None = None
    """[T] f64 rewards on action tokens besides the trace's outcome reward, or None"""

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.action_mask.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the action tokens."""
        return min(span.version for span in self.version_spans)

    @property
    def newest_version(self) -> int:
        """The newest policy version among the action tokens; 0 without one."""
        return max((span.version for span in self.version_spans), default=0)


@dataclass(slots=True)
class Trace:
    """A finished rollout: one or more branches, one outcome reward, one stop reason."""

    trace_id: str
    group_id: str
    env: str
    task_id: str
    branches: list[Branch]
    reward: float
    stop_reason: StopReason
    num_turns: int = 1
    duration_s: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among all action tokens of the trace."""
        return min(branch.oldest_version for branch in self.branches)

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens over all branches."""
        return sum(branch.num_action_tokens for branch in self.branches)


@dataclass(slots=True)
class TrainingSample:
    """One trainable branch on its way to the trainers; scoring and credit fill the fields from `values` on."""

    trace_id: str
    group_id: str
    branch: Branch
    reward: float
    stop_reason: StopReason
    values: np.ndarray | None = None
    """[T] f64 value of the state before each token; None without a critic"""
    bootstrap_value: float = 0.0
    """critic's output at the last position"""
    critic_step: int = -1
    """critic grids applied when the sample was scored; -1 unscored"""
    advantages: np.ndarray | None = None
    """[T] f64, 0 off the action mask"""
    returns: np.ndarray | None = None
    """[T] f64 value targets, 0 off the action mask; None without a critic"""
    bootstrapped: bool = False
    """true where the targets hold the critic's own value at the cut: they train it, and say nothing about its fit"""
    policy_loss_mask: np.ndarray | None = field(default=None)
    """[T] bool: the loss mask after filters that act on the policy grid only; None means the branch's loss mask"""
    value_loss_mask: np.ndarray | None = field(default=None)
    """[T] bool: the loss mask of the critic grid alone; None means the branch's loss mask"""
    prompt_id: str = ""
    """the same for all traces of a prompt, in any epoch; "" where nobody said"""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.branch.token_ids)

    @property
    def prompt(self) -> str:
        """What baselines per prompt are kept by: the prompt's name, or the group's where it has none."""
        return self.prompt_id or self.group_id


def validate_branch(branch: Branch) -> None:
    """Check one branch against the wire's rules.

    Raises:
        ContractError: naming the field: a length other than T, an empty branch, a trainable first token, a loss mask
            outside the action mask, a non-finite log-probability, spans that do not cover the action tokens.
    """
    num_tokens = len(branch.token_ids)
    if num_tokens == 0:
        raise ContractError("token_ids is empty")
    for name in ("action_mask", "loss_mask", "logprobs", "step_rewards"):
        array = getattr(branch, name)
        if array is not None and len(array) != num_tokens:
            raise ContractError(f"{name} has {len(array)} entries for {num_tokens} tokens")
    for name in ("action_mask", "loss_mask"):
        if getattr(branch, name).dtype != np.bool_:
            raise ContractError(f"{name} is {getattr(branch, name).dtype}, not bool")
    if branch.action_mask[0]:
        raise ContractError("action_mask[0] is true: the first token has no state before it")
    if bool((branch.loss_mask & ~branch.action_mask).any()):
        raise ContractError("loss_mask is true off the action mask")
    if not np.isfinite(branch.logprobs[branch.action_mask]).all():
        raise ContractError("logprobs holds a non-finite number on an action token")
    covered = np.zeros(num_tokens, dtype=np.int64)
    for span in branch.version_spans:
        if not 0 <= span.start < span.end <= num_tokens:
            raise ContractError(f"version span {tuple(span)} is outside the branch")
        covered[span.start : span.end] += 1
    if not np.array_equal(covered > 0, branch.action_mask) or covered.max(initial=0) > 1:
        raise ContractError("version_spans do not cover exactly the action tokens")
