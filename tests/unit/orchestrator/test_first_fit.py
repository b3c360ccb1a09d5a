"""A critic from `value.init_from` on the first batch: what is measured, when it is loud, when it ends the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loguru import logger

from orchestrator.environments import build
from orchestrator.first_fit import check_first_fit, fit_at_scoring, overlap, report_overlap
from services.config.exported import FACTS_FILE, MAX_PROMPT_HASHES, PROMPTS_FILE, CorpusFacts, CriticFacts
from services.config.orchestrator import EnvConfig
from services.config.schema import Config
from services.wire.errors import AlarmRaised
from services.wire.samples import TrainingSample
from services.wire.value_rows import name_hash
from tests.samples import make_sample


def config_of(**value) -> Config:
    return Config.model_validate(
        {"model": {"path": "tiny:add"}, "algorithm": {"type": "sao"}, "env": [{"type": "add"}], "value": value}
    )


def batch(values: list[float]) -> list[TrainingSample]:
    """Four rollouts of one action token each, with returns 1, 0, 1, 0 and the given values."""
    samples = []
    for number, value in enumerate(values):
        sample = make_sample([1], values=[value], trace_id=f"t{number}", prompt=2)
        sample.returns = np.where(sample.branch.action_mask, 1.0 - number % 2, 0.0)
        samples.append(sample)
    return samples


@pytest.fixture
def told():
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(f"{message.record['level'].name}: {message.record['message']}"))
    yield lines
    logger.remove(sink)


def test_explained_variance_at_scoring_by_hand() -> None:
    """Returns 1, 0, 1, 0: variance 0.25. Residuals 0.1, -0.2, 0.3, -0.4: mean -0.05, variance 0.0725."""
    explained, bias = fit_at_scoring(batch([0.9, 0.2, 0.7, 0.4]))
    assert explained == pytest.approx(1 - 0.0725 / 0.25)
    assert bias == pytest.approx(0.05)


def test_what_holds_the_critics_own_value_is_left_out() -> None:
    samples = batch([0.9, 0.2, 0.7, 0.4, 123.0])
    samples[-1].bootstrapped = True
    assert fit_at_scoring(samples) == fit_at_scoring(samples[:-1])
    assert fit_at_scoring([]) == (None, 0.0)
    assert fit_at_scoring(batch([0.5])) == (None, 0.0)
    same = batch([0.5, 0.5, 0.25])[::2]
    assert fit_at_scoring(same) == (None, -0.625)


def test_a_critic_worse_than_the_mean_is_a_loud_warning(told: list[str]) -> None:
    """Values 0, 1, 0, 1 where the returns are 1, 0, 1, 0: residuals +-1, EV 1 - 1 / 0.25."""
    assert check_first_fit(config_of(init_from="folder"), 0, batch([0.0, 1.0, 0.0, 1.0])) == pytest.approx(-3.0)
    assert len(told) == 1 and told[0].startswith("WARNING: WORSE THAN THE MEAN") and "-3.000" in told[0]


def test_a_good_critic_is_told_quietly(told: list[str]) -> None:
    assert check_first_fit(config_of(init_from="folder"), 0, batch([1.0, 0.0, 1.0, 0.0])) == 1.0
    assert len(told) == 1 and told[0].startswith("INFO: critic from folder: explained variance 1.000")


def test_below_the_configured_least_the_run_ends(told: list[str]) -> None:
    """Residuals 0.4, -0.4, 0.5, -0.5: variance 0.205 of 0.25."""
    config = config_of(init_from="folder", min_initial_explained_variance=0.5)
    with pytest.raises(AlarmRaised, match=r"value\.min_initial_explained_variance: explained variance 0\.180"):
        check_first_fit(config, 0, batch([0.6, 0.4, 0.5, 0.5]))
    assert check_first_fit(config, 0, batch([0.9, 0.2, 0.7, 0.4])) == pytest.approx(0.71)


def test_only_the_first_batch_of_a_critic_from_somewhere_is_looked_at(told: list[str]) -> None:
    bad = batch([0.0, 1.0, 0.0, 1.0])
    assert check_first_fit(config_of(init_from="folder"), 1, bad) is None
    assert check_first_fit(config_of(), 0, bad) is None
    assert told == []
    assert check_first_fit(config_of(init_from="folder"), 0, batch([0.5])) is None
    assert "returns do not vary" in told[0]


def test_overlap_is_the_share_of_the_runs_prompts_that_were_seen() -> None:
    seen = np.array(sorted(name_hash(name) for name in ("a", "b", "c")), dtype=np.uint64)
    assert overlap(seen, ["a", "c", "x", "y", "a"]) == (0.5, 4)
    assert overlap(seen, []) == (0.0, 0)


def test_of_a_large_corpus_only_prompts_within_its_sample_are_counted() -> None:
    """A corpus of 100,000 kept hashes 0, 2, 4, ...: of the run's, those beyond the last say nothing."""
    seen = np.arange(MAX_PROMPT_HASHES, dtype=np.uint64) * np.uint64(2)
    share, num = overlap(seen, [f"prompt {number}" for number in range(1000)])
    assert (share, num) == (0.0, 0)
    names = [f"prompt {number}" for number in range(1000)]
    middle = sorted(name_hash(name) for name in names)[499]
    kept = np.concatenate([np.arange(MAX_PROMPT_HASHES - 1, dtype=np.uint64), np.array([middle], dtype=np.uint64)])
    assert overlap(kept, names) == (1 / 500, 500)


class Digits:
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def test_the_overlap_of_a_run_is_told_from_the_exported_folder(tmp_path: Path, told: list[str]) -> None:
    """One of the four sums of two operands up to 1 was in the corpus."""
    env = EnvConfig(type="add", args={"max_operand": 1})
    environments = [(build("add", env.args, Digits()), env)]
    config = config_of(init_from=str(tmp_path))
    assert report_overlap(config, environments) is None  # no facts
    corpus = CorpusFacts(rows=7, prompts=2, policies=["sft"])
    facts = CriticFacts(
        form="token_classification",
        support="scalar",
        gamma=1.0,
        run="r",
        source="s",
        tokenizer_sha256="0",
        corpus=corpus,
    )
    (tmp_path / FACTS_FILE).write_text(facts.model_dump_json())
    hashes = np.array(sorted(map(name_hash, ("add:add/0+1", "add:add/9+9"))), dtype="<u8")
    (tmp_path / PROMPTS_FILE).write_bytes(hashes.tobytes())
    assert report_overlap(config, environments) == 0.25
    assert told[-1].startswith("INFO: the critic was pretrained on 7 rows of sft on 2 prompts; 25.0% of 4 prompts")
