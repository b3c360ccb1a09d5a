"""`add`: "3+4=" is answered by "7"; single turn, exact match."""

from __future__ import annotations

from typing import Any

from orchestrator.environments.protocol import Episode, SingleTurnEpisode, TextTokenizer
from services.config.tasks import AddArgs, add_answer, add_prompt, add_task


class AddEnvironment:
    """Every pair of operands from 0 to `max_operand` is a task."""

    def __init__(self, args: dict[str, Any], tokenizer: TextTokenizer) -> None:
        self._args = AddArgs.model_validate(args)
        self._tokenizer = tokenizer
        self.num_tasks = (self._args.max_operand + 1) ** 2

    def task_id(self, index: int) -> str:
        """Return for example "add/3+4"."""
        left, right = add_task(index, self._args)
        return f"add/{left}+{right}"

    def start(self, index: int, seed: int) -> Episode:
        """Ask for the sum."""
        left, right = add_task(index, self._args)
        prompt_ids = self._tokenizer.encode(add_prompt(left, right))
        return SingleTurnEpisode(prompt_ids, add_answer(left, right), self._tokenizer)
