"""`reverse`: "abcd>" is answered by "dcba"; single turn, exact match."""

from __future__ import annotations

from typing import Any

from orchestrator.environments.protocol import Episode, SingleTurnEpisode, TextTokenizer
from services.config.tasks import ReverseArgs, reverse_answer, reverse_prompt, reverse_word


class ReverseEnvironment:
    """A fixed list of words of the letters a to j."""

    def __init__(self, args: dict[str, Any], tokenizer: TextTokenizer) -> None:
        self._args = ReverseArgs.model_validate(args)
        self._tokenizer = tokenizer
        self.num_tasks = self._args.num_tasks

    def task_id(self, index: int) -> str:
        """Return for example "reverse/17/abcd": a word may occur at two indices."""
        return f"reverse/{index}/{reverse_word(index, self._args)}"

    def start(self, index: int, seed: int) -> Episode:
        """Ask for the word backwards."""
        word = reverse_word(index, self._args)
        prompt_ids = self._tokenizer.encode(reverse_prompt(word))
        return SingleTurnEpisode(prompt_ids, reverse_answer(word), self._tokenizer)
