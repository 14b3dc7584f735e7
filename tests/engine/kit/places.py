"""Where tests run: strategies on meshes of one and two axes."""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

import shardwright as sw
from shardwright.engine.extend.named_strategies import resolve, strategies
from tests.engine.kit.meetings import fresh_meetings
from tests.support import WorkerPools, world_mesh
from tests.support.matrix import together
from tests.support.pool import run_case

Stages = tuple[int, ...]


Shape = tuple[int, ...]


#: Names by the stages that they stand for.
NAMED = {
    resolve(name, ndim).stages: name
    for name, own in ((each.name, each.stages) for each in strategies)
    for ndim in (1, 2)
    if len(own) in (1, ndim)
}


def strategy_of(stages: Stages) -> str | sw.Strategy:
    """The name where there is one, so that both ways of saying it are used."""
    return NAMED.get(stages) or sw.Strategy.of_stages(*stages)


class On(NamedTuple):
    """A strategy on a mesh."""

    stages: Stages
    shape: Shape

    def __str__(self) -> str:
        return f"{NAMED.get(self.stages) or '-'.join(map(str, self.stages))}@{'x'.join(map(str, self.shape))}"

    @property
    def strategy(self) -> str | sw.Strategy:
        return strategy_of(self.stages)

    @property
    def mesh(self) -> DeviceMesh:
        return world_mesh(*self.shape, names=("replicate", "shard")[-len(self.shape) :])

    @property
    def parts(self) -> int:
        """Into how many shards parameters are cut."""
        return math.prod(size for size, stage in zip(self.shape, self.stages, strict=True) if stage)

    @property
    def ragged(self) -> bool:
        """Whether parameters are cut over two axes of more than one rank each, for which DTensor has no word."""
        return sum(size > 1 and stage > 0 for size, stage in zip(self.shape, self.stages, strict=True)) > 1

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the tensors of a state dict."""
        return tuple(Shard(0) if stage and not self.ragged else Replicate() for stage in self.stages)

    @property
    def reshards(self) -> tuple[bool | None, ...]:
        """Legal values of reshard_after_forward: True has no meaning where full parameters are kept for the step."""
        return (None, False) if max(self.stages) in (1, 2) else (None, True, False)

    def shows(self, strength: int, *others: Hashable) -> Iterator[Hashable]:
        """The settings, for `select`, that a row here with these ``others`` shows: of which axes two. Where both axes
        have several ranks, since elsewhere there is but one: each strategy, and with each kind of it all the others."""
        inner = len(self.shape), self.stages[-1]
        yield from together(strength, self.stages[:-1], inner, self.shape, *others)
        if strength > 1 and min(self.shape) > 1:
            yield self.stages
            yield from ((self.reductions, other) for other in others)

    @property
    def reductions(self) -> frozenset[int]:
        """By which collectives gradients are reduced, and when: all-reduces, late reduce-scatters, those of every
        backward."""
        return frozenset(min(stage, 2) for stage in self.stages)


def on(name: str, *shapes: Shape) -> list[On]:
    """The strategy of this name, or of stages like "0-2", on each of these meshes."""
    given = [(tuple(map(int, name.split("-"))) if name[0].isdigit() else None, shape) for shape in shapes]
    return [On(stages or resolve(name, len(shape)).stages, shape) for stages, shape in given]


def on_meshes(where: list[Any], timeout: float = 30.0) -> Callable[[Callable[..., Any]], Any]:
    """As ``multirank``, with as many ranks as each mesh has; items of ``where`` are an `On` or begin with one.

    A third of the rows runs on gloo, as ranks of different hosts do, the others through shared memory.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        names = [n for n in inspect.signature(body).parameters if n not in ("rank", "world_size")]
        first = names[: 1 if isinstance(where[0], On) else len(where[0])]

        @functools.wraps(body)
        def case(worker_pools: WorkerPools, **arguments: Any) -> None:
            ranks = math.prod(arguments[first[0]].shape)
            run_case(worker_pools, body, ranks, timeout, **arguments)

        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        case.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, keyword) for n in ("worker_pools", *names)]
        )

        @functools.wraps(body)
        def on_host(rank: int, world_size: int, **arguments: Any) -> Any:
            row = "-".join(str(arguments[name]) for name in first)
            assert " at 0x" not in row, (
                f"{row} has other words on each rank, which chooses the transport by them"
            )
            with fresh_meetings("gloo") if zlib.crc32(row.encode()) % 3 == 0 else nullcontext():
                return body(rank=rank, world_size=world_size, **arguments)

        case.multirank_body = on_host  # type: ignore[attr-defined]
        values = [(w,) if isinstance(w, On) else tuple(w) for w in where]
        rows = [pytest.param(*v, id="-".join(map(str, v))) for v in values]
        return pytest.mark.multirank(pytest.mark.parametrize(tuple(first), rows)(case))

    return decorate
