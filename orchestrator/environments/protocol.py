"""What an environment is: numbered tasks, and episodes that take token ids and give token ids.

    episode = environment.start(index, seed)
    episode.prompt_ids                      the first turn's context
    reply = episode.step(action_ids)        the model's turn, its end-of-sequence token included
    reply.observation_ids                   what the environment says before the next turn
    reply.done, reply.outcome               the end, and what it was worth
    episode.cut()                           the driver ended it: what that is worth
    environment.restore(index, seed, turns) where it can: an episode that has gone through these turns already

Notable:
- Token ids in, token ids out: what trains is exactly what was sampled. Only environments look at text, to grade it.
- An environment that raises makes the trace invalid (dropped and counted), never a reward of 0.
- Limits on turns and tokens are the driver's; it says `cut` and records why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class TextTokenizer(Protocol):
    """What environments need of a tokenizer."""

    @property
    def eos_token_id(self) -> int:
        """Ends every model turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to one model turn."""

    observation_ids: list[int] = field(default_factory=list)
    """tokens before the next model turn; empty at the end"""
    reward: float | None = None
    """reward of the turn just taken, besides the outcome; None = the environment gives none"""
    done: bool = False
    outcome: float | None = None
    """the whole episode's reward, set exactly when done"""


class Episode(Protocol):
    """One rollout's side of the conversation."""

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the first model turn."""
        ...

    def step(self, action_ids: list[int]) -> Reply:
        """Take one model turn."""
        ...

    def cut(self) -> float:
        """Return the outcome reward of an episode that the driver ended."""
        ...


class Environment(Protocol):
    """A numbered set of tasks."""

    @property
    def num_tasks(self) -> int:
        """Tasks are 0 ... num_tasks - 1."""
        ...

    def task_id(self, index: int) -> str:
        """Return a printable name of a task, unique within the environment."""
        ...

    def start(self, index: int, seed: int) -> Episode:
        """Begin an episode; `seed` is for environments with a chance of their own."""
        ...


@dataclass(frozen=True, slots=True)
class Restored:
    """An episode in the middle, and what it said on the way there."""

    episode: Episode
    observations: list[list[int]]
    """one after each of the turns"""


class RestorableEnvironment(Environment, Protocol):
    """An environment whose recorded episodes can be continued."""

    def restore(self, index: int, seed: int, turns: list[list[int]]) -> Restored:
        """Begin an episode and bring it to where these model turns had led.

        Raises:
            PrefixMismatch: the turns lead elsewhere.
        """
        ...


class PrefixMismatch(Exception):
    """An episode could not be brought to where a recorded one was; the trace is dropped, and counted apart."""


def replay(episode: Episode, turns: list[list[int]]) -> Restored:
    """Take recorded turns one by one: all that `restore` needs where a step has no effect outside of its episode.

    Raises:
        PrefixMismatch: the episode ended on the way.
    """
    observations = []
    for number, turn in enumerate(turns, start=1):
        reply = episode.step(list(turn))
        if reply.done:
            raise PrefixMismatch(f"the episode ended at turn {number} of {len(turns)}")
        observations.append(reply.observation_ids)
    return Restored(episode, observations)


def answer_text(tokenizer: TextTokenizer, action_ids: list[int]) -> str | None:
    """Return the text before the first end-of-sequence token; None where the model never ended its turn."""
    if tokenizer.eos_token_id not in action_ids:
        return None
    return tokenizer.decode(action_ids[: action_ids.index(tokenizer.eos_token_id)])


@dataclass(slots=True)
class SingleTurnEpisode:
    """One question, one answer: worth 1 if it is exactly `expected`, else 0."""

    prompt_ids: list[int]
    expected: str
    tokenizer: TextTokenizer

    def step(self, action_ids: list[int]) -> Reply:
        """Grade the answer."""
        right = answer_text(self.tokenizer, action_ids) == self.expected
        return Reply(done=True, outcome=1.0 if right else 0.0)

    def cut(self) -> float:
        """Return 0: an answer that was cut is no answer."""
        return 0.0
