"""Graphs for the CPU in the place of CUDA graphs, for the communicators of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.engine.comm import Communicator
from tests.engine.kit.models import units_of
from tests.support.replay import CpuGraphs


@contextmanager
def graphs(model: nn.Module) -> Iterator[None]:
    """The model's communicators, which other models have too, take the CPU for a device with graphs meanwhile."""
    found: set[Communicator | None] = set()
    for unit in units_of(model):
        ranks = unit.ranks
        found |= {unit.site.neighbours, ranks.local, *ranks.every, *ranks.once, *ranks.gathers}
        found |= {*ranks.scatters, *ranks.late, *ranks.replicas}
    communicators = found - {None}
    before = [(comm, comm.streams, comm.exchanges) for comm in communicators]
    methods = {name: getattr(Communicator, name) for name in ("all_gather", "reduce_scatter", "_divided")}

    def at_once(method: Any) -> Any:
        """Streams keep collectives in order, the CPU does not."""

        def call(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            if method is methods["_divided"]:
                args[0].wait()
            pending = method(self, *args, **kwargs)
            pending.wait()
            return pending

        return call

    streams = CpuGraphs()
    for comm in communicators:
        comm.streams, comm.exchanges = streams, False
    for name, method in methods.items():
        setattr(Communicator, name, at_once(method))
    try:
        yield
    finally:
        for comm, old, exchanges in before:
            comm.streams, comm.exchanges = old, exchanges
        for name, method in methods.items():
            setattr(Communicator, name, method)
