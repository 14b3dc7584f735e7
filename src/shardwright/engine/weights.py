"""A unit's weights: their memory, and what can be done with it. Gather, show, release, and notice edits.

When any of this happens is decided elsewhere: by a unit's hooks (``unit.py``) and the model's order (``root.py``).
How the memory is made is told in ``construct.py``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright._torch import annotate, increment_version, local_of, subclasses_dispatch
from shardwright.comm import Communicator, Pending, with_gathers
from shardwright.engine.agreement import HEADER
from shardwright.engine.full_precision import OtherPrecision
from shardwright.engine.lasting import Lasting
from shardwright.engine.ledger import NEVER, FullCounters, Ledger
from shardwright.engine.offload import Host
from shardwright.engine.parameter import ManagedParameter
from shardwright.engine.ranks import Ranks
from shardwright.engine.secondary import SecondaryShard
from shardwright.engine.settings import Settings
from shardwright.engine.unset import Unset, blank, has_values, mark, mark_of, unmark
from shardwright.layout import UnitLayout, plan_unit
from shardwright.memory import Owner, Slab

if TYPE_CHECKING:
    from shardwright.engine.root import Root


@dataclass(eq=False)
class Hop:
    """One of the collectives of a gather: from what a rank has, over one mesh axis, into ``slab``."""

    comm: Communicator
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    slab: Slab
    kept: bool  #: whether the result serves until the weights change
    epoch: int = NEVER  #: of the weights that are kept here


#: Whether foreach operations on sharded parameters move a version counter (``ShardedTensor``). Where they do not,
#: nothing that was gathered serves beyond its root call.
edits_are_seen = subclasses_dispatch


class Weights:
    """The parameters of a unit, gathered together and released together. There may be none."""

    def __init__(self, ranks: Ranks, settings: Settings, neighbours: Communicator | None = None) -> None:
        self.settings = settings  #: by the user; :meth:`Unit.change` replaces it
        self.ranks = ranks
        self.comm = ranks.comm
        self.owner = Owner()  #: of the unit's slabs
        self.neighbours = neighbours  #: among whom the weights are kept after forward
        self.host: Host | None = None  #: where the shards lie, if not on the device
        self.arriving = False  #: whether gradients are on their way there
        self.late = False  #: whether they are those of a backward that is over
        self.root: Root | None = None
        self.number = -1
        self.name = ""
        self.range_name = ""  #: in profiles, where the root has none
        self.parameters: list[ManagedParameter] = []
        self.build = 0  #: how often the memory was made; graphs over earlier memory can't be run any more
        self._full_shown = False
        self.lasting: Lasting | None = None  #: copies shown in the place of the full parameters
        self.was_shown = False  #: whether any call or backward has ever used the unit
        #: Sharded parameters in whose place ``unsharded`` shows full tensors, on this rank or on another; its options.
        self.unsharded: dict[nn.Parameter, Any] = {}
        self.settling_paused = False  #: while stand-ins are initialised in the place of the parameters
        self._unset: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        self._header = torch.zeros(HEADER, dtype=torch.int64, device=ranks.device)
        #: The mark after the last upload: the host writes to the shards only after it.
        self._uploaded: Any = None
        self.hold_memory(plan_unit([], ranks.parts), [], Slab(0, ranks.device), [])

    def hold_memory(
        self,
        layout: UnitLayout,
        shards: list[torch.Tensor],
        slab: Slab,
        parameters: list[ManagedParameter],
    ) -> None:
        """Take the memory that the parameters view; ``shards`` are this rank's chunks of the segments, padded.

        The slab is leased or empty, and released.
        """
        self.layout = self.layout_gathered = layout
        self.full_precision = False  #: whether weights are gathered as they are stored
        self._other: OtherPrecision | None = None
        self.shards = shards
        self.slab = slab
        self.parameters = parameters
        self.build += 1
        self._pending: Pending | None = None
        self._under_way: list[Pending] = []  #: earlier hops of the gather under way
        self._issuing = False
        self.generation = -1  #: of the root call (or backward) for which the slab was filled
        self.kept = False  #: whether the slab is kept beyond its root call, on purpose
        self.lends_over = False  #: whether tensors that are no parameters stand in the place of some
        self.index_slots()
        self.ledger = Ledger(parameters)
        self._slab_epoch = NEVER  #: of the weights in the slab
        self._full_counters = FullCounters([t for p in parameters for t in p.counters])
        self.gather_nbytes = slab.nbytes
        self._extended = [p for p in parameters if p.extension is not None]
        #: Stands for the parameters whose tensors decide what is gathered of them; 0 if there are none.
        self._extended_places = (
            hash(tuple(i for i, p in enumerate(parameters) if p.extension)) if self._extended else 0
        )
        self._data_given: set[int] = (
            set()
        )  #: full parameters whose ``.data`` was handed out: edits may come unseen
        self._decoded: dict[int, torch.Tensor] = {}  #: of those, this rank's part as a codec has left it
        self._secondary: SecondaryShard | None = None
        self._prepare_gather()
        slab.release()

    def join_root(
        self, root: Root, number: int, name: str, header: torch.Tensor, headers: torch.Tensor
    ) -> None:
        """Become unit ``number`` of ``root``: ``header`` goes with each gather, ``headers`` receives every rank's."""
        if self.root is not None and self.parameters:
            self.release()
        self.root = root
        self.number = number
        self.name = self.owner.name = name
        self.range_name = name if number else ""
        self._header, self._headers = header, headers
        self.rejoin_root()

    def rejoin_root(self) -> None:
        """After the unit's memory was made: put in what its root has given it."""
        if self.parameters and self.root is not None:
            self._receive_headers()
            self.compute_as(self.root.full_precision)

    def _receive_headers(self) -> None:
        if self.root is not None:
            last = self._hops[-1]
            headers = self._headers.view(torch.uint8)
            last.inputs[-1] = self._header.view(torch.uint8)
            last.outputs[len(last.inputs) - 1 :] = [headers]
            if self._secondary is not None:
                # Each neighbour's in its own place, so that they are read as those of a gather over all are.
                comm, size = self._secondary.comm, self._header.nbytes
                first = self.comm.ranks.index(comm.ranks[0])
                self._secondary_headers = headers.narrow(0, first * size, comm.world_size * size)

    def gradient_listener(self) -> Callable[[torch.Tensor], None]:
        """What a full parameter calls with its gradient. It holds this unit weakly, which holds the parameter."""
        ref = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            owner = ref()
            if owner is not None:
                owner.on_gradient()

        return on_gradient

    def data_listener(self) -> Callable[[torch.Tensor], None]:
        """What a full parameter calls when its ``.data`` is handed out: nothing else tells of what is written there."""
        ref = weakref.ref(self)

        def on_data(parameter: torch.Tensor) -> None:
            owner = ref()
            if owner is not None:
                owner._data_given.add(id(parameter))
                owner._remember_gathered(parameter)

        return on_data

    def on_gradient(self) -> None:
        """A parameter's full gradient is complete for this backward."""
        raise NotImplementedError

    def _prepare_gather(self) -> None:
        """Make, once, every view that a gather needs: of the shards (or their cast), the slab and what lies between."""
        layout, device = self.layout_gathered, self.ranks.device
        cuts = {i: p.cut for i, p in enumerate(self.parameters) if p.cut.repacks}
        staged = [
            r for r in layout.runs if r.is_cast or any(m.index in cuts for s in r.segments for m in s.members)
        ]
        self._cast = Slab(
            sum(r.shard_numel * r.compute_dtype.itemsize for r in staged),
            device,
            "cast shard",
            self.owner,
        )
        self._cast.lease()
        offloaded = self.host is not None
        self._upload = Slab(
            sum(
                r.shard_numel * r.storage_dtype.itemsize for r in layout.runs if offloaded and not r.extended
            ),
            device,
            "uploaded shard",
            self.owner,
        )
        self._upload.lease()
        self._uploads: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # destinations and sources
        self._casts: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # destinations and sources
        pieces: list[torch.Tensor] = []  #: this rank's, as bytes
        dtypes: list[torch.dtype] = []
        places: list[tuple[int, int]] = []  #: offset in the slab and bytes of one rank's piece
        cast_bytes = upload_bytes = 0
        shards = iter(self.shards)
        for run in layout.runs:
            size = run.compute_dtype.itemsize
            for s in run.segments:
                payload = next(shards)
                if run.extended or not s.chunk:
                    continue
                if offloaded:
                    offset = upload_bytes // run.storage_dtype.itemsize + s.shard_offset
                    target = self._upload.view(run.storage_dtype, offset, (s.chunk,))
                    self._uploads[0].append(target)
                    self._uploads[1].append(payload)
                    payload = target
                repacked = cuts.get(s.members[0].index) if cuts else None
                if run.is_cast or repacked is not None:
                    offset = cast_bytes // size + s.shard_offset
                    target = self._cast.view(run.compute_dtype, offset, (s.chunk,))
                    if repacked is None:
                        self._casts[0].append(target)
                        self._casts[1].append(payload)
                    else:
                        own = repacked.local_view(payload, 0)
                        self._casts[0].extend([repacked.packed_view(target, 0), target[own.numel() :]])
                        self._casts[1].extend([own, payload[own.numel() :]])  # and the padding
                    payload = target
                pieces.append(payload.view(torch.uint8))
                dtypes.append(run.compute_dtype)
                places.append((run.slab_bytes + s.slab_offset * size, s.chunk * size))
            if run in staged:
                cast_bytes += run.shard_numel * size
            upload_bytes += run.shard_numel * run.storage_dtype.itemsize if not run.extended else 0
        self._cast.release()
        self._upload.release()
        transport = self.settings.transport
        self._hops: list[Hop] = []
        comms = [*self.ranks.once, *self.ranks.gathers] or [self.ranks.local]
        sizes = [nbytes for _, nbytes in places]
        for i, ours in enumerate(comms):
            comm = with_gathers(ours, transport.gather, transport.codec, dtypes)
            last = i == len(comms) - 1
            sizes = [nbytes * comm.world_size for nbytes in sizes]
            if last:
                slab, offsets = self.slab, [offset for offset, _ in places]
            else:
                slab, offsets = (
                    Slab(sum(sizes), device, "outer gather", self.owner),
                    [0, *itertools.accumulate(sizes)][:-1],
                )
                slab.lease()
            outputs = [slab.byte_view(*place) for place in zip(offsets, sizes, strict=True)]
            kept = i == len(self.ranks.once) - 1 and not last
            self._hops.append(Hop(comm, pieces, outputs, slab, kept))
            if not last:
                slab.release()
            pieces = outputs
        if self.neighbours is not None and pieces:
            self._secondary = SecondaryShard(self.neighbours, pieces, self.owner)
        self._hops[-1].inputs = [
            *self._hops[-1].inputs,
            self._header.view(torch.uint8),
        ]  # the root's, once there

    def plan_gathers(self) -> None:
        """Once the transport was changed: lay the memory of gathers out again."""
        self._other = None
        self._prepare_gather()
        self.rejoin_root()

    def index_slots(self) -> None:
        """Remember where modules hold the parameters, for the loops of every forward and backward."""
        self._plain_slots = [
            (slot.registry, slot.name, p.sharded, p.full)
            for p in self.parameters
            for slot in p.slots
            if slot.registry is not None
        ]
        self._other_slots = [p for p in self.parameters if any(slot.registry is None for slot in p.slots)]
        self._shardeds = [p.sharded for p in self.parameters]
        self._locals = [p.local for p in self.parameters]
        #: Attributes of the local tensors, where users may attach ``fsdp_pre_all_gather`` after ``fully_shard``.
        self._local_attributes = [p.local.__dict__ for p in self.parameters if p.extension is None]

    def managed(self, sharded: torch.Tensor | None) -> ManagedParameter | None:
        """The parameter whose sharded form this is."""
        return next((p for p in self.parameters if p.sharded is sharded), None)

    def expect_values(self, p: ManagedParameter, source: torch.Tensor) -> None:
        """The shard holds no values of ``p`` until somebody writes them; ``source`` is what was sharded.

        It is filled with NaN: whoever reads it before must not take it for values. Edits of it are refused.
        """
        blank(p.local)
        mark(p.local, Unset(f"parameter {p.name!r} of unit {self.name!r}", p.sharded.numel()))
        self._unset[p.sharded] = source, p.sharded._version + p.local._version

    def without_values(self) -> dict[nn.Parameter, torch.Tensor]:
        """Sharded parameters that nobody has given values yet, and what each was before it was sharded."""
        if self._unset:
            known = {p.sharded: p for p in self.parameters}
            for sharded, (_, version) in list(self._unset.items()):
                if sharded not in known:
                    continue
                local = local_of(sharded)  # another one than the unit's since it was assigned to ``.data``
                if mark_of(local) is not None:
                    given = has_values(local)
                    if given is None:  # then any edit counts
                        given = sharded._version + known[sharded].local._version != version
                    if not given:
                        continue
                unmark(local)
                del self._unset[sharded]
        return {q: source for q, (source, _) in self._unset.items()}

    def _refuse_without_values(self) -> None:
        """Raise if a parameter has no values, on every rank where ranks agree before a gather.

        A rank without any element of a parameter cannot see whether the others were given values. It goes on.
        """
        unset = self.without_values()
        comm = self._hops[0].comm
        missing = [
            i
            for i, p in enumerate(self.parameters)
            if p.sharded in unset and (p.local.numel() or not p.sharded.numel() or not comm.exchanges)
        ]
        if missing:
            assert self.root is not None
            self.root.agreement.agree_on_missing(comm, self.number, missing[0])
            names = ", ".join(repr(p.name) for p in self.parameters if p.sharded in unset)
            raise RuntimeError(
                f"Parameters {names} of unit {self.name!r} hold no values yet, since they were "
                "sharded deferred or on the meta device. Call shardwright.materialize(model), or load a checkpoint."
            )

    def refuse_unsharded(self, what: str) -> None:
        if self.unsharded:
            raise RuntimeError(
                f"{what} unit {self.name!r} inside shardwright.unsharded, which shows full parameters that the unit "
                "does not know. Leave the context first."
            )

    def notice_edits(self) -> None:
        """Pass changes of the sharded parameters on to the full ones' version counters.

        Then autograd refuses a backward over weights that have changed since its forward, as it does without us.
        """
        if changed := self.ledger.look():
            edited = [t for i in changed for t in self.parameters[i].counters]
            if self._other is not None:  # graphs over the memory of the other precision are to notice, too
                edited += [t for i in changed for t in self._other.counters(i)]
            increment_version(edited)
            self._full_counters.forget()

    def compute_as(self, full_precision: bool) -> None:
        """Gather weights as they are stored from now on, or in their compute dtypes."""
        if self.full_precision == full_precision or not self.parameters:
            return
        self.release()
        with torch.inference_mode(False):
            if self._other is None:
                self._other = OtherPrecision(self)
            self._other.exchange(self)
            try:
                self._receive_headers()
            except BaseException:
                self._other.exchange(self)
                raise
        self._full_counters.forget()
        self._slab_epoch = NEVER
        self.full_precision = full_precision

    @property
    def shown(self) -> bool:
        """Whether the modules hold the full parameters."""
        return self._full_shown

    def slabs(self) -> list[Slab]:
        """All slabs of this unit, also those of the precision that is not in use."""
        return [*self.owner.slabs, *(self._other.owner.slabs if self._other is not None else ())]

    @property
    def training_slab(self) -> Slab:
        """Into which the weights are gathered in a step, whatever evaluation uses now."""
        return self._other.values["slab"] if self.full_precision and self._other is not None else self.slab

    @property
    def slab_is_current(self) -> bool:
        """Whether the slab holds the weights as they were at the last look for edits."""
        return self._slab_epoch == self.ledger.epoch

    @property
    def gathered(self) -> bool:
        """Whether the slab is leased: filled, or being filled."""
        return self.slab.leased

    def issue(self, generation: int, look: bool = True) -> None:
        """Lease the slab if it is not, and start filling it from the shards, for the given root call or backward.

        Without ``look`` edits that have not been noticed yet are taken for later ones: if there are any, the weights
        are gathered once more before they are used.
        """
        root = self.root
        assert root is not None
        if self.late:
            self.complete()
        if self._unset:
            self._refuse_without_values()
        if self._pending is not None:
            self.wait()
        if look:
            self.notice_edits()
        if self._full_shown:
            self._keep_edits()  # which this gather would undo
        root.gathered.add(self.number)  # first, so that a lease that fails is released with the rest
        self.slab.lease()
        self.generation, self._slab_epoch = generation, self.ledger.epoch
        self.kept = False
        root.notify("issue", self)
        self._issuing = True
        try:
            with annotate("all_gather", self.range_name):
                self._pending = self._gather(root)
        except (
            Exception
        ):  # out of memory, ranks that diverge: nothing was begun. An interrupt may come later.
            self._issuing = False
            self._slab_epoch = NEVER
            raise
        self._issuing = False

    def _gather(self, root: Root) -> Pending:
        secondary = self._secondary
        if root.backward and secondary is not None and secondary.epoch == self.ledger.epoch:
            announce = root.agreement.announce_gather(self.number, secondary.comm, self.gather_nbytes)
            outputs = [*self._hops[-1].outputs[:-1], self._secondary_headers]
            inputs = [*secondary.inputs, secondary.header]
            return secondary.comm.all_gather(outputs, inputs, announce=announce)
        if self._casts[0]:
            self._cast.lease()
        casts, on_done = self._casts, self._cast.release
        if self._uploads[0]:
            on_done = self._release_sent
            first = self._hops[0]
            if not (
                len(self._hops) > 1 and first.kept and first.epoch == self.ledger.epoch and edits_are_seen
            ):
                assert self.host is not None
                self._upload.lease()
                self._uploaded = self.host.upload(*self._uploads)
        for hop in self._hops[:-1]:
            if hop.kept and hop.epoch == self.ledger.epoch and edits_are_seen:
                casts = [], []
                continue
            hop.slab.lease()
            hop.epoch = NEVER
            announce = root.agreement.announce_gather(self.number, hop.comm, hop.slab.nbytes)
            pending = hop.comm.all_gather(hop.outputs, hop.inputs, casts, on_done, announce)
            if self.comm.streams.asynchronous:
                pending.wait()  # on an accelerator the stream keeps the order
            self._under_way.append(pending)
            hop.epoch = self.ledger.epoch
            casts = [], []
        last = self._hops[-1]
        outputs, inputs = last.outputs, last.inputs
        if self._extended:
            outputs, inputs = self._with_extensions()
        announce = root.agreement.announce_gather(
            self.number, last.comm, self.gather_nbytes, self._extended_places
        )
        return last.comm.all_gather(outputs, inputs, casts, on_done, announce)

    def _release_sent(self) -> None:
        self._cast.release()
        self._upload.release()

    def host_may_write(self) -> None:
        """The host waits until no copy reads the shards any more."""
        if self._uploaded is not None:
            assert self.host is not None
            self.host.streams.host_wait(self._uploaded)
            self._uploaded = None

    def complete(self) -> None:
        """Wait for gradients of an earlier backward that are still on their way to the host, and step them."""

    def wait(self) -> None:
        """Order the computation after the gather under way, if there is one."""
        if self._pending is None:
            return
        assert self.root is not None
        self.root.notify("wait", self)
        self._pending.wait()
        self._pending = None
        if len(self._hops) > 1:
            self._under_way.clear()
            for hop in self._hops[:-1]:
                if not hop.kept:
                    hop.slab.release()
        if self.comm.streams.asynchronous:
            self.check_headers()
        if self._extended:
            self._finish_extensions()
        if self._data_given:
            self._decoded.clear()
            for full in self._full_counters.tensors:
                if id(full) in self._data_given:
                    self._remember_gathered(full)

    def _with_extensions(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a gather receives and sends, with that of parameters whose tensors decide it themselves."""
        last = self._hops[-1]
        outputs, inputs = last.outputs[:-1], last.inputs[:-1]
        with torch.no_grad():
            for p in self._extended:
                assert p.extension is not None
                local = p.local if self.host is None else self.host.lifted(p.local)
                received, sent = p.extension.begin(local, self.comm.exchanges)
                outputs += received
                inputs += sent
        if self.host is not None:
            self._uploaded = self.host.mark()
        self.gather_nbytes = sum(t.numel() for t in outputs)
        return [*outputs, last.outputs[-1]], [*inputs, last.inputs[-1]]

    @property
    def extended_kinds(self) -> str:
        """Classes of the tensors that decide themselves what is gathered of them."""
        return ", ".join(dict.fromkeys(type(p.local).__name__ for p in self._extended))

    def _finish_extensions(self) -> None:
        for p in self._extended:
            assert p.extension is not None
            full = p.extension.finish(p.local, p.full)
            if full is not None:
                p.adopt_full(full, self.gradient_listener())
        self._full_counters = FullCounters([t for p in self.parameters for t in p.counters])
        self.index_slots()

    def check_headers(self) -> None:
        """Raise if another rank gathered another unit, or weights of another age.

        Reads the headers: on an accelerator the host waits.
        """
        words = (
            self._headers.tolist()
        )  # no view of a row each: that would be one more operation at each gather
        if words[0] != self.number or words != words[:HEADER] * (len(words) // HEADER):
            assert self.root is not None
            rows = list(zip(*[iter(words)] * HEADER, strict=True))
            self.root.agreement.diverged_gathers(self.comm, rows)

    def show_full(self) -> None:
        """Where a module holds something else than the sharded parameter, the user has put it there: it stays."""
        if not self._full_shown:
            self._full_shown = self.was_shown = True  # first: a loop that is interrupted is undone as a whole
            for registry, name, sharded, full in self._plain_slots:
                if registry.get(name) is sharded:
                    registry[name] = full
            for p in self._other_slots:
                p.show(p.full)

    def show_sharded(self) -> None:
        """As :meth:`show_full`. What the full weights have of the user's edits is kept."""
        if self._full_shown:
            self.hide_lasting()
            self._keep_edits()
            for registry, name, sharded, full in self._plain_slots:
                if registry.get(name) is full:
                    registry[name] = sharded
            for p in self._other_slots:
                p.show(p.sharded)
            self._full_shown = False

    def hide_lasting(self) -> None:
        """Show the full parameters again in the place of copies, if these are shown."""
        if self.lasting is not None:
            self.lasting.hide()
            self.lasting = None

    def _keep_edits(self) -> None:
        """Weights may have been edited while they were full: the edits go into the shard, as they would without us."""
        moved = self._full_counters.look()
        if not (moved or self._data_given) or not self.slab.leased or self._pending is not None:
            return
        for p in self.parameters:
            if id(p.full) in self._data_given or any(id(t) in moved for t in p.counters):
                p.write_back(self._gathered_part(p))
        # The slab has the edit, and the full parameters' counters have moved with it.
        fresh = self.slab_is_current
        self.ledger.write()
        self._slab_epoch = self.ledger.epoch if fresh else NEVER

    def _remember_gathered(self, full: torch.Tensor) -> None:
        """What a codec has rounded cannot be told from an edit by the shard: keep what came, unless it was edited."""
        key = id(full)
        if (
            self.settings.transport.codec is None
            or key in self._decoded
            or not self.slab.leased
            or self._pending is not None
        ):
            return
        p = next(p for p in self.parameters if p.full is full)
        if self._full_counters.intact(p.counters):
            self._decoded[key] = p.cut.of_full(p.view.detach()).clone()

    def _gathered_part(self, p: ManagedParameter) -> torch.Tensor | None:
        """What was gathered of this rank's part; None: the shard, in the dtype of computation."""
        codec = self.settings.transport.codec
        if codec is None:
            return None
        part = self._decoded.get(id(p.full))
        if part is None:
            raise RuntimeError(
                f"Parameter {p.name!r} of unit {self.name!r} was changed in place while it was full. The gathered copy "
                f"has the rounding of {codec!r}, so the change cannot be separated from it. Change the parameter "
                "between steps, or call set_all_gather_codec(None)."
            )
        return part

    def release(self) -> None:
        """Show the sharded parameters and give the slab's memory back."""
        self.show_sharded()
        if self.slab.leased:
            self.wait()
            self.generation, self.kept, self._slab_epoch = -1, False, NEVER
            self._decoded.clear()
            if self._issuing:
                # An interrupt left a gather that may still write: the memory stays until the next one.
                return
            self.slab.release()
            for p in self._extended:
                assert p.extension is not None
                p.extension.release()
            if self.root is not None:
                self.root.gathered.discard(self.number)

    def keep_secondary(self) -> None:
        """Before the full weights are released: keep this rank's part of them for the gather of backward."""
        self.show_sharded()
        if self._secondary is not None and self.slab_is_current:
            self._secondary.keep(self.ledger.epoch, self._hops[-1].inputs[-1])

    def drop_secondary(self) -> None:
        if self._secondary is not None:
            self._secondary.drop()

    def drop_kept(self) -> None:
        """The weights are about to change: keep no copy of them, and let no gather go on reading them."""
        self.wait()
        self.host_may_write()
        self.drop_secondary()
        if self.kept and not self._full_shown:
            self.release()
        self.kept = False
        if self._pending is None:
            self.drop_hops()

    def drop_hops(self) -> None:
        """Give back what of gathers over outer axes is kept until the weights change, in either precision."""
        for hop in (*self._hops[:-1], *(self._other.hops[:-1] if self._other is not None else ())):
            hop.epoch = NEVER
            hop.slab.release()

    def valid_for(self, generation: int) -> bool:
        """Whether the slab may be read by the given root call without filling it again."""
        if self.late:
            self.complete()
        trusted = self.kept and edits_are_seen
        if not self.slab.leased or not (self.generation == generation or trusted):
            return False
        self.notice_edits()
        return self.slab_is_current
