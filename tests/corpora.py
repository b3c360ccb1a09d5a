"""Files of rows for pretraining, every number written out or from a seed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from services.wire.value_rows import MANIFEST, FileFacts, RowsManifest, write_manifest

VOCABULARY = 261
SHA = "0" * 64


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Two prompt tokens, two actions, an observation, an action."""
    plain = {
        "id": f"r{number}",
        "prompt_id": f"add:{number}",
        "policy_id": "sft",
        "token_ids": [5, 6, 7, 8, 9, 10],
        "action_mask": [0, 0, 1, 1, 0, 1],
        "return": 1.0,
        "stop_reason": "terminated",
    }
    return {key: value for key, value in (plain | changes).items() if value is not None}


def write_corpus(
    folder: Path, lines_or_rows: list[dict[str, Any]] | list[bytes], *, name: str = "rows.jsonl", **facts
) -> Path:
    """The file, and its manifest beside it; an entry of `facts` replaces one of the manifest's."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines_or_rows]
    data = b"".join(line + b"\n" for line in lines)
    (folder / name).write_bytes(data)
    own = {"sha256": hashlib.sha256(data).hexdigest(), "rows": len(lines_or_rows)}
    own |= {key: facts.pop(key) for key in ("sha256", "rows") if key in facts}
    plain = {"tokenizer_sha256": SHA, "gamma": 1.0, "reward_range": [0.0, 1.0]}
    manifest = RowsManifest(files={name: FileFacts(**own)}, **(plain | facts))
    (folder / MANIFEST).write_bytes(write_manifest(folder, manifest))
    return folder / name


def learnable(num_prompts: int, per_prompt: int = 4, *, seed: int = 0, policies: int = 2) -> list[dict[str, Any]]:
    """Rows whose outcome is told by the first token of the answer, of several policies in turn."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_prompts * per_prompt):
        prompt, good = number // per_prompt, int(rng.integers(2))
        answer = [60 + good, *rng.integers(20, 50, int(rng.integers(1, 6))).tolist()]
        rows.append(
            {
                "id": f"r{number}",
                "prompt_id": f"add:{prompt}",
                "policy_id": f"p{number % policies}",
                "token_ids": [3, 4 + prompt % 10, *answer],
                "action_mask": [0, 0] + [1] * len(answer),
                "return": float(good),
                "stop_reason": "terminated",
            }
        )
    return rows
