"""`shardwright layout`: what every layout would cost a configured model, unit by unit, worked out without ranks.

The model is made on the meta device, so a table of the largest one needs no more memory than one of the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from shardwright.engine.extend import layouts
from shardwright.engine.layout import Ragged, plan
from shardwright.train.config import ModelConfig, ParallelConfig
from shardwright.train.config.axes import AXES
from shardwright.train.errors import UserError
from shardwright.train.models.build import model_of
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.parallel.engines.units import lookups_of


def compared() -> tuple[str | Ragged, ...]:
    """Every layout that has a name, and one with blocks of rows."""
    return (*(each.layout() or each.name for each in layouts), Ragged(32))


STORAGE = torch.float32
"""The dtype in which the trainer keeps weights."""
LEGEND = (
    "MiB/rank: the parameters that a rank keeps, in float32. padding: elements that belong to no parameter, divided "
    "by elements that do. balance: the largest number of elements on a rank, divided by the mean."
)


@dataclass(frozen=True)
class UnitShapes:
    """Parameters that are gathered together: a name, and their shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]


def units_of(model: LanguageModel) -> list[UnitShapes]:
    """Return the units into which `train.parallel` cuts the model, in the order in which they run; none without
    parameters."""
    names = {module: name for name, module in model.named_modules()}
    alone = [*lookups_of(model), *model.blocks()]
    together: list[list[nn.Module]] = [*([module] for module in alone), model.head()]
    parts = [(", ".join(names[module] for module in modules), modules) for modules in together]
    parts.append(("root", [model]))
    seen: set[nn.Parameter] = set()
    units = []
    for unit, modules in parts:
        # A dict, since a tied matrix is in two modules of its unit.
        own = dict.fromkeys(p for module in modules for p in module.parameters() if p not in seen)
        seen |= own.keys()
        if own:
            units.append(UnitShapes(unit, tuple(tuple(p.shape) for p in own)))
    return units


def alike(units: Sequence[UnitShapes]) -> Iterator[tuple[str, UnitShapes]]:
    """Units of one list that follow each other with equal shapes, as one: what to call them, and one of them."""
    for _, group in groupby(units, lambda unit: (unit.name.rpartition(".")[0], unit.shapes)):
        first, *others = group
        if others:
            number = others[-1].name.rpartition(".")[2]
            yield f"{first.name}..{number} ({len(others) + 1} units)", first
        else:
            yield first.name, first


def layout(model_settings: ModelConfig, parallel: ParallelConfig, world_sizes: Sequence[int]) -> int:
    """Print a table for each unit of the configured model, with a row for each number of ranks and layout; return 0."""
    for axis in AXES:
        value = getattr(parallel, axis.name)
        if value > 1:
            raise UserError(
                f"{axis.key}: expected 1, since the tables show layouts of whole layers, found {value}; pass "
                f"--{axis.key} 1"
            )
    with torch.device("meta"):
        model = model_of(model_settings.shape())
    compute = getattr(torch, parallel.param_dtype)
    console = Console()
    with console.capture() as printed:
        for name, unit in alike(units_of(model)):
            mib = sum(map(prod, unit.shapes)) * STORAGE.itemsize / 2**20
            count = f"{len(unit.shapes)} parameter{'s' if len(unit.shapes) > 1 else ''}"
            console.print(f"{name}: {count}, {mib:,.3f} MiB", highlight=False)
            console.print(table_of(unit, world_sizes, compute))
        console.print(LEGEND, highlight=False)
    print(printed.get(), end="")  # Not rich's own: `| head` is then the command line's to deal with.
    return 0


def table_of(unit: UnitShapes, world_sizes: Sequence[int], compute: torch.dtype) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ranks", justify="right")
    table.add_column("layout")
    for name in ("segments", "MiB/rank", "padding", "balance"):
        table.add_column(name, justify="right")
    for ranks in world_sizes:
        for number, kind in enumerate(compared()):
            planned = plan(unit.shapes, ranks, kind, dtypes=[(STORAGE, compute)] * len(unit.shapes))
            mib = planned.shard_numel * STORAGE.itemsize / 2**20
            table.add_row(
                "" if number else f"{ranks:,}", str(kind), str(len(planned.segments)),
                f"{mib:,.3f}", f"{100 * planned.padding:,.2f}%", f"{planned.balance:,.3f}",
            )  # fmt: skip
    return table
