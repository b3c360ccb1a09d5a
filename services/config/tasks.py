"""The texts of the built-in tasks, their settings, and supervised examples of them.

    add       "3+4="        -> "7"          every pair of operands is a task
    reverse   "abcd>"       -> "dcba"       words of the letters a to j
    guess     "guess 0-7:"  -> "3"          then "higher:" -> "5", "lower:" -> "4": several turns

Notable:
- Pure and light: the environments play these texts, the tiny model's warm start learns their form, and the resolver
  checks `[[env]] args` before anything is started.
- The end-of-sequence token after each answer is not part of the text: it ends every segment the model speaks.
- Plain text only, so that every tokenizer can say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import Field, ValidationError, model_validator

from services.config.base import Section

Segment = tuple[str, bool]
"""A piece of a transcript and whether the model speaks it (then it trains, and an end-of-sequence token follows)."""

LETTERS = "abcdefghij"
NOT_A_NUMBER = "number:"
"""What `guess` answers to something that is no number."""


class AddArgs(Section):
    """`args` of `add`."""

    max_operand: int = Field(default=9, ge=0, le=9999)
    """Operands are 0 to this number, inclusive: (max_operand + 1)^2 tasks."""


class ReverseArgs(Section):
    """`args` of `reverse`."""

    num_tasks: int = Field(default=2000, ge=1, le=1_000_000)
    """Words to draw from; word i is the same in every run."""
    min_letters: int = Field(default=3, ge=1)
    """Letters of the shortest word."""
    max_letters: int = Field(default=5, ge=1, le=64)
    """Letters of the longest word."""

    @model_validator(mode="after")
    def _ordered(self) -> ReverseArgs:
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters {self.min_letters} is more than max_letters {self.max_letters}")
        return self


class GuessArgs(Section):
    """`args` of `guess`."""

    num_secrets: int = Field(default=8, ge=2, le=100_000)
    """The secret is one of 0 ... num_secrets - 1; each is one task."""


TASK_ARGS: dict[str, type[Section]] = {"add": AddArgs, "reverse": ReverseArgs, "guess": GuessArgs}


REWARD_RANGES: dict[str, tuple[float, float]] = {"add": (0.0, 1.0), "reverse": (0.0, 1.0), "guess": (0.0, 1.0)}
"""Where the rewards of an episode lie, for the environments that say so."""

RESTORABLE = frozenset({"guess"})
"""Environments that can be brought into the middle of an episode, so that a recorded trace can be continued."""


def problems_of(task: str, args: dict[str, Any]) -> list[str]:
    """Return one line for each thing that is wrong with `type` and `args` of an `[[env]]` or `[[eval]]`."""
    if task not in TASK_ARGS:
        return [f"type: unknown environment {task!r}; choose from {', '.join(sorted(TASK_ARGS))}"]
    section = TASK_ARGS[task]
    try:
        section.model_validate(args)
    except ValidationError as error:
        keys = ", ".join(section.model_fields)
        return [
            f"{'.'.join(['args', *map(str, problem['loc'])])}: {problem['msg']} (args of {task}: {keys})"
            for problem in error.errors(include_url=False, include_input=False)
        ]
    return []


def add_task(index: int, args: AddArgs) -> tuple[int, int]:
    """Return the operands of task `index`."""
    return divmod(index, args.max_operand + 1)


def add_prompt(left: int, right: int) -> str:
    """Return the question, for example "3+4="."""
    return f"{left}+{right}="


def add_answer(left: int, right: int) -> str:
    """Return the right answer, for example "7"."""
    return str(left + right)


def reverse_word(index: int, args: ReverseArgs) -> str:
    """Return the word of task `index`, a function of the index and the settings alone."""
    return _random_word(np.random.default_rng([index, args.min_letters, args.max_letters]), args)


def reverse_prompt(word: str) -> str:
    """Return the question, for example "abcd>"."""
    return f"{word}>"


def reverse_answer(word: str) -> str:
    """Return the right answer, for example "dcba"."""
    return word[::-1]


def guess_prompt(args: GuessArgs) -> str:
    """Return the opening, for example "guess 0-7:"."""
    return f"guess 0-{args.num_secrets - 1}:"


def guess_number(text: str) -> int | None:
    """Read a guess; None where it is anything but plain decimal digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def guess_hint(secret: int, guess: int | None) -> str:
    """Return the environment's answer to a guess that is not the secret."""
    if guess is None:
        return NOT_A_NUMBER
    return "higher:" if secret > guess else "lower:"


def examples(task: str, num: int, seed: int, *, noise: float = 0.0) -> Iterator[list[Segment]]:
    """Yield supervised transcripts of a task with default settings, the same ones for the same seed.

    Args:
        task: "add", "reverse" or "guess"
        num: number of transcripts
        seed: of the draws
        noise: share of answers that are well formed but random, which leaves reinforcement learning something to do

    Example: [("3+4=", False), ("7", True)].

    Raises:
        KeyError: an unknown task.
    """
    rng = np.random.default_rng(seed)
    transcript = _TRANSCRIPTS[task]
    for _ in range(num):
        yield transcript(rng, noise)


def _add_transcript(rng: np.random.Generator, noise: float) -> list[Segment]:
    args = AddArgs()
    left, right = (int(operand) for operand in rng.integers(0, args.max_operand + 1, size=2))
    answer = add_answer(left, right)
    if rng.random() < noise:
        answer = str(rng.integers(0, 2 * args.max_operand + 1))
    return [(add_prompt(left, right), False), (answer, True)]


def _reverse_transcript(rng: np.random.Generator, noise: float) -> list[Segment]:
    word = _random_word(rng, ReverseArgs())
    answer = reverse_answer(word)
    if rng.random() < noise:
        answer = "".join(rng.permutation(list(answer)).tolist())
    return [(reverse_prompt(word), False), (answer, True)]


def _guess_transcript(rng: np.random.Generator, noise: float) -> list[Segment]:
    """Play guesses drawn evenly from what the hints leave possible; noise draws from everything."""
    args = GuessArgs()
    secret = int(rng.integers(args.num_secrets))
    low, high = 0, args.num_secrets - 1
    segments: list[Segment] = [(guess_prompt(args), False)]
    while True:
        noisy = rng.random() < noise
        guess = int(rng.integers(args.num_secrets) if noisy else rng.integers(low, high + 1))
        segments.append((str(guess), True))
        if guess == secret or len(segments) >= 4 * args.num_secrets:
            return segments
        segments.append((guess_hint(secret, guess), False))
        low, high = (max(low, guess + 1), high) if secret > guess else (low, min(high, guess - 1))


def _random_word(rng: np.random.Generator, args: ReverseArgs) -> str:
    num_letters = int(rng.integers(args.min_letters, args.max_letters + 1))
    return "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), size=num_letters))


_TRANSCRIPTS: dict[str, Callable[[np.random.Generator, float], list[Segment]]] = {
    "add": _add_transcript,
    "reverse": _reverse_transcript,
    "guess": _guess_transcript,
}
