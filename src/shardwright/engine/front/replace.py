"""``replace_torch``: puts this engine under torch's names, for programs and frameworks that import these names."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any

from shardwright._torch import fsdp2_modules, torchs_own
from shardwright.engine.front.api import fully_shard
from shardwright.engine.front.methods import register_fsdp_forward_method
from shardwright.engine.front.module import FSDPModule, UnshardHandle, share_comm_ctx

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
    ``bound``. A warning names the modules that would still shard with torch's engine.

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

    def __enter__(self) -> ReplacedTorch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for home, name, value in self._before:
            setattr(home, name, value)


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
