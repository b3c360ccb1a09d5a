"""A critic from `value.init_from` on a run's first batch: does it know these rollouts, and had it seen the prompts.

Paper: arXiv 2607.27203 (a critic pretrained on other policies' returns can hurt: look before it is used).

Notable:
- Measured on the values that the batch was scored with, before anything trains on it: what a fresh rollout of this
  policy says, which no held-out row of the corpus can.
- Explained variance does not see a constant bias: the mean error is told beside it.
- Prompts are compared by hashes of their names. Of a large corpus only the least hashes are kept, a sample of it: then
  only prompts whose hashes are as small are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from loguru import logger

from orchestrator.environments.protocol import Environment
from orchestrator.tasks import prompt_id_of
from services.config.exported import MAX_PROMPT_HASHES, PROMPTS_FILE, CriticFacts, read_facts
from services.config.orchestrator import EnvConfig
from services.config.schema import Config
from services.packing.grid import value_loss_mask
from services.wire.errors import AlarmRaised
from services.wire.samples import TrainingSample
from services.wire.value_rows import name_hash

MAX_TASKS = 100_000
"""Of an environment, looked at."""
_FLOOR = 1e-12
"""A variance at or below this share of max(1, mean^2) is rounding."""


def check_first_fit(config: Config, step: int, samples: Iterable[TrainingSample]) -> float | None:
    """Look at the first batch of a run whose critic comes from somewhere.

    Args:
        config: Of the run.
        step: Of the run; nothing is done but at its first.
        samples: The batch, credited.

    Returns:
        Explained variance at scoring; None where it is undefined, or not looked at.

    Raises:
        AlarmRaised: it is below `value.min_initial_explained_variance`.
    """
    value = config.value
    if step != 0 or value is None or value.init_from is None:
        return None
    explained, bias = fit_at_scoring(samples)
    if explained is None:
        logger.warning("value.init_from: the first batch cannot tell how the critic does, its returns do not vary")
        return None
    told = f"explained variance {explained:.3f} at scoring of the first batch, mean error {bias:+.3f}"
    least = value.min_initial_explained_variance
    if least is not None and explained < least:
        fix = (
            "pretrain it on rollouts of this policy, let it train first (value.warmup.critic_only_steps), or give less"
        )
        raise AlarmRaised(f"value.min_initial_explained_variance: {told}, wanted are {least:g}; fix: {fix}")
    if explained < 0:
        what = "WORSE THAN THE MEAN: the critic of value.init_from misleads on rollouts of this policy"
        logger.warning("{} ({}); consider value.warmup.critic_only_steps", what, told)
    else:
        logger.info("critic from {}: {}", value.init_from, told)
    return explained


def fit_at_scoring(samples: Iterable[TrainingSample]) -> tuple[float | None, float]:
    """How the values that a batch was scored with explain its targets, over the tokens that train the critic.

    Args:
        samples: Credited; one whose target holds the critic's own value says nothing and is left out.

    Returns:
        Explained variance, None where undefined; and the mean of value minus target.
    """
    returns, values = [np.zeros(0)], [np.zeros(0)]
    for sample in samples:
        if sample.returns is not None and sample.values is not None and not sample.bootstrapped:
            mask = value_loss_mask(sample)
            returns.append(sample.returns[mask])
            values.append(sample.values[mask])
    y, v = np.concatenate(returns), np.concatenate(values)
    if len(y) < 2:
        return None, 0.0
    variance, bias = float(y.var()), float((v - y).mean())
    if variance <= _FLOOR * max(1.0, float(y.mean()) ** 2):
        return None, bias
    return 1.0 - float((y - v).var()) / variance, bias


def report_overlap(config: Config, environments: Sequence[tuple[Environment, EnvConfig]]) -> float | None:
    """Tell how many of the run's prompts a pretrained critic has seen.

    Args:
        config: Of the run.
        environments: What it trains on.

    Returns:
        Their share; None where the critic was not pretrained, or its folder does not say on what.
    """
    folder = None if config.value is None or config.value.init_from is None else Path(config.value.init_from)
    facts = read_facts(folder) if folder is not None else None
    if folder is None or not isinstance(facts, CriticFacts) or facts.corpus is None:
        return None
    if not (folder / PROMPTS_FILE).is_file():
        return None
    seen = np.frombuffer((folder / PROMPTS_FILE).read_bytes(), dtype="<u8")
    share, num = overlap(seen, _prompts(environments))
    corpus = f"{facts.corpus.rows} rows of {', '.join(facts.corpus.policies)} on {facts.corpus.prompts} prompts"
    logger.info("the critic was pretrained on {}; {:.1%} of {} prompts of this run are among these", corpus, share, num)
    return share


def overlap(seen: np.ndarray, prompts: Iterable[str]) -> tuple[float, int]:
    """Share of prompts that are among those seen, and of how many.

    Args:
        seen: u64 hashes, ascending; as many as are kept, or all.
        prompts: Names.
    """
    hashes = np.unique(np.array([name_hash(prompt) for prompt in prompts], dtype=np.uint64))
    if len(seen) >= MAX_PROMPT_HASHES:
        hashes = hashes[hashes <= seen[-1]]
    return (float(np.isin(hashes, seen).mean()) if len(hashes) else 0.0), len(hashes)


def _prompts(environments: Sequence[tuple[Environment, EnvConfig]]) -> Iterable[str]:
    for environment, config in environments:
        for index in range(min(environment.num_tasks, MAX_TASKS)):
            yield prompt_id_of(config.type, environment.task_id(index))
