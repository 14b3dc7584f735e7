"""The marks and classes of torch's own ``fully_shard``, whose place this engine takes.

torch.compile, torch's checkpoints and transformers recognise sharded modules by these marks, so modules of this engine
have them, too. ``sw.replace_torch`` finds here what programs import. How modules are sharded is not here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import fsdp as _fsdp

from shardwright.engine.compat.probe import probe

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:  # before torch 2.12

        @dataclass(frozen=True)
        class DataParallelMeshDims:
            """The mesh dimensions that shard and those that replicate, as in torch 2.13."""

            shard: str | tuple[str, ...] | None = None
            replicate: str | tuple[str, ...] | None = None


#: torch's class of sharded modules, by which torch and others recognise them
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
else:
    TorchFSDPModule = probe(_fsdp, "FSDPModule")

_contract: Any = importlib.import_module("torch.distributed._composable.contract")
_STATE_KEY, _REGISTRY_KEY = probe(_contract, "STATE_KEY"), probe(_contract, "REGISTRY_KEY")
_RegistryItem = probe(_contract, "RegistryItem")
#: Key of a module's state: the function inside torch's decorator
_sharding: Any = probe(_fsdp, "fully_shard", "__wrapped__")
#: Attributes by which torch.compile, and transformers, know that every rank must run the same layers and steps
_MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
#: Attributes that mark a module as sharded
SHARDED_MARKS = (_STATE_KEY, _REGISTRY_KEY, *_MANAGED)


def mark_fully_sharded(module: torch.nn.Module, state: Any) -> None:
    """Let torch find ``state`` by ``fully_shard.state(module)``, and the module among those that are sharded."""
    module.__dict__.setdefault(_STATE_KEY, {})[_sharding] = state
    module.__dict__.setdefault(_REGISTRY_KEY, {})[_sharding.__name__] = _RegistryItem()


def mark_managed(module: torch.nn.Module) -> None:
    """Mark a module that is sharded or inside a sharded one, for torch.compile and transformers."""
    module.__dict__.update(dict.fromkeys(_MANAGED, True))


def unmark_fully_sharded(module: torch.nn.Module) -> None:
    """Remove what :func:`mark_fully_sharded` has put on a module."""
    module.__dict__.get(_STATE_KEY, {}).pop(_sharding, None)
    module.__dict__.get(_REGISTRY_KEY, {}).pop(_sharding.__name__, None)


def sharded_state_of(module: torch.nn.Module) -> Any:
    """Return the state that :func:`mark_fully_sharded` or torch's own ``fully_shard`` has put on a module, or None."""
    return module.__dict__.get(_STATE_KEY, {}).get(_sharding)


def sharded_or_replicated_by_torch(module: torch.nn.Module) -> str | None:
    """Return the name of torch's function, ``fully_shard`` or ``replicate``, that was applied to the module, or None.

    This engine's modules have the same mark as those of torch's ``fully_shard``.
    """
    registry = module.__dict__.get(_REGISTRY_KEY, {})
    return next((name for name in (_sharding.__name__, "replicate") if name in registry), None)


_FSDP2_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_FSDP2_NAMES = (
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
_torchs_own = {name: getattr(_fsdp, name, None) for name in _FSDP2_NAMES}


def fsdp2_modules() -> list[ModuleType]:
    """Return those modules from which programs import FSDP2 that this torch has."""
    modules = []
    for name in _FSDP2_MODULES:
        try:
            modules.append(importlib.import_module(name))
        except ImportError:
            pass
    return modules


def torchs_own(name: str) -> Any:
    """Return torch's own object of a name of FSDP2, even while another one replaces it, or None if torch has none."""
    return _torchs_own[name]


class _FSDPClasses(dict[type, type]):
    """torch's table of the sharded class of each class, in which a reader finds this engine's classes, too.

    torch itself, which looks with ``get``, does not find them and so does not use them.
    """

    def __init__(self, torchs: dict[type, type]) -> None:
        super().__init__(torchs)
        self.ours: dict[type, type] = {}

    def __contains__(self, cls: object) -> bool:
        return super().__contains__(cls) or cls in self.ours

    def __missing__(self, cls: type) -> type:
        return self.ours[cls]


def _share_classes() -> Any:
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    known = getattr(module, "cls_to_fsdp_cls", {})
    if hasattr(known, "ours"):  # the package was imported before
        return known
    classes = _FSDPClasses(known)
    if hasattr(
        module, "cls_to_fsdp_cls"
    ):  # else this torch has no such table, and nothing that looks into it
        module.cls_to_fsdp_cls = classes
    return classes


#: The sharded class of each class, where torch.compile looks for it.
fsdp_classes: dict[type, type] = _share_classes().ours
