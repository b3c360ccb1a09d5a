"""What an exported folder says of itself, and whether a critic may start from a folder (`value.init_from`).

    counterpoint.json   role, run, source, tokenizer hash; of a critic also its form, support, points and gamma

Notable:
- No torch: `config.json`, `tokenizer.json` and the headers of safetensors files are JSON, so a wrong folder is refused
  before anything starts. The value service asks the same questions again of the folders that it really reads.
- A tokenizer's hash covers what its file means, not its layout: truncation and padding are settings of its last user.
- A head that we did not export is refused, never made anew in silence: nobody says what its outputs mean.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from services.config.base import Section
from services.config.model_path import folder_problem, text_config
from services.config.train import MseConfig, ValueLossConfig

FACTS_FILE = "counterpoint.json"
HEAD_FILE = "value_head.safetensors"
"""`weight`, `bias` and `points` of a critic whose architecture has no class for token classification."""
PROMPTS_FILE = "corpus_prompts.bin"
"""Hashes of the prompts that a critic was pretrained on: u64 little-endian, ascending."""
MAX_PROMPT_HASHES = 100_000
"""The least ones are kept: a sample of all prompts, large enough to tell how far two sets of them overlap."""
_FOREIGN_HEADS = frozenset({"score", "classifier", "v_head", "value_head", "reward_head", "qa_outputs"})
_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)
_MAX_HEADER_BYTES = 100 * 2**20

Problem = tuple[str, str]
"""What is wrong, and the fix."""


class SupportFacts(Section):
    """The evenly spaced points of a classification head: ends and padding (see `value_service.losses.support`)."""

    low: float
    high: float
    num_bins: int
    pad_bins: int

    @property
    def num_points(self) -> int:
        """K, the outputs of the head."""
        return self.num_bins + 2 * self.pad_bins

    def __str__(self) -> str:
        return f"{self.num_bins} bins on [{self.low:g}, {self.high:g}], {self.pad_bins} more beyond either end"


HeadSupport = Literal["scalar"] | SupportFacts
""""scalar": the one output is the value. Else the outputs are logits z, and the value is softmax(z) . points."""


class PolicyFacts(Section):
    """`counterpoint.json` of an exported policy."""

    format: Literal[1] = 1
    role: Literal["policy"] = "policy"
    run: str
    """Name of the run."""
    source: str
    """Where in the run directory the weights were."""
    tokenizer_sha256: str


class CorpusFacts(Section):
    """What a critic was pretrained on."""

    rows: int
    """Held-out ones included, as everywhere here."""
    prompts: int
    """Different ones; hashes of them (of the least, where there are many) are in `corpus_prompts.bin`."""
    policies: list[str]
    """Who sampled the rows."""
    held_out_explained_variance: float | None = None
    """At the end, over the tokens of all held-out rows; None where nothing was held out, or it is undefined."""


class CriticFacts(Section):
    """`counterpoint.json` of an exported critic.

    Its `config.json` holds the same, but for the corpus, under the key "counterpoint".
    """

    format: Literal[1] = 1
    role: Literal["critic"] = "critic"
    form: Literal["token_classification", "backbone_and_head"]
    """Whether transformers has the class that computes the head, or the head lies beside the backbone."""
    values: Literal["value at t = state after token t"] = "value at t = state after token t"
    """The output at position t is the value of the state before token t + 1."""
    support: HeadSupport
    """What the outputs mean."""
    points: list[float] | None = None
    """[K] ascending."""
    gamma: float
    """Discount of the returns that it learned."""
    run: str
    source: str
    tokenizer_sha256: str
    corpus: CorpusFacts | None = None
    """Of a critic from `counterpoint pretrain-value`."""


def support_of_loss(loss: ValueLossConfig) -> HeadSupport:
    """What a head that trains with this loss means by its outputs."""
    if isinstance(loss, MseConfig):
        return "scalar"
    low, high = loss.range
    return SupportFacts(low=low, high=high, num_bins=loss.bins, pad_bins=loss.pad)


def tokenizer_sha256(folder: Path) -> str:
    """Hash of what `tokenizer.json` means, its settings of truncation and padding aside."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    meaning = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def read_facts(folder: Path) -> PolicyFacts | CriticFacts | None:
    """`counterpoint.json` of a folder; None where there is none.

    Raises:
        ValueError: it is not one of ours, with one line that says why.
    """
    path = folder / FACTS_FILE
    if not path.is_file():
        return None
    content: Any = json.loads(path.read_bytes())
    role = content.get("role") if isinstance(content, dict) else None
    try:
        return CriticFacts.model_validate(content) if role == "critic" else PolicyFacts.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Names and shapes in a safetensors file, from its header alone.

    Raises:
        ValueError: it is no safetensors file.
    """
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        header: Any = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else None
    if not isinstance(header, dict):
        raise ValueError("no header")
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def head_shapes(folder: Path, facts: CriticFacts) -> tuple[list[int] | None, list[int] | None]:
    """Shapes of an exported head's weight and bias, as they lie in the files; None for one that is missing."""
    prefix, pattern = ("score.", "model*.safetensors") if facts.form == "token_classification" else ("", HEAD_FILE)
    found = {name: shape for path in folder.glob(pattern) for name, shape in tensor_shapes(path).items()}
    return found.get(f"{prefix}weight"), found.get(f"{prefix}bias")


def init_from_problems(path: str, loss: ValueLossConfig, model_dir: Path | None) -> Iterator[Problem]:
    """Why a critic cannot start from a folder.

    Args:
        path: `value.init_from`.
        loss: The run's value loss, which fixes the head's support.
        model_dir: The run's model, complete; None where it is not made yet.
    """
    folder = Path(path)
    if path.partition(":")[0] in ("tiny", "dummy") and not folder.is_dir():
        yield f"{path} is no folder", "delete it: without it the critic starts as model.path says"
        return
    found = folder_problem(folder)
    if found is not None:
        yield found
        return
    try:
        facts = read_facts(folder)
        if isinstance(facts, CriticFacts):
            yield from _head_problems(folder, facts, loss)
        else:
            yield from _foreign_heads(folder)
        if model_dir is not None:
            yield from _other_model(folder, facts, model_dir)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # bytes of a user's folder
        yield f"{folder} is damaged: {str(error).splitlines()[0]}", "export it again"


def policy_problem(path: str) -> Problem | None:
    """Why a run cannot start from a complete `model.path` although it looks like a model: it is a critic."""
    folder = Path(path)  # "tiny:..." and "dummy:..." are no folders
    if "counterpoint" in json.loads((folder / "config.json").read_bytes() if folder.is_dir() else "{}"):
        fix = f'name a language model, and give value.init_from = "{folder}"'
        return f"{folder} is an exported critic: it has no output head", fix
    return None


def _head_problems(folder: Path, facts: CriticFacts, loss: ValueLossConfig) -> Iterator[Problem]:
    ours = support_of_loss(loss)
    if facts.support != ours:
        fix = 'give value.loss.type = "mse"' if facts.support == "scalar" else "give value.loss the head's support"
        yield f"{folder} has a head for {_shown(facts.support)}, value.loss wants {_shown(ours)}", fix
        return
    weight, bias = head_shapes(folder, facts)
    num_outputs = 1 if facts.support == "scalar" else facts.support.num_points
    width = text_config(folder).get("hidden_size", weight[-1] if weight else None)  # some architectures name it anew
    if weight != [num_outputs, width] or bias != [num_outputs]:
        expected = f"{[num_outputs, width]} and {[num_outputs]}"
        yield f"{folder} has a head of shapes {weight} and {bias}, not {expected}", "export it again"


def _foreign_heads(folder: Path) -> Iterator[Problem]:
    for path in sorted(folder.glob("*.safetensors")):
        for name, shape in tensor_shapes(path).items():
            if name.split(".")[0] in _FOREIGN_HEADS:
                what = f"{folder} has a head ({name} {shape}) and no {FACTS_FILE} that says what it means"
                yield what, "name a causal language model, or a critic from `counterpoint export`"
                return


def _other_model(folder: Path, facts: PolicyFacts | CriticFacts | None, model_dir: Path) -> Iterator[Problem]:
    own, base = text_config(folder), text_config(model_dir)
    fix = "name a folder of the same architecture and tokenizer as model.path"
    for key in _SHAPE_KEYS:
        if own.get(key) is not None and base.get(key) is not None and own[key] != base[key]:
            yield f"{folder} has {key} {own[key]}, model.path has {base[key]}", fix
            return
    theirs, ours = tokenizer_sha256(folder), tokenizer_sha256(model_dir)
    if facts is not None and facts.tokenizer_sha256 != theirs:
        what = (
            f"{folder} was exported with tokenizer {facts.tokenizer_sha256[:12]}, its tokenizer.json is {theirs[:12]}"
        )
        yield what, "restore its tokenizer.json, or export it again"
    elif theirs != ours:
        yield f"{folder} has the tokenizer {theirs[:12]}, model.path has {ours[:12]} (sha256)", fix


def _shown(support: HeadSupport) -> str:
    return "a scalar" if support == "scalar" else str(support)
