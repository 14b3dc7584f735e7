"""Says which engine sharded a model, and how: for models of this engine, of torch's, and for plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardwright.common.package import __version__
from shardwright.engine.compat.fully_shard import TorchFSDPModule
from shardwright.engine.extend import NamedMemory
from shardwright.engine.extend.named_strategies import strategies
from shardwright.engine.front.module import FSDPModule
from shardwright.engine.model.root import root_of
from shardwright.engine.unit.owning import units_of
from shardwright.engine.unit.unit import Unit


@dataclass(frozen=True)
class Description:
    """The engine of a model and its settings. ``str()`` of it is one line.

    Attributes:
        engine: "shardwright", "FSDP2", "FSDP1" and "DDP" (these three are torch's), or "none".
        strategy: the name or the stages of what is sharded; several, if units differ. None: nothing is sharded.
        mesh: the data-parallel ranks, as "8" or "replicate 2 x shard 4".
        layout: how parameters are cut; None: this engine does not say.
        memory: where the memory of a step comes from.
        units: the number of modules (units) that are gathered by themselves.
        others: other engines that have parts of the model, or wrap it.
    """

    engine: str
    strategy: str | None = None
    mesh: str | None = None
    layout: str | None = None
    memory: str | None = None
    units: int = 0
    others: tuple[Description, ...] = ()

    def __str__(self) -> str:
        if self.engine == "none":
            return "not sharded: a plain model, with all parameters on each rank"
        name = f"shardwright {__version__}" if self.engine == "shardwright" else f"torch's {self.engine}"
        parts = [f"{self.strategy} over {self.mesh} ranks"]
        if self.units:
            parts.append(f"{self.units} unit" + ("s" if self.units > 1 else ""))
        parts += [
            f"{key} {value}" for key, value in (("layout", self.layout), ("memory", self.memory)) if value
        ]
        also = "".join(f"; also {other}" for other in self.others)
        return f"sharded by {name}: {', '.join(parts)}{also}"


def describe(model: nn.Module) -> Description:
    """Describe the engine that sharded ``model``, or modules inside it, and how it did. It does not communicate.

        print(sw.describe(model))  # sharded by shardwright 0.2.0: zero3 over 8 ranks, 33 units, ...

    Args:
        model: any module, also one inside a wrapper of Lightning, Accelerate or torch.compile.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe: expected a torch.nn.Module, found {type(model).__name__}")
    units = [unit for unit in units_of(model) if unit.parameters]
    engines = [_describe_units(units)] if units else []
    modules = [
        module for module in model.modules() if not isinstance(module, FSDPModule)
    ]  # which is torch's, too
    for kind, engine in (
        (TorchFSDPModule, "FSDP2"),
        (FullyShardedDataParallel, "FSDP1"),
        (DistributedDataParallel, "DDP"),
    ):
        found = [module for module in modules if isinstance(module, kind)]
        if found:
            engines.append(_describe_torch(engine, found))
    return replace(engines[0], others=tuple(engines[1:])) if engines else Description("none")


def _describe_units(units: Sequence[Unit]) -> Description:
    root = root_of(units[0])
    memory: Any = root.pools.memory if root is not None else units[0].options.memory
    return Description(
        "shardwright",
        _joined(_strategy(unit.ranks.strategy.stages) for unit in units),
        _joined(_mesh(unit.ranks.mesh) for unit in units),
        _joined(
            "per_parameter" if unit.arguments.layout is None else str(unit.arguments.layout) for unit in units
        ),
        memory.name if isinstance(memory, NamedMemory) else type(memory).__name__,
        len(units),
    )


def _describe_torch(engine: str, modules: Sequence[Any]) -> Description:
    if engine == "FSDP2":
        mesh = next(
            (p.device_mesh for m in modules for p in m.parameters() if hasattr(p, "device_mesh")), None
        )
        ranks = _mesh(mesh) if mesh is not None else None
        return Description(
            engine, "hsdp" if mesh is not None and mesh.ndim > 1 else "zero3", ranks, units=len(modules)
        )
    if engine == "FSDP1":
        strategy = modules[0].sharding_strategy.name.lower()
        return Description(engine, strategy, str(modules[0].world_size), units=len(modules))
    return Description(engine, "replicated", str(dist.get_world_size(modules[0].process_group)))


def _strategy(stages: tuple[int, ...]) -> str:
    uniform = len(set(stages)) == 1
    for named in strategies:
        if named.stages == stages or (uniform and named.stages == stages[:1]):
            return named.name
    return f"stages {stages}"


def _mesh(mesh: DeviceMesh) -> str:
    if mesh.ndim == 1:
        return str(mesh.size())
    names = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


def _joined(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))
