"""The names of Hugging Face for the checkpoint of a run, for `shardwright convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint import KeyMap
from shardwright.train.models import hugging_face
from shardwright.train.models.offers import offers_of
from shardwright.train.run.folder import RunFolder


@dataclass(frozen=True)
class RunNames:
    """Names and config.json for safetensors of a run's checkpoint.

    Attributes:
        key_map, config: the names, and the content of config.json; None if the kind of model has none.
        reason: why there are none, in words.
    """

    key_map: KeyMap | None = None
    config: dict[str, Any] | None = None
    reason: str = ""


def names_of_run(checkpoint: Path) -> RunNames | None:
    """Return the names for a checkpoint of a run. None if no run has saved it.

    Raises:
        UserError: the configuration of the run cannot be read.
    """
    folder = checkpoint.resolve().parent
    run = RunFolder(folder.parent)
    if folder != run.checkpoints or not run.exists():
        return None
    config = run.config()
    if config.finetune.has_adapters:
        return RunNames(reason="the run has adapters, which `shardwright export` folds into its model")
    if config.finetune.has_base:
        return RunNames(
            reason="its checkpoints do not hold frozen parameters; `shardwright export` adds them"
        )
    shape = config.model.shape()
    if offers_of(shape).key_map is None:
        return RunNames(reason=f"its kind of model, {config.model.kind!r}, has no names of Hugging Face")
    return RunNames(hugging_face.key_map(shape), hugging_face.config_json(shape))
