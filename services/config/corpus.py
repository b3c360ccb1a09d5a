"""Files that a critic is pretrained on, as far as the configuration and their manifests tell.

Notable:
- Pretraining is a run of the critic's group alone: `[value]` as it is, but for what `pretraining_config` changes.
- Files are checked against their manifests and the run before anything starts; their rows where they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.config.exported import tokenizer_sha256
from services.config.schema import Config
from services.wire.errors import ConfigError
from services.wire.value_rows import RowsManifest, read_manifest


def pretraining_config(config: Config) -> Config:
    """What a pretraining run runs with: one update a batch, learning rate and frozen parts of `[value.pretrain]`.

    Made of its own result it is the same.

    Args:
        config: With a `[value.pretrain]`.

    Raises:
        ConfigError: it has none.
    """
    value = config.value
    if value is None or value.pretrain is None:
        raise ConfigError(["value.pretrain: required but missing; fix: add [value.pretrain] with files = [...]"])
    pretrain = value.pretrain
    optim = value.optim if pretrain.lr is None else value.optim.model_copy(update={"lr": pretrain.lr})
    warmup = value.warmup.model_copy(
        update={"lr_updates": pretrain.lr_updates, "critic_only_steps": 0, "head_only_updates": 0}
    )
    # A clip would hold values near those of a rollout's scoring; there was none.
    loss = value.loss.model_copy(update={"clip": None}) if value.loss.type == "mse" else value.loss
    changes = {
        "optim": optim,
        "warmup": warmup,
        "loss": loss,
        "freeze": list(pretrain.freeze),
        "updates_per_batch": 1,
        "mini_batches": 1,
    }
    return config.model_copy(update={"value": value.model_copy(update=changes)})


def manifests_of(config: Config, model_dir: Path | None) -> list[RowsManifest]:
    """The manifests of `value.pretrain.files`, one for each file, all of which fit the run.

    Args:
        config: With a `[value.pretrain]`.
        model_dir: The run's model, for its tokenizer; None where it is still to be made.

    Raises:
        ConfigError: every manifest that is missing or does not fit.
    """
    assert config.value is not None and config.value.pretrain is not None
    manifests: list[RowsManifest] = []
    problems: list[str] = []
    for name in config.value.pretrain.files:
        try:
            manifest, _ = read_manifest(Path(name))
        except ConfigError as error:
            problems += [f"value.pretrain.files: {problem}" for problem in error.problems]
            continue
        manifests.append(manifest)
        problems += [f"value.pretrain.files: {name}: {problem}" for problem in _misfits(manifest, config, model_dir)]
    if problems:
        raise ConfigError(problems)
    return manifests


def _misfits(manifest: RowsManifest, config: Config, model_dir: Path | None) -> Iterator[str]:
    assert config.value is not None
    gamma = getattr(config.algorithm, "gamma", 1.0)
    if manifest.gamma != gamma:
        yield f"its returns have gamma {manifest.gamma:g}; fix: give algorithm.gamma = {manifest.gamma:g}"
    if manifest.truncation != config.algorithm.truncation:
        what = f"it was recorded with algorithm.truncation = {manifest.truncation!r}"
        yield f"{what}, this is {config.algorithm.truncation!r}; fix: give the same"
    if config.value.loss.type != "mse":
        (low, high), (least, most) = config.value.loss.range, manifest.return_range
        if least < low or most > high:
            fix = f"give value.loss.range = [{min(least, low):g}, {max(most, high):g}]"
            yield f"its returns lie in [{least:g}, {most:g}], the head's in [{low:g}, {high:g}]; fix: {fix}"
    if model_dir is not None:
        ours = tokenizer_sha256(model_dir)
        if manifest.tokenizer_sha256 != ours:
            what = f"it was recorded with the tokenizer {manifest.tokenizer_sha256[:12]}, model.path has {ours[:12]}"
            yield f"{what}; fix: record it anew, or name its model"
