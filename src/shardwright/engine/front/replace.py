"""``replace_torch``: puts this engine under torch's names, for programs and frameworks that import these names."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from shardwright.engine.compat.fully_shard import fsdp2_modules, torchs_own
from shardwright.engine.front.api import fully_shard
from shardwright.engine.front.methods import register_fsdp_forward_method
from shardwright.engine.front.module import FSDPModule, UnshardHandle, share_comm_ctx
from shardwright.engine.unit.owning import newest_serial

_OURS: dict[str, Any] = {
    "FSDPModule": FSDPModule,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}


def replace_torch() -> ReplacedTorch:
    """Put this engine in the place of torch's, for programs and frameworks that import ``fully_shard`` after this call.

        sw.replace_torch()
        from torch.distributed.fsdp import fully_shard  # shardwright's

    It replaces the names in ``torch.distributed.fsdp``, ``torch.distributed.fsdp._fully_shard`` and
    ``torch.distributed._composable.fsdp`` for the rest of the process, or until the end of the context if used as a
    context manager. Modules that imported torch's names before keep those names. The result lists these modules as
    ``bound``. A warning names the modules that would still shard with torch's engine. Another one says if
    torch's DDP or FSDP1 wraps a model before the first ``fully_shard``, as Accelerate and the Trainer of transformers
    do on the CPU: once for each call.

    Returns:
        A context manager. ``bound`` is a dict from the name of a loaded module to the names of torch that it has
            imported.
    """
    replaced = ReplacedTorch()
    sharding = [module for module, names in replaced.bound.items() if "fully_shard" in names]
    if sharding:
        warnings.warn(
            "These modules imported torch's fully_shard before shardwright.replace_torch() and still shard with "
            f"torch's engine: {', '.join(sharding)}. Call replace_torch() before they are imported.",
            stacklevel=2,
        )
    return replaced


class ReplacedTorch:
    """The replacement that :func:`replace_torch` returns. As a context manager it ends with the block."""

    def __init__(self) -> None:
        homes = fsdp2_modules()
        self.bound: dict[str, list[str]] = _importers()
        self._before = [
            (home, name, vars(home)[name]) for home in homes for name in _OURS if name in vars(home)
        ]
        for home, name, _ in self._before:
            setattr(home, name, _OURS[name])
        self._watch = _WrapperWatch.begin()

    def __enter__(self) -> ReplacedTorch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for home, name, value in self._before:
            setattr(home, name, value)
        if self._watch is not None:
            self._watch.end()


#: By class of wrappers of torch: their name, and how to get this engine instead.
_WRAPPERS: dict[type[nn.Module], tuple[str, str]] = {
    DistributedDataParallel: (
        "DistributedDataParallel",
        "On the CPU Accelerate and the Trainer of transformers take DDP whatever their settings of FSDP are; on a GPU "
        "Accelerate takes fully_shard with FullyShardedDataParallelPlugin(fsdp_version=2)",
    ),
    FullyShardedDataParallel: (
        "FullyShardedDataParallel",
        "Choose FSDP2 in the framework (in Accelerate fsdp_version=2), which calls fully_shard",
    ),
}


class _WrapperWatch:
    """Warns once when a wrapper of torch gets a model: the wrapper registers it as a submodule.

    It ends without a warning if ``fully_shard`` was called before: then the framework shards with this engine, and the
    wrapper has some other model.
    """

    active: ClassVar[_WrapperWatch | None] = None  #: the one that has not ended

    def __init__(self) -> None:
        self._handle: RemovableHandle = register_module_module_registration_hook(self._registered)
        self._serial = newest_serial()
        _WrapperWatch.active = self

    @classmethod
    def begin(cls) -> _WrapperWatch | None:
        """A new watch, or None if an earlier replacement has one. The earlier watch goes on, and forgets the models
        that were sharded until now."""
        if cls.active is None:
            return cls()
        cls.active._serial = newest_serial()
        return None

    def end(self) -> None:
        self._handle.remove()
        if _WrapperWatch.active is self:
            _WrapperWatch.active = None

    def _registered(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        wrapper = next((_WRAPPERS[kind] for kind in _WRAPPERS if isinstance(module, kind)), None)
        if wrapper is None or inner is None:
            return
        self.end()
        if newest_serial() > self._serial:
            return
        warnings.warn(
            f"torch's {wrapper[0]} wraps {type(inner).__name__}, so shardwright does not shard it, though "
            f"shardwright.replace_torch() was called. {wrapper[1]}. Or shard the model yourself with "
            "shardwright.fully_shard, and do not let the framework wrap it.",
            stacklevel=_outside_torch(),
        )


def _outside_torch() -> int:
    """The number of frames from a warning to the code that called torch."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame, level = frame.f_back, level + 1
    return level


def _importers() -> dict[str, list[str]]:
    """Loaded modules that have imported torch's names. torch's own modules are left out: they accept this engine's
    class."""
    torchs = {id(value): name for name in _OURS if (value := torchs_own(name)) is not None}
    importers = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in ("torch", "shardwright"):
            continue
        values = list(getattr(module, "__dict__", {}).values())
        names = sorted({torchs[id(value)] for value in values if id(value) in torchs})
        if names:
            importers[module_name] = names
    return importers
