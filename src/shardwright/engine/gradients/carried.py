"""Reductions with a gradient communication hook: the hook reduces most elements, the rest is summed exactly."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch

from shardwright.engine.comm import Communicator, Division, GradientHook, Pending, Site
from shardwright.engine.layout import Packing, TensorSpec
from shardwright.engine.tensors.ranks import Ranks


class _Stretch(NamedTuple):
    """Neighbouring elements of a row: matrices with ``columns`` columns, or, with 0 columns, elements to sum
    exactly."""

    numel: int
    columns: int


def _stretches(packing: Packing, specs: tuple[TensorSpec, ...], ways: int) -> list[_Stretch]:
    """The stretches of a row that has ``ways`` times the elements of a rank's result."""
    row: list[_Stretch] = []
    if packing.shared:
        for segment in packing.shared:
            last = math.prod(specs[segment.members[0].index].shape[-1:])
            columns = last if last and segment.chunk % last == 0 else 1
            row.append(_Stretch(segment.chunk * ways, 0 if segment.replicated else columns))
        return [*row, _Stretch(packing.flag_slots * ways, 0)]
    for part in packing.parts:
        spec = specs[part.index]
        row.append(_Stretch(part.chunk, 0 if spec.replicated else math.prod(spec.row_shape)))
        row.append(_Stretch(part.gap, 0))
    return [*row, _Stretch(packing.flag_slots, 0)] * ways


class Carrier:
    """One collective of a reduction that a hook carries out."""

    def __init__(
        self,
        hook: GradientHook,
        name: str,
        comm: Communicator,
        row: list[_Stretch],
        mesh: Any,
        scatters: bool,
    ) -> None:
        self._hook = hook
        self._comm = comm
        self._sizes = [s.numel for s in row if s.numel]
        self._exact = [not s.columns for s in row if s.numel]
        assert comm.group is not None
        matrices = tuple((s.numel, s.columns) for s in row if s.numel and s.columns)
        self.site = Site(name, comm.group, mesh, comm.device, comm.streams.asynchronous, matrices)
        self._scatters = scatters
        if matrices:
            hook.prepare(self.site, scatters)

    def run(
        self,
        inputs: list[torch.Tensor],
        output: torch.Tensor,
        division: Division,
        announce: Callable[[], None] | None,
        after: Pending | None,
    ) -> Pending:
        """Reduce ``inputs``, each in rank order, into the flat ``output``. If the only input is ``output``:
        all-reduce."""
        streams = self._comm.streams
        name = "reduce" if self._scatters else "all_reduce"
        with streams.fork(name) if after is None else streams.beside(name, after.mark):
            steps = self._steps(inputs, output, division)
            if streams.asynchronous:
                first = self._comm.begin(announce, lambda: next(steps, None))
                return Pending(streams, first, None, keep=inputs, finish=lambda: self._go_on(steps, announce))
            self._comm.begin(announce, lambda: _run(steps))
        return Pending(streams, None, streams.mark(name), keep=(inputs, output))

    def _go_on(self, steps: Generator[Any, None, None], announce: Callable[[], None] | None) -> None:
        """Issue the hook's further collectives. The ranks meet before each, because one may have left meanwhile."""
        while inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED:
            work = self._comm.begin(announce, lambda: next(steps, None))
            if work is not None:
                work.wait()

    def _steps(
        self, inputs: list[torch.Tensor], output: torch.Tensor, division: Division
    ) -> Generator[Any, None, None]:
        comm, count = self._comm, self._comm.world_size if self._scatters else 1
        rows = (
            torch.cat([t.view(count, -1) for t in inputs], 1)
            if len(inputs) > 1
            else inputs[0].view(count, -1)
        )
        stretches = rows.split(self._sizes, dim=1)
        exact = torch.cat([t for t, is_exact in zip(stretches, self._exact, strict=True) if is_exact], 1)
        carried = [t for t, is_exact in zip(stretches, self._exact, strict=True) if not is_exact]
        total = exact.new_empty(exact.shape[1])
        if self._scatters:
            pending = comm.reduce_scatter([total], [exact.view(-1)], Division())
        else:
            total = exact.reshape(-1).clone()
            pending = comm.all_reduce(total, Division())
        results: list[torch.Tensor] = []
        if carried:
            payload = torch.cat(carried, 1)
            if self._scatters:
                result = yield from self._hook.reduce_scatter(payload, self.site)
            else:
                result = yield from self._hook.all_reduce(payload[0], self.site)
            if result.numel() != self.site.numel:
                raise ValueError(
                    f"{self._hook!r} returned {result.numel()} elements for {self.site.name}, expected "
                    f"{self.site.numel}"
                )
            results = list(result.reshape(-1).split([numel for numel, _ in self.site.matrices]))
        yield pending
        sums = list(
            total.split([n for n, is_exact in zip(self._sizes, self._exact, strict=True) if is_exact])
        )
        divisor = comm.world_size if division.average else division.before * division.after
        for target, is_exact in zip(output.split(self._sizes), self._exact, strict=True):
            value = (sums if is_exact else results).pop(0)
            target.copy_(value if divisor == 1 else value / divisor)


def _run(steps: Generator[Any, None, None]) -> None:
    for waited in steps:
        if waited is not None:
            waited.wait()


def carriers(
    hook: GradientHook | None,
    unit: str,
    packing: Packing,
    fingerprint: int,
    specs: tuple[TensorSpec, ...],
    ranks: Ranks,
) -> dict[Communicator, Carrier]:
    """The carrier of each collective of a reduction. Empty without a hook."""
    by_communicator: dict[Communicator, Carrier] = {}
    ways = ranks.parts
    for number, comm in enumerate([*ranks.scatters, *ranks.late, *ranks.replicas] if hook else []):
        assert hook is not None
        scatters = comm not in ranks.replicas
        ways = ways // comm.world_size if scatters else 1
        name = f"{unit or 'root'}.{str(packing.reduce_dtype).removeprefix('torch.')}.{fingerprint}.{number}"
        row = _stretches(packing, specs, ways)
        by_communicator[comm] = Carrier(hook, name, comm, row, ranks.mesh, scatters)
    return by_communicator
