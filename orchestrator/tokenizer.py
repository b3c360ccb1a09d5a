"""Text to token ids and back, from a model folder's `tokenizer.json`, without torch or transformers.

Notable:
- Never truncates and never pads, whatever `tokenizer.json` is set to do: a shifted prompt would train on the wrong
  tokens without a word.
- Adds no special tokens and hides none: a prompt is exactly the text's ids, and a special token inside an answer stays
  visible to whoever grades it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from services.wire.errors import ConfigError


class Tokenizer:
    """A model folder's tokenizer.

    Raises:
        ConfigError: `tokenizer.json` is missing, unreadable, or nothing in the folder names an end-of-sequence token.
    """

    def __init__(self, model_dir: str | Path) -> None:
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError([f"model.path: {path} does not exist; a folder with a tokenizer.json is needed"])
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise ConfigError([f"model.path: {path} is not a tokenizer: {error}"]) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_id = _find_eos(folder, self._tokenizer)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_id: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        """not vocab_size - 1 where ids have holes"""

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids, all of them and no others."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _find_eos(folder: Path, tokenizer: tokenizers.Tokenizer) -> int:
    """Look where models keep it: the tokenizer's own configuration first, then the model's."""
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return token_id
    for name in ("generation_config.json", "config.json"):
        token_id = _read_json(folder / name).get("eos_token_id")
        if isinstance(token_id, list) and token_id:
            token_id = token_id[0]
        if isinstance(token_id, int):
            return token_id
    raise ConfigError([f"model.path: nothing in {folder} names an end-of-sequence token"])


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
