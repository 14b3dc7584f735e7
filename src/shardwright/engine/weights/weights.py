"""A unit's weights in their memory: gather, show, release, and notice edits. It is not decided here when.

How the memory is made is in ``assembly/build.py``, how it is filled in ``gather.py``.
"""

from __future__ import annotations

import weakref

import torch

from shardwright._torch import annotate
from shardwright.comm import Pending
from shardwright.engine.base.home import Place
from shardwright.engine.base.settings import Transport
from shardwright.engine.base.site import Site
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.weights.forms import Forms
from shardwright.engine.weights.full_edits import FullEdits
from shardwright.engine.weights.full_weights import Copies, Copy
from shardwright.engine.weights.gather import Gather, edits_are_seen
from shardwright.engine.weights.ledger import NEVER, FullCounters, Ledger
from shardwright.engine.weights.residence import Residence
from shardwright.layout import UnitLayout
from shardwright.memory import Slab

#: What follows what is in ``residence.ALLOWED``.
SHARDED, ISSUING, GATHERING, RESIDENT, EMPTY = Residence


class Weights:
    """One build of a unit's memory.

    Attributes:
        site: where it is.
        generation: how often the unit's memory was made; graphs over earlier memory can't be run any more.
        shards: this rank's chunks of the layout's segments, padded.
        copies: the full weights.
        place: in a model; None before the first call.
        label: in profiles.
        call: the root call (or backward) for which the slab was filled.
        kept: whether the slab is kept beyond its root call, on purpose.
        epoch: of the weights in the slab.
    """

    def __init__(
        self,
        site: Site,
        transport: Transport,
        layout: UnitLayout,
        shards: list[torch.Tensor],
        slab: Slab,
        parameters: list[ManagedParameter],
        before: Weights | None = None,
    ) -> None:
        """The slab is leased or empty; afterwards it is released. ``before``: the unit's earlier build."""
        self.site = site
        self.layout = layout
        self.shards = shards
        self.parameters = parameters
        self.generation: int = 1 if before is None else before.generation + 1
        self.forms: Forms = Forms(parameters, before is not None and before.forms.ever_shown)
        self.ledger = Ledger(parameters)
        self.place: Place | None = None
        self.label = ""
        self.residence = SHARDED
        self._flight: tuple[Pending, Gather] | None = None
        self.call = -1
        self.kept = False
        self.epoch = NEVER
        adopted = weakref.WeakMethod(self._adopt)
        self.copies = Copies(site, transport, layout, shards, slab, parameters, adopted)
        self._edits = FullEdits(parameters, self.copies, site.owner)
        slab.release()

    def gather_by(self, transport: Transport) -> None:
        """Between steps, released and in the precision of training: lay gathers out again."""
        self.host_may_write()
        self.copies.plan(transport, self.copies.training.slab)
        if self.place is not None:
            self.join(self.place)

    def join(self, place: Place) -> None:
        """Take a place in a model."""
        self.place, self.label = place, place.label
        if self.parameters:
            self.copies.join(place)

    # -- precision -----------------------------------------------------------------------------------------------

    @property
    def full_precision(self) -> bool:
        """Whether weights are gathered as they are stored."""
        return self.copies.current is self.copies.stored

    def compute_as(self, full_precision: bool) -> None:
        """Gather weights as they are stored from now on, or in their compute dtypes."""
        if self.full_precision == full_precision or not self.parameters:
            return
        self.release()
        self.copies.use(full_precision, self.place)
        self.forms.index()
        self.epoch = NEVER

    @property
    def copy(self) -> Copy:
        """The full weights that are in use."""
        return self.copies.current

    # -- edits ---------------------------------------------------------------------------------------------------

    def notice_edits(self) -> None:
        """Pass changes of the sharded parameters on to the full ones' version counters.

        Then autograd refuses a backward over weights that have changed since its forward, as it does without us.
        """
        if changed := self.ledger.look():
            self.copies.current.counters.advance(self.copies.counters(changed))

    def _keep_edits(self) -> None:
        """Weights may have been edited while they were full: the edits go into the shard, as they would without us."""
        if not self._edits.expected():
            return
        self.notice_edits()
        there = self.residence is RESIDENT
        if self._edits.write_back(there, self.ledger.edited_after(self.epoch) if there else set()):
            # The slab has the edit, and the full parameters' counters have moved with it.
            fresh = self.is_current
            self.ledger.write()
            self.epoch = self.ledger.epoch if fresh else NEVER

    def on_data_handed_out(self, full: torch.Tensor) -> None:
        """The ``.data`` of a full parameter is handed out."""
        self._edits.give(full, self.ready)

    # -- gather --------------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the slab holds the weights as they were at the last look for edits."""
        return self.epoch == self.ledger.epoch

    @property
    def gathered(self) -> bool:
        """Whether the slab is leased: filled, or being filled."""
        return self.copies.current.slab.leased

    @property
    def ready(self) -> bool:
        """Whether the slab holds what was gathered."""
        return self.residence is RESIDENT

    def valid_for(self, call: int) -> bool:
        """Whether the slab may be read by the given root call without filling it again."""
        if not self.copies.current.slab.leased or not (self.call == call or (self.kept and edits_are_seen)):
            return False
        self.notice_edits()
        return self.epoch == self.ledger.epoch

    def issue(self, call: int, look: bool, nearby: bool) -> None:
        """Lease the slab if it is not, and start filling it from the shards, for the given root call or backward.

        Without ``look`` edits that have not been noticed yet are taken for later ones: if there are any, the weights
        are gathered once more before they are used. ``nearby``: from what neighbouring ranks have kept, if they have.
        """
        place = self.place
        assert place is not None
        if self._flight is not None:
            self.wait()
        if look:
            self.notice_edits()
        if self.forms.full_shown:
            self._keep_edits()  # which this gather would undo
        epoch, secondary, gather = self.ledger.epoch, self.copies.secondary, self.copies.current.gather
        if nearby and secondary is not None and secondary.epoch == epoch:
            gather = secondary.gather
        place.home.gathered.add(place.number)  # first: after an interrupt it is released with the rest
        self.copies.current.slab.lease()
        self.call, self.epoch, self.kept = call, epoch, False
        if place.home.observer is not None:
            place.home.observer("issue", self)
        self.residence = ISSUING
        try:
            with annotate("all_gather", place.label):
                self._flight = gather.begin(place, epoch), gather
        except (
            Exception
        ):  # out of memory, ranks that diverge: nothing was begun. An interrupt may come later.
            self.residence = EMPTY
            self.epoch = NEVER
            raise
        self.residence = GATHERING

    def wait(self) -> None:
        """Order the computation after the gather under way, if there is one."""
        flight = self._flight
        if flight is None:
            return
        place = self.place
        assert place is not None
        if place.home.observer is not None:
            place.home.observer("wait", self)
        pending, gather = flight
        pending.wait()
        self.residence = RESIDENT  # first: after an interrupt in between it is waited for again
        self._flight = None
        gather.end()
        if gather.comm.streams.asynchronous:
            place.check_headers(self.site.ranks.comm)
        if gather.extend is not None:
            gather.extend.finish()
        if self._edits.handed_out:
            self._edits.arrive()

    def _adopt(self) -> None:
        """Parameters that gather themselves have their full forms."""
        self.copies.current.counters = FullCounters([t for p in self.parameters for t in p.counters])
        self.forms.index()

    # -- show ----------------------------------------------------------------------------------------------------

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters. What the full weights have of the user's edits is kept."""
        if self.forms.full_shown:
            if self.forms.lasting is not None:
                self.forms.hide_lasting()
            self._keep_edits()
            self.forms.show_sharded()

    # -- release -------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Show the sharded parameters and give the slab's memory back."""
        self.show_sharded()
        slab = self.copies.current.slab
        if slab.leased:
            if self._flight is not None:
                self.wait()
            self.call, self.kept, self.epoch = -1, False, NEVER
            if self._edits.handed_out:
                self._edits.leave()
            if self.residence is ISSUING:
                # An interrupt left a gather that may still write: the memory stays until the next one.
                return
            slab.release()
            self.residence = SHARDED
            for p in self.copies.extended:
                assert p.extension is not None
                p.extension.release()
            if self.place is not None:
                self.place.home.gathered.discard(self.place.number)

    def keep_secondary(self) -> None:
        """Before the full weights are released: keep this rank's part of them for the gather of backward."""
        self.show_sharded()
        if self.copies.secondary is not None and self.is_current:
            self.copies.secondary.keep(self.epoch, self.copies.current.gather.inputs[-1])

    def drop_secondary(self) -> None:
        if self.copies.secondary is not None:
            self.copies.secondary.drop()

    def host_may_write(self) -> None:
        """The host waits until no copy reads the shards any more."""
        if self.site.reads is not None:
            self.site.reads.wait()

    def drop_kept(self) -> None:
        """The weights are about to change: keep no copy of them, and let no gather go on reading them."""
        if self._flight is not None:
            self.wait()
        self.host_may_write()
        self.drop_secondary()
        if self.kept and not self.forms.full_shown:
            self.release()
        self.kept = False
        if self._flight is None:
            self.copies.drop()
