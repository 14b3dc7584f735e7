"""Checkpoints that Fabric saves and loads: wrapped models, whole states, and files of weights.

``named_state.py`` and ``named_loading.py`` define the content of a checkpoint. Nothing here imports ``lightning``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from shardwright.checkpoint import is_checkpoint, load_pretrained
from shardwright.engine import FSDPModule, RankGroup
from shardwright.integrations import named_loading
from shardwright.integrations.fabric_models import Forward


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.module if isinstance(value, Forward) else value for key, value in state.items()}


def file_path(path: str | Path, strategy: str) -> Path:
    """The path in the local file system. ``strategy`` is the class name for errors."""
    if "://" in str(path):
        raise ValueError(
            f"{path} is a remote path, but {strategy} reads and writes only local file systems. Use a local path."
        )
    return Path(path)


def refuse_optimizer(strategy: str) -> NoReturn:
    """Raise, because an optimizer alone cannot be loaded. ``strategy`` is the class name for errors."""
    raise NotImplementedError(
        f"{strategy} needs the model to load an optimizer, since optimizer state is stored by parameter names. Use "
        "fabric.load(path, {'model': model, 'optimizer': optimizer})."
    )


def load_state(path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Restore a state in place. Returns the other values of the checkpoint."""
    inner = unwrapped(state)
    rest = named_loading.load(path, inner, strict, weights_only)
    state.update({key: value for key, value in inner.items() if not isinstance(value, nn.Module)})
    return rest


def read_state(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """The complete content of a file."""
    if is_checkpoint(path):
        raise ValueError(
            f"{path} is a sharded checkpoint, which is loaded into a model. Pass "
            "fabric.load(path, state={'model': model, ...})."
        )
    return named_loading.read_file(path, weights_only)  # type: ignore[no-any-return]


def load_weights(path: Path, module: nn.Module, strict: bool, weights_only: bool | None) -> None:
    """Load weights into a model, before or after ``setup``. A deferred model stores them until ``setup``."""
    model = module.module if isinstance(module, Forward) else module
    if not isinstance(model, FSDPModule) and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise TypeError(
            f"load_raw got a {type(model).__name__} on the meta device, which has no memory to load into. Set it up "
            "first (model = fabric.setup(model)), or build it under fabric.init_module(empty_init=True)."
        )
    if is_checkpoint(path):
        raise ValueError(
            f"{path} is a sharded checkpoint, not a file of weights. Use fabric.load(path, {{'model': model}})."
        )
    if path.is_dir() or path.name.endswith((".safetensors", ".json")):
        load_pretrained(model, path, allow_missing=not strict, allow_unexpected=not strict)
        return
    weights = RankGroup().run_own(lambda: named_loading.read_file(path, weights_only))
    model.load_state_dict(weights, strict=strict)
