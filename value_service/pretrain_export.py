"""The end of a pretraining run: its critic as a folder for `value.init_from`, with what it was trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from loguru import logger

from services.config.exported import FACTS_FILE, PROMPTS_FILE, CorpusFacts, CriticFacts, read_facts
from services.runtime.durable import remove_dir, rename_dir
from services.training.export_run import export_commit
from value_service.pretrain_data import RowIndex

FOLDER = "critic"


def export_pretrained(run_dir: Path, step: int, index: RowIndex, *, held_out: float | None) -> Path:
    """Write `RUN_DIR/critic` from a commit; an earlier one is replaced when this one is whole.

    Args:
        run_dir: Of the pretraining run.
        step: Finished updates of the commit.
        index: Of the rows.
        held_out: Explained variance of the held-out rows, if there are any.

    Returns:
        The folder.

    Raises:
        CannotWrite: the disk does not take it.
    """
    out, staged = run_dir / FOLDER, run_dir / f".{FOLDER}.new"
    remove_dir(staged)
    export_commit(run_dir, "critic", step, staged)
    facts = read_facts(staged)
    assert isinstance(facts, CriticFacts), "just written"
    num_prompts = len(np.unique(index.columns["prompt"]))
    corpus = CorpusFacts(
        rows=len(index), prompts=num_prompts, policies=index.policies, held_out_explained_variance=held_out
    )
    (staged / PROMPTS_FILE).write_bytes(index.prompt_hashes().astype("<u8").tobytes())
    whole = facts.model_copy(update={"corpus": corpus})
    (staged / FACTS_FILE).write_text(whole.model_dump_json(indent=1) + "\n")
    remove_dir(out)
    rename_dir(staged, out)
    logger.info("critic exported to {}", out)
    return out
