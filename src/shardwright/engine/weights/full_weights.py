"""A unit's full weights: in compute dtypes, in storage dtypes, and the part that neighbours keep."""

from __future__ import annotations

import bisect
import weakref
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from shardwright.engine.base.home import Place
from shardwright.engine.base.settings import Transport
from shardwright.engine.base.site import UnitSite
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.layout import UnitLayout
from shardwright.engine.memory import Owner, Slab
from shardwright.engine.tensors.parameter import ManagedParameter, in_place_view, plain_of
from shardwright.engine.weights.coding import number_of
from shardwright.engine.weights.gather import Extend, Gather, SecondaryShard, plan_gather
from shardwright.engine.weights.ledger import FullCounters


class Copy:
    """A unit's full weights in one precision.

    Attributes:
        slab: their memory.
        gather: the gather that fills it.
        counters: count edits of the full parameters, except of those that are their shards.
        forms: each parameter's full form and its plain tensor, from the last use of this copy.
    """

    __slots__ = ("_shards", "_storages", "counters", "forms", "gather", "owner", "slab")

    def __init__(
        self,
        owner: Owner,
        slab: Slab,
        gather: Gather,
        forms: list[tuple[nn.Parameter, torch.Tensor]],
        shards_in_place: list[torch.Tensor],
    ) -> None:
        """``shards_in_place``: the shards that are full parameters themselves."""
        self.owner = owner
        self.slab = slab
        self.gather = gather
        self.forms = forms
        self._shards = sorted(shards_in_place, key=torch.Tensor.data_ptr)
        self._storages = {storage_key(shard) for shard in shards_in_place}
        self.counters = FullCounters([t for i in range(len(forms)) for t in self.counted(i)], owner)

    def has(self, address: int) -> bool:
        """Whether the full weights have a byte at this address."""
        start = self.slab.address
        if start <= address < start + self.slab.nbytes:
            return True
        before = bisect.bisect(self._shards, address, key=torch.Tensor.data_ptr)
        return before > 0 and address < self._shards[before - 1].data_ptr() + self._shards[before - 1].nbytes

    def counted(self, index: int) -> tuple[torch.Tensor, ...]:
        """Like ``counters`` of a parameter, for its full form in this copy."""
        full, view = self.forms[index]
        if storage_key(view) in self._storages:
            return ()
        return (full,) if view is full else (full, view)


class Copies:
    """The full weights of one build of a unit's memory.

    Attributes:
        current: the copy in use.
        training: the copy that backward reads, in compute dtypes.
        stored: the copy in storage dtypes, after its first use.
        secondary: the part that this rank keeps after forward for its neighbours.
        transport: the transport of the gathers.
        layout: of the weights in the slab, in compute dtypes.
        extended: parameters with ``fsdp_pre_all_gather``.
    """

    __slots__ = (
        "_on_extended",
        "_parameters",
        "_shards",
        "_site",
        "current",
        "extended",
        "layout",
        "secondary",
        "stored",
        "training",
        "transport",
    )

    def __init__(
        self,
        site: UnitSite,
        transport: Transport,
        layout: UnitLayout,
        shards: list[torch.Tensor],
        slab: Slab,
        parameters: list[ManagedParameter],
        on_extended: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self._site = site
        self.layout = layout
        self._shards = shards
        self._parameters = parameters
        self._on_extended = on_extended
        self.extended = [p for p in parameters if p.extension is not None]
        self.plan(transport, slab)

    @torch.inference_mode(False)
    def plan(self, transport: Transport, slab: Slab) -> None:
        """Lay out gathers into ``slab``."""
        self.transport = transport
        site = self._site
        gather = self._plan_gather(self.layout, slab, site.owner)
        forms = [(p.full, p.view) for p in self._parameters]
        self.training = self.current = Copy(
            site.owner, slab, gather, forms, self._shards_in_place(self.layout)
        )
        self.stored: Copy | None = None
        full = gather.outputs[:-1]
        self.secondary = (
            SecondaryShard(site.neighbours, full, slab, site.owner)
            if site.neighbours is not None and full
            else None
        )

    def _plan_gather(self, layout: UnitLayout, slab: Slab, owner: Owner) -> Gather:
        site, extend, detail = self._site, None, number_of(self.transport) << 32
        if self.extended:
            comm = site.ranks.comm
            extend = Extend(self.extended, comm, site.reads, site.on_gradient, self._on_extended)
            places = [i for i, p in enumerate(self._parameters) if p.extension]
            detail |= zlib.crc32(repr(places).encode())
        cuts = [p.cut for p in self._parameters]
        with slab.landing():
            return plan_gather(
                layout,
                self._shards,
                cuts,
                slab,
                site.ranks,
                self.transport,
                owner,
                site.reads,
                extend,
                detail,
            )

    @property
    def extended_kinds(self) -> str:
        """Classes of the tensors with ``fsdp_pre_all_gather``."""
        return ", ".join(dict.fromkeys(type(p.local).__name__ for p in self.extended))

    def each(self) -> Iterator[Copy]:
        """The existing copies."""
        yield self.training
        if self.stored is not None:
            yield self.stored

    def join(self, place: Place) -> None:
        """Send and receive the headers of a place in a model with each gather."""
        header, headers = place.bytes()
        for copy in self.each():
            copy.gather.address(header, headers)
        if self.secondary is not None:
            self.secondary.address(headers, self._site.ranks.comm.ranks)

    @torch.inference_mode(False)
    def use(self, full_precision: bool, place: Place | None) -> None:
        """From now on gather weights in their storage dtypes, or in their compute dtypes. No weights may be gathered
        now."""
        if not full_precision:
            self.current.gather.drop()  # training keeps its own until the weights change
            self._use(self.training)
            return
        stored = self.stored
        if stored is None:
            stored = self._plan_stored()
            if place is not None:
                stored.gather.address(*place.bytes())
            self.stored = stored  # set only when complete
        self._use(stored)

    def _plan_stored(self) -> Copy:
        """The same shards and places in the slab, in other dtypes.

        Its leases are outside the plan, because a training step has none. Backward never reads these weights.
        """
        owner = Owner(f"{self._site.owner.name}, full precision")
        layout = self.layout.as_stored()
        slab = Slab(layout.slab_nbytes, self._site.ranks.device, "parameters", owner)
        slab.lease()
        gather = self._plan_gather(layout, slab, owner)
        forms = _forms(self._parameters, layout, slab)
        slab.release()
        return Copy(owner, slab, gather, forms, self._shards_in_place(layout))

    def _shards_in_place(self, layout: UnitLayout) -> list[torch.Tensor]:
        """The shards that are full parameters themselves."""
        stays = [run.in_place for run in layout.runs for _ in run.segments]
        return [shard for shard, here in zip(self._shards, stays, strict=True) if here]

    def _use(self, copy: Copy) -> None:
        self.current.forms = [(p.full, p.view) for p in self._parameters]
        for p, (full, view) in zip(self._parameters, copy.forms, strict=True):
            full.requires_grad_(p.full.requires_grad)
            p.full, p.view = full, view
        self.current = copy
        copy.counters.forget()

    def slabs(self) -> list[Slab]:
        """All slabs, also of the precision that is not in use."""
        return [slab for copy in self.each() for slab in copy.owner.slabs]

    def drop(self) -> None:
        """Free the cached outer-axis gathers."""
        self.training.gather.drop()
        if self.stored is not None:
            self.stored.gather.drop()

    def count_edits(self, places: list[int]) -> None:
        """Increase the version counters of the full forms of these parameters, whose shards were edited.

        Includes a copy that is not in use, because graphs over its memory must notice the edit.
        """
        counters = self.current.counters
        if len(places) == len(self._parameters):  # the usual case, after an optimizer's step
            counters.advance(counters.tensors)
        else:
            counters.advance([t for i in places for t in self._parameters[i].counters])
        if self.stored is not None:
            other = self.training if self.current is self.stored else self.stored
            other.counters.advance([t for i in places for t in other.counted(i)])


def _forms(
    parameters: list[ManagedParameter], layout: UnitLayout, slab: Slab
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """The full forms over the slab, with the attributes of the present ones, and their plain tensors."""
    runs = {m.index: run for run in layout.runs for s in run.segments for m in s.members}
    forms: list[tuple[nn.Parameter, torch.Tensor]] = []
    for index, p in enumerate(parameters):
        run = runs[index]
        if run.in_place and p.in_place:
            forms.append((p.full, p.view))
            continue
        view = in_place_view(p.local, p.cut) if run.in_place else p.cut.full_view(slab, run)
        shown = view if p.cut.parallel is None else p.cut.parallel.wrap(view)
        full = nn.Parameter(shown, requires_grad=p.full.requires_grad)
        for key, value in p.full.__dict__.items():
            full.__dict__.setdefault(key, value)
        full.__class__ = type(p.full)
        forms.append((full, plain_of(full)))
    return forms
