"""The mean of the latest rewards, of the same prompt or of all, as the baseline; no critic.

Paper: Williams 1992 (doi 10.1007/BF00992696), REINFORCE with a baseline that follows the rewards.

Notable:
- The baseline is taken from the rewards *before* this one: with it inside, the advantage would shrink by 1 - 1/window.
- An empty window of a prompt falls back to the global one, that to `prior`; without a prior the trace gets advantage 0
  and is only recorded.
- Order is the order of completion, traces of a group included. What is remembered is the algorithm's state.
- Only traces that train are remembered: what admission dropped never comes here.

Deviations:
- A trace's score is its outcome plus its step rewards; a branched trace is remembered once, with the mean of its
  branches.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from orchestrator.algorithms.base import Algorithm
from orchestrator.algorithms.groups import branch_scores, scores_of_traces, spread_over_actions
from services.config.algorithm import RunningMeanConfig
from services.wire.samples import TrainingSample


class RunningMean(Algorithm):
    """Score minus the mean of earlier scores."""

    def __init__(self, config: RunningMeanConfig) -> None:
        super().__init__(config)
        self._config = config
        self._of_all: deque[float] = deque(maxlen=config.global_window)
        self._of_prompt: dict[str, deque[float]] = {}

    def baseline(self, prompt_id: str) -> float | None:
        """What the next trace of a prompt is compared with; None where nothing is known."""
        own = self._of_prompt.get(prompt_id) if self._config.scope == "prompt" else None
        window = own or self._of_all
        return float(np.mean(window)) if window else self._config.prior

    def _assign(self, groups: list[list[TrainingSample]]) -> dict[str, float]:
        num_unknown = 0
        baselines: list[float] = []
        for group in groups:
            scores = branch_scores(group)
            for trace_id, score in scores_of_traces(group, scores).items():
                branches = [(s, own) for s, own in zip(group, scores, strict=True) if s.trace_id == trace_id]
                prompt_id = branches[0][0].prompt
                baseline = self.baseline(prompt_id)
                num_unknown += baseline is None
                baselines += [] if baseline is None else [baseline]
                for sample, own in branches:
                    sample.advantages = spread_over_actions(sample, 0.0 if baseline is None else own - baseline)
                    sample.returns = None
                self._record(prompt_id, score)
        metrics = {"credit/unknown_baselines": float(num_unknown)}
        return metrics | ({"credit/baseline_mean": float(np.mean(baselines))} if baselines else {})

    def _record(self, prompt_id: str, score: float) -> None:
        self._of_all.append(score)
        if self._config.scope == "prompt":
            window = self._of_prompt.setdefault(prompt_id, deque(maxlen=self._config.prompt_window))
            window.append(score)

    def state_dict(self) -> dict[str, Any]:
        """The windows."""
        return {
            "global": list(self._of_all),
            "prompts": {prompt_id: list(window) for prompt_id, window in self._of_prompt.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these windows.

        Raises:
            ValueError: a state that this algorithm did not write.
        """
        if set(state) != {"global", "prompts"}:
            raise ValueError(f"the state of running_mean holds global and prompts, not {', '.join(sorted(state))}")
        self._of_all = deque(map(float, state["global"]), maxlen=self._config.global_window)
        self._of_prompt = {
            prompt_id: deque(map(float, window), maxlen=self._config.prompt_window)
            for prompt_id, window in state["prompts"].items()
        }
