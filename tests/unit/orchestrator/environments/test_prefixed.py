"""Recorded traces as tasks: a real environment restored and continued, masks, the choice of the cut, bad rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.algorithms import build as build_algorithm
from orchestrator.environments import ENVIRONMENTS, build, build_training
from orchestrator.environments.prefixed import MAX_PROBLEMS
from orchestrator.environments.protocol import PrefixMismatch
from orchestrator.metrics import JsonLines, trace_row
from orchestrator.producer import samples_of
from orchestrator.rollout import PromptTooLong, Sampling, roll_out
from orchestrator.tasks import Task
from orchestrator.threads import Threads
from services.config.algorithm import SaoConfig
from services.config.orchestrator import EnvConfig
from services.config.tasks import RESTORABLE
from services.wire.errors import ConfigError
from services.wire.samples import StopReason, Trace, VersionSpan, validate_branch
from tests.rollouts import ScriptedEngine
from tests.unit.test_docs import ENVIRONMENTS as PAGE
from tests.unit.test_docs import blocks

END = 256
LIMITS = {"max_turns": 4, "max_turn_tokens": 4, "max_trace_tokens": 64}


class Bytes:
    """A byte is a token; 256 ends a turn."""

    eos_token_id = END

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


TOKENIZER = Bytes()


def said(*texts: str) -> tuple[list[int], list[int]]:
    """Token ids and action mask of prompt, turn, hint, turn ..."""
    token_ids: list[int] = []
    mask: list[int] = []
    for number, text in enumerate(texts):
        segment = TOKENIZER.encode(text) + [END] * (number % 2)
        token_ids += segment
        mask += [number % 2] * len(segment)
    return token_ids, mask


def row(*texts: str, secret: int = 5, **more: Any) -> dict[str, Any]:
    """A recorded game; the least certain turn is the third where nothing else is said."""
    token_ids, mask = said(*(texts or ("guess 0-7:", "1", "higher:", "7", "lower:", "5")))
    numbers = {"logprobs": [-0.1] * (len(mask) - 2) + [-3.0, -3.0]} if "entropies" not in more else {}
    return {"task_id": f"guess/{secret}", "token_ids": token_ids, "action_mask": mask} | numbers | more


def write(folder: Path, *rows: Any) -> EnvConfig:
    path = folder / "prefixes.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows) + "\n")
    return EnvConfig(type="guess", prefix_file=str(path), **LIMITS)


def config_with(config: EnvConfig, **keys: Any) -> EnvConfig:
    return config.model_copy(update=keys)


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(1, name="test")
    yield threads
    threads.close()


async def play(config: EnvConfig, engine: ScriptedEngine, threads: Threads, index: int = 0) -> Trace:
    task = Task(0, build_training(config, TOKENIZER), config, index)
    trace = await roll_out(task, 0, engine, Sampling(1.0, 7, 10.0, max_token_id=END), threads)
    for branch in trace.branches:
        validate_branch(branch)
    return trace


class EndAtNewline(ScriptedEngine):
    """A scripted engine whose turns end with this page's end token."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*([*TOKENIZER.encode(text), END] for text in texts), versions=(3,))

    async def generate(self, token_ids: list[int], **kwargs: Any) -> Any:
        generation = await super().generate(token_ids, **kwargs)
        generation.finish_reason = "stop" if generation.token_ids[-1] == END else "length"
        return generation


# ---- a real environment, restored and continued


async def test_a_recorded_game_is_continued_from_its_cut(tmp_path: Path, threads: Threads) -> None:
    """Scenario: guesses 1 and 7 are recorded, the secret is 5; the policy says 4, then 5. Result: the hints are the
    real ones, only the suffix is action and loss, and the recorded log-probabilities are gone."""
    engine = EndAtNewline("4", "5")
    trace = await play(write(tmp_path, row()), engine, threads)
    prefix = said("guess 0-7:", "1", "higher:", "7", "lower:")[0]
    assert engine.contexts[0] == prefix
    (branch,) = trace.branches
    whole, mask = said("guess 0-7:", "1", "higher:", "7", "lower:", "4", "higher:", "5")
    assert branch.token_ids.tolist() == whole
    suffix = np.arange(len(whole)) >= len(prefix)
    assert branch.action_mask.tolist() == (np.array(mask, dtype=bool) & suffix).tolist()
    assert branch.loss_mask.tolist() == branch.action_mask.tolist()
    assert branch.logprobs.tolist() == np.where(branch.action_mask, -0.5, 0.0).tolist()
    assert branch.version_spans == [VersionSpan(27, 29, 3), VersionSpan(36, 38, 3)]
    assert (trace.reward, trace.stop_reason, trace.num_turns) == (1.0, StopReason.TERMINATED, 2)
    assert trace.task_id == "guess/5 from line 1"


async def test_gae_counts_the_suffix_alone(tmp_path: Path, threads: Threads) -> None:
    """Lambda is that of 2 action tokens; values of the prefix move nothing; the first value is that at the cut."""
    config = write(tmp_path, row())
    outcomes = []
    for noise in (0.0, 7.0):
        (sample,) = samples_of(await play(config, EndAtNewline("5"), threads))
        sample.values = np.where(sample.branch.action_mask, 0.0, noise)
        sample.values[-2:] = 0.5, 0.75
        outcomes.append((build_algorithm(SaoConfig(type="sao")).credit([[sample]]), sample))
    metrics, sample = outcomes[0]
    assert metrics["credit/action_tokens"] == 2
    assert metrics["credit/lambda_mean"] == pytest.approx(1 - 1 / (1.5 * 2))
    # deltas .25 and .25, lambda 2/3
    assert sample.advantages is not None
    assert sample.advantages[-2:].tolist() == pytest.approx([0.25 + 2 / 3 * 0.25, 0.25])
    assert not sample.advantages[:-2].any()
    assert outcomes[1][1].advantages.tobytes() == sample.advantages.tobytes()


async def test_turns_and_tokens_of_the_prefix_count_towards_the_limits(tmp_path: Path, threads: Threads) -> None:
    """Two of four turns are recorded, so two are left; and 27 of 36 tokens: a turn and a hint."""
    trace = await play(write(tmp_path, row()), EndAtNewline("4", "6", "5"), threads)
    assert (trace.stop_reason, trace.num_turns, trace.reward) == (StopReason.TRUNCATED_TURNS, 2, 0.0)
    trace = await play(config_with(write(tmp_path, row()), max_trace_tokens=36), EndAtNewline("4", "5"), threads)
    assert (trace.stop_reason, trace.num_turns) == (StopReason.TRUNCATED_LENGTH, 1)
    assert len(trace.branches[0].token_ids) == 36


async def test_requests_of_a_continued_game_are_seeded_by_their_turn(tmp_path: Path, threads: Threads) -> None:
    whole, continued = EndAtNewline("1", "7", "4", "5"), EndAtNewline("4", "5")
    await play(EnvConfig(type="guess", **LIMITS), whole, threads, index=5)
    await play(write(tmp_path, row()), continued, threads)
    assert continued.seeds == whole.seeds[2:]


# ---- an environment that is somewhere else


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (row("guess 0-7:", "1", "higher:", "5", "lower:", "3", secret=6), "token 21 of 27 is 104, recorded was 108"),
        (row("guess 0-9:", "1", "higher:", "7"), "token 8 of 19 is 55, recorded was 57"),
        (row("guess 0-7:", "5", "higher:", "7"), "the episode ended at turn 1 of 1"),
        (row("guess 0-7:", "1", "higher", "7"), "19 tokens, recorded were 18"),
        (row("guess 0-7:", "1", "higher:!", "7"), "19 tokens, recorded were 20"),
    ],
)
async def test_a_game_that_goes_otherwise_is_no_continuation(
    recorded: dict[str, Any], why: str, tmp_path: Path, threads: Threads
) -> None:
    with pytest.raises(PrefixMismatch, match=why):
        await play(write(tmp_path, recorded), EndAtNewline("5"), threads)


async def test_a_prefix_with_an_id_beyond_the_vocabulary_is_invalid(tmp_path: Path, threads: Threads) -> None:
    recorded = row()
    recorded["token_ids"][0] = 300
    with pytest.raises(PrefixMismatch, match="recorded was 300"):
        await play(write(tmp_path, recorded), EndAtNewline("5"), threads)


# ---- where it is cut


def prefix_length(config: EnvConfig) -> int:
    return len(build_training(config, TOKENIZER).start(0, 0).prompt_ids)


def test_the_cut_is_before_the_least_certain_turn(tmp_path: Path) -> None:
    """Boundaries are 19 and 27; entropies, where a row has them, win over log-probabilities."""
    recorded = row()
    num_tokens = len(recorded["token_ids"])
    assert prefix_length(write(tmp_path, recorded)) == 27
    flat = recorded | {"logprobs": [-0.1] * num_tokens}
    assert prefix_length(write(tmp_path, flat)) == 19, "the earliest of equals"
    entropies = [9.0] * 19 + [0.5] * 2 + [9.0] * 6 + [0.25] * 2
    assert prefix_length(write(tmp_path, recorded | {"entropies": entropies})) == 19


def test_the_cut_of_the_data_is_taken_as_it_is(tmp_path: Path) -> None:
    config = config_with(write(tmp_path, row(cut=19)), prefix_cut="index")
    assert prefix_length(config) == 19
    assert prefix_length(write(tmp_path, row(cut=19))) == 27, "and not looked at where entropy decides"


def test_rows_are_tasks_of_their_own(tmp_path: Path) -> None:
    config = write(tmp_path, row(), "", row("guess 0-7:", "1", "higher:", "5"), row())
    environment = build_training(config, TOKENIZER)
    assert environment.num_tasks == 3
    assert [environment.task_id(i) for i in range(3)] == [f"guess/5 from line {line}" for line in (1, 3, 4)]


# ---- bad rows


BAD_ROWS: list[tuple[Any, str]] = [
    ("{", "Input data was truncated"),
    ("[]", "Expected `object`"),
    (row() | {"tokens": []}, "unknown field `tokens`"),
    ({"task_id": "guess/5", "token_ids": []}, "missing required field `action_mask`"),
    (row() | {"token_ids": ["1"]}, r"Expected `int`, got `str` - at `\$.token_ids"),
    (row() | {"action_mask": [True] * 29}, r"Expected `int`, got `bool` - at `\$.action_mask"),
    (row() | {"action_mask": [2] * 29}, r"Invalid enum value 2"),
    (row() | {"action_mask": [0, 1]}, "action_mask has 2 entries for 29 tokens"),
    (row() | {"logprobs": [0.0]}, "logprobs has 1 entries for 29 tokens"),
    (row(entropies=[0.0]), "entropies has 1 entries for 29 tokens"),
    (row() | {"token_ids": [-1] * 29}, "no token ids: -1 to -1"),
    (row(secret=8), "no task 'guess/8'"),
    (row() | {"task_id": "guess/5 from line 3"}, "no task 'guess/5 from line 3'"),
    (row("guess 0-7:", "5"), "no second turn to cut before"),
    (row() | {"action_mask": [1] * 29}, "begins with an action"),
    (row() | {"logprobs": None}, "neither entropies nor logprobs"),
    (json.dumps(row()).replace("-3.0", "-1e999"), "out of range|non-finite entropy"),
    (json.dumps(row()).replace("-3.0", "NaN"), "JSON is malformed"),
]


@pytest.mark.parametrize(("bad", "said"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(bad: Any, said: str, tmp_path: Path) -> None:
    config = write(tmp_path, row(), "", bad)
    with pytest.raises(ConfigError, match=rf"env.prefix_file: {tmp_path}/prefixes.jsonl:3: .*({said})"):
        build_training(config, TOKENIZER)


@pytest.mark.parametrize(
    ("keys", "recorded", "said"),
    [
        ({"prefix_cut": "index"}, row(), "no cut"),
        ({"prefix_cut": "index"}, row(cut=20), r"cut 20 is no turn boundary; those are \[19, 27\]"),
        ({"max_trace_tokens": 27}, row(), "a prefix of 27 tokens leaves no room in max_trace_tokens = 27"),
        ({"max_turns": 2}, row(), "a prefix of 2 turns leaves none of max_turns = 2"),
    ],
)
def test_a_cut_that_cannot_be_used_is_named_by_file_and_line(
    keys: dict[str, Any], recorded: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = config_with(write(tmp_path, recorded), **keys)
    with pytest.raises(ConfigError, match=rf"prefixes.jsonl:1: {said}"):
        build_training(config, TOKENIZER)


def test_all_bad_rows_are_named_at_once_up_to_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_training(write(tmp_path, *["{"] * (MAX_PROBLEMS + 5), row()), TOKENIZER)
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert caught.value.problems[-1].endswith("5 more bad lines")


def test_an_empty_a_missing_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trace"):
        build_training(write(tmp_path, ""), TOKENIZER)
    for name in ("nowhere.jsonl", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            build_training(EnvConfig(type="guess", prefix_file=str(tmp_path / name)), TOKENIZER)
    (tmp_path / "binary").write_bytes(b'{"task_id": "\xff"}')
    with pytest.raises(ConfigError, match="binary:1: "):
        build_training(EnvConfig(type="guess", prefix_file=str(tmp_path / "binary")), TOKENIZER)


# ---- which environments


def test_the_resolver_knows_which_environments_can_be_restored() -> None:
    able = {name for name in ENVIRONMENTS if hasattr(build(name, {}, TOKENIZER), "restore")}
    assert able == RESTORABLE


def test_an_environment_without_restore_is_refused(tmp_path: Path) -> None:
    config = config_with(write(tmp_path, row()), type="add")
    with pytest.raises(ConfigError, match="add has no `restore`"):
        build_training(config, TOKENIZER)


# ---- from a run to a file


async def test_the_command_of_the_page_makes_a_prefix_file_of_a_runs_traces(tmp_path: Path, threads: Threads) -> None:
    """Scenario: games of one and of three turns are played and written as a run writes them. Result: the command keeps
    the latter, and its row is continued."""
    run = tmp_path / "runs" / "guess"
    run.mkdir(parents=True)
    traces = JsonLines(run / "traces.jsonl")
    config = EnvConfig(type="guess", **LIMITS)
    for texts in (["5"], ["1", "7", "5"]):
        trace = await play(config, EndAtNewline(*texts), threads, index=5)
        traces.write(trace_row(0, trace, samples_of(trace)[0]))
    (command,) = blocks(PAGE, "sh")
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)
    config = config_with(config, prefix_file=str(tmp_path / "prefixes.jsonl"))
    assert build_training(config, TOKENIZER).num_tasks == 1
    trace = await play(config, EndAtNewline("5"), threads)
    assert trace.reward == 1.0 and trace.num_action_tokens == 2


async def test_a_prompt_that_is_too_long_is_still_the_rollouts_own_check(tmp_path: Path, threads: Threads) -> None:
    """The environment was built with other limits than it is played with."""
    task = Task(0, build_training(write(tmp_path, row()), TOKENIZER), EnvConfig(type="guess", max_trace_tokens=27), 0)
    with pytest.raises(PromptTooLong):
        await roll_out(task, 0, EndAtNewline("5"), Sampling(1.0, 7, 10.0), threads)
