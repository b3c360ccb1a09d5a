"""What `model.path` means: a local folder, `tiny:TASK` or `dummy:CONFIG_DIR`.

Notable:
- The tiny model is made in a child process before anything else starts, and kept under `runs/.models/<hash>`; the
  hash covers the task, the seed and the recipe's source, so a changed recipe makes a new model.
- A model folder appears by one rename: if it exists, it is complete.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MODELS_DIR = Path("runs") / ".models"
"""Where made models are kept, in the working directory."""
TINY_SEED = 0
_RECIPE = ("services/model/tiny.py", "services/config/tasks.py")


@dataclass(frozen=True)
class ModelSource:
    """Where a run's model lies and how it comes to be there."""

    dir: Path
    """Local Hugging Face folder."""
    init: Literal["pretrained", "random"] = "pretrained"
    argv: list[str] | None = None
    """Command that makes the folder named as its first argument after the module; None where nothing is to be made."""

    @property
    def is_complete(self) -> bool:
        """Whether the folder is there."""
        return self.argv is None or self.dir.is_dir()

    def make_argv(self, folder: Path) -> list[str]:
        """The command with `folder` in place of the final folder."""
        return [str(folder) if part == str(self.dir) else part for part in self.argv or []]


def model_source(path: str, *, root: Path, models_dir: Path, python: str = sys.executable) -> ModelSource:
    """Resolve `model.path`.

    Args:
        path: The configured value.
        root: Project root, where the tiny model's recipe lies.
        models_dir: Where made models are kept.
        python: Interpreter of the child that makes one.
    """
    kind, _, rest = path.partition(":")
    if kind == "dummy" and rest:
        return ModelSource(Path(rest).resolve(), init="random")
    if kind == "tiny" and rest:
        target = models_dir.resolve() / _recipe_hash(root, rest)
        argv = [python, "-m", "services.model.tiny", str(target), "--task", rest, "--seed", str(TINY_SEED)]
        return ModelSource(target, argv=argv)
    return ModelSource(Path(path).resolve())


def _recipe_hash(root: Path, task: str) -> str:
    digest = hashlib.sha256(f"{task}/{TINY_SEED}/".encode())
    for source in _RECIPE:
        digest.update((root / source).read_bytes())
    return f"tiny-{task}-{digest.hexdigest()[:12]}"
