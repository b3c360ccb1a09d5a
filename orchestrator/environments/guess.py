"""`guess`: find a secret number in several turns, told "higher" or "lower" after each wrong guess.

Notable:
- The hints are observation tokens: they stand between the model's turns and never train.
- Worth 1 when the secret is guessed, 0 when the driver cuts the episode; the number of turns is the driver's limit.
"""

from __future__ import annotations

from typing import Any

from orchestrator.environments.protocol import Episode, Reply, Restored, TextTokenizer, answer_text, replay
from services.config.tasks import GuessArgs, guess_hint, guess_number, guess_prompt


class GuessEpisode:
    """One secret."""

    def __init__(self, secret: int, args: GuessArgs, tokenizer: TextTokenizer) -> None:
        self.prompt_ids = tokenizer.encode(guess_prompt(args))
        self._secret = secret
        self._tokenizer = tokenizer

    def step(self, action_ids: list[int]) -> Reply:
        """Compare a guess with the secret; anything but a number is told so and costs the turn."""
        guess = guess_number(answer_text(self._tokenizer, action_ids) or "")
        if guess == self._secret:
            return Reply(done=True, outcome=1.0)
        return Reply(observation_ids=self._tokenizer.encode(guess_hint(self._secret, guess)))

    def cut(self) -> float:
        """Return 0: the secret was not found."""
        return 0.0


class GuessEnvironment:
    """Each number below `num_secrets` is one task."""

    def __init__(self, args: dict[str, Any], tokenizer: TextTokenizer) -> None:
        self._args = GuessArgs.model_validate(args)
        self._tokenizer = tokenizer
        self.num_tasks = self._args.num_secrets

    def task_id(self, index: int) -> str:
        """Return for example "guess/5"."""
        return f"guess/{index}"

    def start(self, index: int, seed: int) -> Episode:
        """Think of the number `index`."""
        return GuessEpisode(index, self._args, self._tokenizer)

    def restore(self, index: int, seed: int, turns: list[list[int]]) -> Restored:
        """Hear the same guesses again."""
        return replay(self.start(index, seed), turns)
