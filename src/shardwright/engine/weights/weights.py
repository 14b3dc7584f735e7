"""A unit's weights in their memory: gather, show, release, and notice edits. The room ``model`` decides when.

``assembly/build.py`` makes the memory, ``gather.py`` fills it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import torch

from shardwright.engine import heartbeat
from shardwright.engine.base.home import Place
from shardwright.engine.base.settings import Transport
from shardwright.engine.base.site import UnitSite
from shardwright.engine.comm import Pending
from shardwright.engine.compat.profiling import annotate
from shardwright.engine.compat.storages import address_of
from shardwright.engine.layout import UnitLayout
from shardwright.engine.memory import Slab
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.weights.forms import Forms
from shardwright.engine.weights.full_edits import FullEdits, fingerprint_of
from shardwright.engine.weights.full_weights import Copies, Copy
from shardwright.engine.weights.gather import Gather, edits_are_seen
from shardwright.engine.weights.ledger import NEVER, FullCounters, Ledger
from shardwright.engine.weights.residence import Residence, change

SHARDED, ISSUING, GATHERING, RESIDENT, EMPTY = Residence


class Weights:
    """One build of a unit's memory.

    Attributes:
        site: the place of the memory.
        generation: how often the unit's memory was made; graphs over earlier memory cannot run any more.
        shards: this rank's chunks of the layout's segments, padded.
        copies: the full weights.
        place: the unit's place in a model; None before the first call.
        label: the unit's name in profiles.
        call: the root call (or backward) for which the slab was filled.
        kept: whether the slab is kept beyond its root call, on purpose.
        epoch: the epoch of the weights in the slab.
    """

    def __init__(
        self,
        site: UnitSite,
        transport: Transport,
        layout: UnitLayout,
        shards: list[torch.Tensor],
        slab: Slab,
        parameters: list[ManagedParameter],
        before: Weights | None = None,
    ) -> None:
        """The slab is leased or empty; afterwards it is released. ``before``: the unit's earlier build."""
        self.site = site
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
        #: With SHARDWRIGHT_POISON=1, hashes of the shards when the slab got their values. None: they are not compared.
        self._hashes: list[int] | None = None
        self._compares_shards = os.environ.get("SHARDWRIGHT_POISON") == "1" and not self._edits.in_place
        slab.release()

    def gather_by(self, transport: Transport) -> None:
        """Plan gathers again for a new transport. Only between steps, with released weights in training precision."""
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
        """Whether weights are gathered in their storage dtypes."""
        return self.copies.current is self.copies.stored

    def compute_as(self, full_precision: bool) -> None:
        """From now on gather weights in their storage dtypes, or in their compute dtypes."""
        if self.full_precision == full_precision or not self.parameters:
            return
        self.release()
        self.copies.use(full_precision, self.place)
        self.forms.index()
        self.epoch = NEVER

    @property
    def copy(self) -> Copy:
        """The copy of the full weights in use."""
        return self.copies.current

    # -- edits ---------------------------------------------------------------------------------------------------

    def notice_edits(self) -> list[int]:
        """For each edit of a sharded parameter, increase the version counter of the full one. Returns their indices.

        So autograd raises an error for a backward over weights that have changed since its forward, as in a plain
        model.
        """
        if changed := self.ledger.look():
            self.copies.count_edits(changed)
        return changed

    def _keep_edits(self) -> None:
        """Write edits of the full weights into the shard, as in a plain model."""
        edits = self._edits
        if edits.in_place:
            edits.compare_in_place(self.notice_edits(), self._compare_edit)
        if not edits.expected():
            return
        self.notice_edits()
        there = self.residence is RESIDENT
        newer = self.ledger.edited_after(self.epoch) if there else set()
        if edits.write_back(there, newer, self._compare_edit):
            # The slab has the edit, and the edit has increased the full parameters' counters.
            fresh = self.is_current
            self.ledger.write()
            self.epoch = self.ledger.epoch if fresh else NEVER
            if self._hashes is not None:
                self._hashes = self._hashes_of_shards()

    def _compare_edit(self, name: str, fingerprint: Callable[[], torch.Tensor]) -> None:
        if self.place is not None:
            self.place.home.agreement.compare_edit(self.place.number, name, fingerprint)

    def on_data_handed_out(self, full: torch.Tensor) -> None:
        """Note that user code gets the ``.data`` of a full parameter."""
        self._edits.give(full, self.ready)

    # -- gather --------------------------------------------------------------------------------------------------

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor is a view of the full weights."""
        return self.copies.current.has(address_of(tensor))

    @property
    def is_current(self) -> bool:
        """Whether the slab has the weights of the last check for edits."""
        return self.epoch == self.ledger.epoch

    @property
    def gathered(self) -> bool:
        """Whether the slab is leased: filled, or being filled."""
        return self.copies.current.slab.leased

    @property
    def ready(self) -> bool:
        """Whether the slab has gathered weights."""
        return self.residence is RESIDENT

    def valid_for(self, call: int) -> bool:
        """Whether the slab may be read by the given root call without filling it again."""
        if not self.copies.current.slab.leased or not (self.call == call or (self.kept and edits_are_seen)):
            return False
        self.notice_edits()
        if self.epoch != self.ledger.epoch:
            return False
        if self._hashes is not None and self.call != call and self._hashes != self._hashes_of_shards():
            raise RuntimeError(
                f"The shard of unit {self.site.owner.name!r} was changed by a write that no version counter shows "
                "(numpy, dlpack, a memoryview or a storage), and the unit still has the weights that it gathered "
                "before, so the change would have no effect. Write through the tensor under torch.no_grad(), or call "
                "reshard() on the model after the write."
            )
        return True

    def _hashes_of_shards(self) -> list[int]:
        return [int(fingerprint_of(shard).item()) for shard in self.shards]

    def issue(self, call: int, look: bool, nearby: bool) -> None:
        """Lease the slab if needed, and begin to fill it from the shards, for the given root call or backward.

        Without ``look`` edits that are not noticed yet count as later edits. Then the weights are gathered again before
        their use. ``nearby``: gather from the parts that neighbouring ranks have kept, if there are any.
        """
        place = self.place
        assert place is not None
        if self._flight is not None:
            self.wait()
        if look:
            self.notice_edits()
        if self.forms.full_shown:
            self._keep_edits()  # this gather would overwrite them
        epoch, secondary, gather = self.ledger.epoch, self.copies.secondary, self.copies.current.gather
        if nearby and secondary is not None and secondary.epoch == epoch:
            gather = secondary.gather
        place.home.gathered.add(place.number)  # set first, so that it is released after an interrupt
        self.copies.current.counters.hide()
        self.copies.current.slab.lease()
        self.call, self.epoch, self.kept = call, epoch, False
        if self._compares_shards:
            self._hashes = self._hashes_of_shards()
        self.residence = change(self.residence, ISSUING, self.site.owner)
        try:
            with annotate("all_gather", place.label):
                try:
                    self._flight = gather.begin(place, epoch), gather
                finally:
                    if heartbeat.current is not None:
                        heartbeat.current.leave()
        except (
            Exception
        ):  # out of memory or diverged ranks: no collective has begun; an interrupt may come later
            self.residence = change(self.residence, EMPTY, self.site.owner)
            self.epoch = NEVER
            raise
        self.residence = change(self.residence, GATHERING, self.site.owner)

    def wait(self) -> None:
        """Order the computation after the running gather, if there is one."""
        flight = self._flight
        if flight is None:
            return
        place = self.place
        assert place is not None
        pending, gather = flight
        if heartbeat.current is None:
            pending.wait()
        else:
            heartbeat.current.await_result("all-gather", gather.comm.name, gather.nbytes, place.name)
            try:
                pending.wait()
            finally:
                heartbeat.current.leave()
        # Set first: after an interrupt it is waited for again.
        self.residence = change(self.residence, RESIDENT, self.site.owner)
        self.copies.current.slab.reveal()
        self.copies.current.counters.show()
        self._flight = None
        gather.end()
        if gather.comm.streams.asynchronous and gather.comm.group is not None:
            place.check_headers(self.site.ranks.comm)
        if gather.extend is not None:
            gather.extend.finish()
        if self._edits.handed_out:
            self._edits.arrive()

    def _adopt(self) -> None:
        """Adopt the full forms of extended parameters."""
        self.copies.current.counters = FullCounters(
            [t for p in self.parameters for t in p.counters], self.site.owner
        )
        self.forms.index()

    # -- show ----------------------------------------------------------------------------------------------------

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters. The user's edits of the full weights are kept."""
        if self.forms.full_shown:
            if self.forms.lasting is not None:
                self.forms.hide_lasting()
            self._keep_edits()
            self.forms.show_sharded()

    # -- release -------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Show the sharded parameters and release the slab's memory."""
        self.show_sharded()
        slab = self.copies.current.slab
        if slab.leased:
            if self._flight is not None:
                self.wait()
            self.call, self.kept, self.epoch = -1, False, NEVER
            if self._edits.handed_out:
                self._edits.leave()
            if self.residence is ISSUING:
                # An interrupted gather may still write, so the memory stays until the next gather.
                return
            self.copies.current.counters.hide()
            slab.release()
            self.residence = change(self.residence, SHARDED, self.site.owner)
            for p in self.copies.extended:
                assert p.extension is not None
                p.extension.release()
            if self.place is not None:
                self.place.home.gathered.discard(self.place.number)

    def keep_secondary(self) -> None:
        """Keep this rank's part of the full weights for the gather of backward, before they are released."""
        self.show_sharded()
        if self.copies.secondary is not None and self.is_current:
            self.copies.secondary.keep(self.epoch, self.copies.current.gather.inputs[-1])

    def drop_secondary(self) -> None:
        if self.copies.secondary is not None:
            self.copies.secondary.drop()

    def host_may_write(self) -> None:
        """Let the host wait until no copy reads the shards any more."""
        if self.site.reads is not None:
            self.site.reads.wait()

    def drop_kept(self) -> None:
        """Drop kept copies of the weights and wait for gathers that read them, because the weights are about to
        change."""
        if self._flight is not None:
            self.wait()
        self.host_may_write()
        self.drop_secondary()
        if self.kept and not self.forms.full_shown:
            self.release()
        self.kept = False
        if self._flight is None:
            self.copies.drop()
