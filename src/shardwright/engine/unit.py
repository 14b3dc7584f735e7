"""A unit: the parameters that one ``fully_shard`` call owns, and what its hooks do with them.

What can be done with the weights is told in ``weights.py``. In which order units are prefetched and what happens at the
ends of forward and backward is the root's (``root.py``). docs/engine.md has the states of a unit and what moves it
between them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwright._torch import (
    NOTHING,
    address_of,
    alone,
    annotate,
    in_backward,
    local_of,
    next_sequence_number,
    quick_attributes,
)
from shardwright.comm import Communicator, neighbours, separate, with_scatters
from shardwright.engine import construct
from shardwright.engine.construct import ShardPlacementFn
from shardwright.engine.due import Due, Held, due
from shardwright.engine.extension import any_attached
from shardwright.engine.gradients import Reduction
from shardwright.engine.hooks import (
    StashedTensors,
    hidden_tensors,
    map_arguments,
    map_tensors,
    mark_inputs,
    mark_made,
    mark_outputs,
    opaque_or_mutable,
    refuse_opaque,
)
from shardwright.engine.lasting import Lasting, lasting_kind
from shardwright.engine.offload import NOTHING as NOT_OFFLOADED
from shardwright.engine.offload import Host, HostReduction, Offload
from shardwright.engine.parameter import FullParameter, ManagedParameter, plain_of, unit_of
from shardwright.engine.precision import as_precision
from shardwright.engine.ranks import Ranks
from shardwright.engine.settings import ModelOptions, Settings, Transport
from shardwright.engine.stepping import Stepping, forget_stepped
from shardwright.engine.visit import Frame, Visit
from shardwright.engine.weights import Weights
from shardwright.layout import GradientDtypes, Packing, Ragged, UnitLayout, plan_packing
from shardwright.memory import Slab, Source

if TYPE_CHECKING:
    from shardwright.engine.root import Root

_serials = itertools.count()
#: Results of calls that have not run yet.
LAZY = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class Unit(Weights):
    """See the module docstring. ``parameters`` may be empty: then nothing is ever issued for this unit."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        ranks: Ranks,
        policy: MixedPrecisionPolicy,
        settings: Settings,
        placement_fn: ShardPlacementFn | None,
        layout: Ragged | None,
        ignored: Iterable[nn.Parameter],
        ignored_modules: Iterable[nn.Module],
        attach: Callable[[nn.Module], Root],
        offload: Offload = NOT_OFFLOADED,
    ) -> None:
        to = settings.reshard_after_forward
        super().__init__(ranks, settings, neighbours(ranks.comm, to) if type(to) is int else None)
        self.offload = offload
        #: Where an optimizer that steps the unit on the device keeps its state, if that is not the device.
        self.state_host: Host | None = None
        if offload.optimizer and not ranks.comm.streams.asynchronous:
            host = Host(ranks.comm.streams, ranks.device, offload.pin_memory)
            if offload.parameters:
                self.host = host
            else:
                self.state_host = host
        self.serial = next(_serials)  #: in the order of the fully_shard calls
        self.attach = attach
        self.modules = [weakref.ref(m) for m in modules]
        self.name = type(modules[0]).__name__
        self.mesh = ranks.mesh
        self.scatter_ranks = self._plan_scatters()
        self.given_policy = policy  #: what tensors that gather themselves are told
        self.policy = as_precision(policy)
        self.gradient_dtypes: list[GradientDtypes] = []  #: of each parameter
        self.chooses_grad_dtype = False
        self.placement_fn = placement_fn
        self.layout_kind = layout
        self.ignored = [weakref.ref(p) for p in ignored]
        self.ignored_modules = [weakref.ref(m) for m in ignored_modules]
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        #: Units of other meshes that own parameters of the same modules, and of such a unit the one that has it.
        self.companions: list[Unit] = []
        self.main: weakref.ref[Unit] | None = None
        self.lenders: list[Unit] = []  #: units that own weights which this one's modules hold, too
        self.borrowed: list[tuple[nn.Parameter, construct.Slot]] = []
        self.visits: set[Visit] = set()  #: whose backward is under way
        self.entered = False  #: whether the backward now running has reached this unit
        self.calls = 0  #: forward calls under way, of this unit or of others that read its weights
        self._to_run: set[int] = set()
        #: Visits whose backward may come yet, where something is kept for it.
        self._unfinished: weakref.WeakSet[Visit] = weakref.WeakSet()
        self._registries: list[dict[str, nn.Parameter | None]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._stash = StashedTensors([])
        self.reductions: list[Reduction] = []
        self.options = ModelOptions()  #: of the model whose root this unit is
        self.synced = False  #: whether the ranks' values were made the same before they were cut
        self.checked = False  #: whether they were compared
        self.held = Held.NOTHING  #: of earlier micro-batches
        self._held_before = Held.NOTHING  #: by the unit, when the reduction under way began
        self._trainable: tuple[bool, ...] | None = None
        self.stepping: Stepping | None = None  #: where optimizers step it in backward

    def own(
        self,
        layout: UnitLayout,
        shards: list[torch.Tensor],
        slab: Slab,
        parameters: list[ManagedParameter],
    ) -> None:
        """Take the parameters and their memory; gradients begin anew."""
        self.hold_memory(layout, shards, slab, parameters)
        self.entered = False
        self.held = self._held_before = Held.NOTHING
        self._trainable = None
        self.reductions = []
        self.follow_requires_grad()

    def retire(self) -> None:
        """Before the unit's memory is made anew: give the old one back."""
        self.release()
        for reduction in self.reductions:
            reduction.finish()
        self.complete()
        self.host_may_write()
        self.visits.clear()
        self.lenders = []

    def set_source(self, source: Source | None) -> None:
        """Take the memory of later leases from there; None: from torch's allocator."""
        root = self.root
        memory = root.pools.memory if root is not None else self.options.memory
        if source is not None and not isinstance(memory, str):
            raise ValueError(
                f"The memory of unit {self.name!r} comes from {type(memory).__name__}, an allocator of yours, which "
                "decides of what kind it is. Register it there, or use the name of one of ours."
            )
        self.owner.source = source
        if root is not None:
            root.pools.restart()

    # -- what users did to the modules -----------------------------------------------------------------------------

    def living_modules(self) -> list[nn.Module]:
        return [m for ref in self.modules if (m := ref()) is not None]

    def living_ignored(self) -> list[nn.Parameter]:
        """Parameters that are not the unit's, those that ignored modules hold now among them."""
        given = [p for ref in self.ignored if (p := ref()) is not None]
        return [*given, *construct.parameters_of(self.living_ignored_modules())]

    def living_ignored_modules(self) -> list[nn.Module]:
        return [m for ref in self.ignored_modules if (m := ref()) is not None]

    def watch_slots(self) -> None:
        """Remember which modules there are and how many parameters they have."""
        modules = [m for top in self.living_modules() for _, m in construct.own_modules(top)]
        self._registries = [m._parameters for m in modules]
        self._children = [m._modules for m in modules]
        self._slot_count = sum(map(len, self._registries))
        self._child_count = sum(map(len, self._children))
        self._parents = [children for children in self._children if children]
        self._child_ids = self._ids_of_children()
        self._empty = [(r, name) for r in self._registries for name, p in r.items() if p is None]
        self._stash = StashedTensors(modules)

    def remake_later(self, held: list[Reduction]) -> None:
        """Making the memory has failed half-way: let the next use do it again, and hold what was held."""
        self._child_count = -1  # as no number of modules is
        if held:
            self.held = Held.WHOLE
            self.reductions = held

    def untouched(self) -> bool:
        """Whether the modules hold the sharded parameters, over their shards: nothing to settle, told at once."""
        return not (
            self._other_slots
            or any([registry.get(name) is not sharded for registry, name, sharded, _ in self._plain_slots])
            or any(map(operator.is_not, map(local_of, self._shardeds), self._locals))  # type: ignore[arg-type]
            or any_attached(self._local_attributes)
            or self.slots_changed()
        )

    def _ids_of_children(self) -> list[int]:
        return [id(child) for children in self._parents for child in children.values()]

    def slots_changed(self) -> bool:
        """Whether the unit's modules have other parameters or other modules, or one that it borrows was replaced."""
        if (
            sum(map(len, self._registries)) != self._slot_count
            or sum(map(len, self._children)) != self._child_count
            or self._ids_of_children() != self._child_ids
        ):
            return True
        for registry, name in self._empty:
            if registry.get(name) is not None:
                return True
        for sharded, slot in self.borrowed:
            lender = unit_of(sharded)
            if lender is None or not (lender._full_shown or lender.unsharded or slot.holds(sharded)):
                return True
        return False

    def settle(self) -> None:
        """Take over parameters that users replaced, unless the unit is in use."""
        if not self._full_shown and not self.calls and not self.visits:
            if self.host is not None:
                self.complete()
                self.host_may_write()
            construct.settle(self)

    def assign_data(self, sharded: nn.Parameter, value: torch.Tensor) -> None:
        construct.assign_data(self, sharded, value)

    # -- requires_grad and gradients -------------------------------------------------------------------------------

    def follow_requires_grad(self) -> None:
        """Take over ``requires_grad`` from the sharded parameters, which users may have changed since."""
        with quick_attributes():
            trainable = tuple([p.requires_grad for p in self._shardeds])
        if trainable == self._trainable:
            return
        self.complete()
        for reduction in self.reductions:
            reduction.finish()
        # What micro-batches before the change have left is reduced beside the new gradients.
        held = self.reductions if self.held else []
        for reduction in held:
            reduction.retired = True
        for p, flag in zip(self.parameters, trainable, strict=True):
            p.full.requires_grad_(flag)
        self.reductions = [*self._plan_reductions(trainable), *held]
        self._trainable = trainable  # last: what has failed before is done again

    @torch.inference_mode(False)
    def _plan_reductions(self, trainable: tuple[bool, ...]) -> list[Reduction]:
        packings = plan_packing(self.layout, trainable, self.gradient_dtypes)
        return [self._reduction(packing) for packing in packings]

    def _reduction(self, packing: Packing) -> Reduction:
        given = (
            packing,
            self.layout,
            self.parameters,
            self.scatter_ranks,
            self.owner,
            # It keeps what it knows by the names of units, which the root gives.
            self.settings.transport.hook if self.root is not None else None,
            self.name,
        )
        return Reduction(*given) if self.host is None else HostReduction(*given, host=self.host)

    def on_gradient(self) -> None:
        """A parameter's full gradient is complete for this backward. Refuses one that read weights unseen."""
        root = self.root
        assert root is not None
        if self.entered and root.in_backward:
            return  # the rule, and this is called for every parameter
        root.enter_backward()
        if not self.entered and (not self.slab.leased or self._pending is not None):
            raise RuntimeError(
                f"Backward reached parameters of unit {self.name!r} not through the unit's outputs, when its weights "
                "were not gathered. Return every tensor that backward starts from as an output of the unit, in "
                "tuples, lists, dicts or dataclasses, or keep it in an attribute of one of the unit's modules."
            )

    def finish_backward(self) -> None:
        """At the end of backward: leave it if that is still to do; reduce what came late or was held before."""
        if self.visits:
            for visit in list(self.visits):
                self.close(visit)
        elif any(r.has_gradients() for r in self.reductions):
            self.reduce()
        elif self.reduces_now:
            if self.held:
                self.reduce(needed=True)
            elif self._fills and self.was_shown and not self.entered:
                self.reduce()
        self.entered = False

    def reduce(self, needed: bool = False) -> None:
        """Reduce the gradients, zeros where there are none, or hold them while communication is switched off.

        Whether to reduce depends only on which units ran, never on which gradients this rank has: the ranks must
        issue the same reductions in the same order. ``needed``: no backward has come here since, but what is held is
        needed.
        """
        root, ranks, settings = self.root, self.ranks, self.settings
        assert root is not None
        if self.stepping is not None:
            forget_stepped(self._shardeds)
            self.stepping.due = False  # a reduction under way is stepped together with what comes now
        action = due(
            sync=settings.sync,
            completes=self._reduces_all,
            finishes_late=ranks.finishes_late,
            held=self.held,
            needed=needed,
        )
        if action is Due.HOLD:
            self.held = action.leaves
            for reduction in self.reductions:
                if reduction.has_gradients():
                    reduction.hold()
            return
        self._held_before, self.held = self.held, action.leaves if self.reductions else Held.NOTHING
        if not self.reductions:
            return
        root.make_room(self.number)
        with annotate("post_backward_reduce", self.range_name):
            for reduction in self.reductions:
                announcer = functools.partial(
                    root.agreement.announce_reduction, self.number, reduction.fingerprint
                )
                division = settings.divide_by, settings.force_sum
                if action is Due.FINISH_SUMS:
                    reduction.start_late(*division, announcer)
                else:
                    reduction.start(action is Due.FINISH, *division, announcer, self._fills)
        root.scattering.append(self.number)
        if self.stepping is not None:
            last_backward = settings.sync and settings.all_reduce and root.is_last_backward
            self.stepping.expect(self, last_backward, root.calls_begun)

    def communicators(self) -> list[Communicator]:
        """All over which it gathers and reduces."""
        ranks, scatters = self.ranks, self.scatter_ranks
        found = [*ranks.once, *ranks.gathers, *scatters.scatters, *scatters.late, *scatters.replicas]
        return found if self.neighbours is None else [*found, self.neighbours]

    # -- settings ------------------------------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Replace these of the :class:`Settings`."""
        self.settings = replace(self.settings, **changes)

    def gather_by(self, **changes: Any) -> None:
        """Replace these of the :class:`Transport`, between steps, and lay out gathers for it."""
        self.compute_as(False)
        self.release()
        self.change(transport=replace(self.settings.transport, **changes))
        self.plan_gathers()

    def reduce_by(self, **changes: Any) -> None:
        """Replace these of the :class:`Transport`, between steps, and plan reductions for it.

        Raises:
            RuntimeError: gradients of earlier micro-batches are held.
            ValueError: two would reduce gradients.
        """
        transport = replace(self.settings.transport, **changes)
        self._refuse_to_reduce_by(transport)
        self.finish_reduction()
        self.change(transport=transport)
        self.scatter_ranks = self._plan_scatters()
        self._plan_anew()

    def _refuse_to_reduce_by(self, transport: Transport) -> None:
        if self.held:
            raise RuntimeError(
                f"Unit {self.name!r} holds gradients of earlier micro-batches; change how they are reduced between "
                "optimizer steps."
            )
        if transport.hook is not None and transport.scatter is not None:
            raise ValueError(
                f"Unit {self.name!r} has a gradient hook, which reduces by collectives of its own, and a "
                "reduce-scatter of yours, which would never be called. Give one of set_gradient_comm_hook and "
                "set_custom_reduce_scatter, and None to the other."
            )

    def _plan_scatters(self) -> Ranks:
        transport = self.settings.transport
        ranks = self.ranks.with_scatters(separate) if transport.separate else self.ranks
        if transport.scatter is not None:
            ranks = ranks.with_scatters(functools.partial(with_scatters, custom=transport.scatter))
        return ranks

    def _plan_anew(self) -> None:
        self._trainable = None
        self.reductions = []
        self.follow_requires_grad()

    def join_root(self, root: Root, *place: Any) -> None:
        unnamed = self.root is None
        super().join_root(root, *place)
        if unnamed and self.settings.transport.hook is not None and self.parameters:
            self._plan_anew()

    @property
    def _fills(self) -> bool:
        """Whether this backward gives unused parameters gradients of zero. One to selected tensors does not."""
        return self.settings.fills_unused and not (self.root is not None and self.root.selects)

    @property
    def reduces_now(self) -> bool:
        """Whether a backward leaves reduced gradients, nothing held."""
        return self.settings.sync and self._reduces_all

    @property
    def _reduces_all(self) -> bool:
        """Whether the backward under way leaves nothing for the last of its step."""
        root, ranks = self.root, self.ranks
        assert root is not None
        return (root.is_last_backward and self.settings.all_reduce) or not (
            ranks.finishes_late or ranks.waits
        )

    def continue_reduction(self) -> bool:
        """Issue what follows the reduce-scatter. Returns whether that was anything."""
        goes_on = any(reduction.goes_on for reduction in self.reductions)
        with annotate("all_reduce", self.range_name) if goes_on else NOTHING:
            for reduction in self.reductions:
                reduction.go_on()
        return goes_on

    def finish_reduction(self) -> None:
        for reduction in self.reductions:
            reduction.finish(self.settings.all_reduce_hook)
        self._held_before = Held.NOTHING
        self._drop_retired()
        if self.host is not None and self.root is not None:
            self.root.arrivals.add(self)
        # While other calls wait for their backward, more gradients may come: then the end of backward steps it.
        if not self._unfinished:
            self.step_if_due()

    def step_if_due(self) -> None:
        """No more gradients come in this backward. A call of the unit under way still reads the weights."""
        if self.stepping is not None and self.stepping.due and not self.calls and not self.arriving:
            self.stepping.run(self)

    # -- gradients on their way to the host

    def leave_device(self) -> None:
        for reduction in self.reductions:
            if isinstance(reduction, HostReduction):
                reduction.leave_device()

    def has_arrived(self) -> bool:
        return all(r.arrived for r in self.reductions if isinstance(r, HostReduction))

    def land(self) -> None:
        """The host waits for the gradients, and steps the unit if no more can come in this backward."""
        self.arriving = self.late = False
        if self.stepping is not None:
            forget_stepped(self._shardeds)
        for reduction in self.reductions:
            if isinstance(reduction, HostReduction):
                reduction.land()
        if not self._unfinished:
            self.step_if_due()

    def complete(self) -> None:
        if self.late:
            self.land()
            if (
                self.stepping is not None and self.stepping.due
            ):  # its backward is over, and its next use waits
                self.stepping.run(self)

    def _drop_retired(self) -> None:
        """If nothing is held any more, reductions planned for an earlier requires_grad have done their part."""
        if not self.held and any(r.retired for r in self.reductions):
            self.reductions = [r for r in self.reductions if not r.retired]

    def forget_gradients(self, among: set[int] | None = None) -> None:
        """After ``zero_grad``: drop held sums (if all parameters are ``among`` the ids given) and gradients' memory."""
        if self.held and (among is None or all(id(p.sharded) in among for p in self.parameters)):
            for reduction in self.reductions:
                reduction.drop_held()
            self.held = Held.NOTHING
            self._drop_retired()
        self.release_unused_gradients()

    def take_held(self, others: list[Reduction]) -> None:
        """Hold what the reductions of the memory before this one held, for the same parameters."""
        self.held = Held.WHOLE
        self.reductions = [r for r in self.reductions if not r.retired]
        packings = {r.packing: r for r in self.reductions}
        for other in others:
            mine = packings.get(other.packing)
            if mine is None:
                mine = self._reduction(other.packing)
                mine.retired = True
                self.reductions.append(mine)
            mine.take_held(other)

    def release_unused_gradients(self) -> None:
        for reduction in self.reductions:
            reduction.release_unused()

    # -- forward ---------------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        root = self.root if self.root is not None else self._join(module)
        with annotate("pre_forward", self.range_name):
            return self._before_forward(root, module, args, kwargs)

    def _before_forward(self, root: Root, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        recomputing = in_backward()
        if recomputing:
            root.enter_backward()
        elif root.caller is None:
            with alone(root.device):
                root.begin(self, module)
            device = self.comm.device
            if device.type != "cpu":
                args, kwargs = map_arguments(lambda t: t.to(device, non_blocking=True), args, kwargs)
        frame = Frame(self, next_sequence_number())
        root.frames.append(frame)  # taken off by after_forward or forward_failed
        frame.containers = opaque_or_mutable(args, kwargs)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs and not root.full_precision:
            args, kwargs = map_arguments(lambda t: t.to(dtype) if t.is_floating_point() else t, args, kwargs)
        lasting = lasting_kind()
        with alone(root.device):
            if (self.lenders or not self.parameters) and not recomputing:
                self.settle()
            if self.parameters:
                self._use(root, frame, recomputing, lasting)
        if (self.parameters or self.lenders) and lasting is None and self._is_marked(recomputing):
            args, kwargs = self._mark(root, frame, args, kwargs, recomputing)
        for lender in self.lenders:
            lender.lend(frame)
        return args, kwargs

    def _join(self, module: nn.Module) -> Root:
        with alone(self.comm.device):
            return self.attach(module)

    def _mark(self, root: Root, frame: Frame, args: Any, kwargs: Any, recomputing: bool) -> tuple[Any, Any]:
        """Let the call's visit hear of its backward from the inputs; outputs are marked when there are any."""
        visit = frame.visit = root.visit(self, recomputing)
        host = root.host_of(frame)
        if host is not None and host not in visit.hosts:
            visit.hosts.append(host)
        args, kwargs, marked, frame.entry = mark_inputs(visit, args, kwargs)
        frame.begun = next_sequence_number()
        visit.calls += 1
        visit.endless |= not marked
        if self.neighbours is not None or self.stepping is not None:
            self._unfinished.add(visit)
        return args, kwargs

    def _use(self, root: Root, frame: Frame, recomputing: bool, lasting: type[Lasting] | None) -> None:
        """A call that reads the full weights begins: gather them or take what was prefetched, and show them.

        ``lasting``: of what kind the copies are that are to be shown, if any.
        """
        self.refuse_unsharded("Forward of")
        if not self.calls and not self._to_run and not recomputing:
            if not self._full_shown:
                construct.settle(self)
            if self.lends_over:
                construct.refuse_sharded_stand_ins(self)
            self.follow_requires_grad()
            if len(self.modules) > 1:
                self._to_run = {id(m()) for m in self.modules}
        self.calls += 1
        self.hide_lasting()
        if not recomputing:
            root.forward_reaches(self)
        elif not self.slab.leased:
            self.issue(root.generation)
        self.wait()
        self.show_full()
        if lasting is not None:
            self._show_lasting(root, frame, lasting)

    def _show_lasting(self, root: Root, frame: Frame, kind: type[Lasting]) -> None:
        """Let the modules compute with copies of the full weights, and hear when their gradients are there."""
        visit = root.visit(self, recomputing=True)  # of its own, since other calls have other copies
        visit.calls, visit.endless, visit.lasting = 1, True, True
        host = frame.visit if frame.unit is not self and frame.visit is not None else root.host_of(frame)
        if host is not None:
            visit.hosts.append(host)
        self.lasting = kind(self.parameters, visit)
        if self.stepping is not None and self.lasting.has_graph:
            self._unfinished.add(visit)

    def _is_marked(self, recomputing: bool) -> bool:
        """Whether a call needs marks in the graph.

        Recomputation for a visit whose backward is under way fills saved tensors of the first graph, which is marked
        already; reentrant checkpointing runs backward through the recomputed graph itself.
        """
        return torch.is_grad_enabled() and not (recomputing and bool(self.visits))

    def lend(self, frame: Frame) -> None:
        """This unit's weights are read inside another unit's call: show them until it returns, and in its backward."""
        if frame.unit is self or self in frame.guests or not self.parameters:
            return
        root = self.root if self.root is not None else self._join(self.living_modules()[0])
        lasting = lasting_kind()
        with alone(root.device):
            self._lend(root, frame, lasting)

    def _lend(self, root: Root, frame: Frame, lasting: type[Lasting] | None) -> None:
        recomputing = in_backward()
        if recomputing:
            root.enter_backward()
        elif root is not frame.unit.root and root.caller is None:
            root.generation += 1  # it is of another model, of which this is no call
            assert frame.unit.root is not None
            root.compute_as(root.full_precision_in_eval and frame.unit.root.full_precision)
        frame.guests.append(self)
        self._use(root, frame, recomputing, lasting)
        if lasting is None and self._is_marked(recomputing):
            if frame.visit is None:
                frame.visit = root.visit(
                    frame.unit, recomputing=True
                )  # of its own, since it has no marked input
                frame.visit.calls += 1
                frame.visit.endless = True
            guest = root.visit(self, recomputing=True)
            guest.calls += 1
            if self.stepping is not None:
                self._unfinished.add(guest)
            frame.visit.guests.append(guest)

    def lend_if_called(self) -> None:
        """A parameter of this unit's module is read: inside another unit's call, lend it to that."""
        root = self.root
        if root is not None and not self._full_shown and root.frames:
            self.lend(root.frames[-1])

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        with annotate("post_forward", self.range_name):
            return self._after_forward(module, output)

    def _after_forward(self, module: nn.Module, output: Any) -> Any:
        root = self.root
        assert root is not None
        frame = root.frames[-1]  # taken off when nothing can fail any more, else by forward_failed
        visit = frame.visit
        self._to_run.discard(id(module))
        if isinstance(output, LAZY):
            raise TypeError(
                f"The forward of unit {self.name!r} ({type(module).__name__}) returned a {type(output).__name__}, "
                "which runs when the weights are released. Let forward return its results, or shard the modules that "
                "it calls."
            )
        if self.parameters and self.lasting is None:
            output = self._copy_weights(output)
        if visit is not None:
            found = self._stash.find(frame.containers)
            found_or_hidden = found if type(output) is torch.Tensor else [*found, *hidden_tensors(output)]
            if found_or_hidden:
                self._refuse_weights(found_or_hidden, module)
            stashed = mark_made(visit, found, frame.entry)
            marked = mark_outputs(visit, output, frame.entry) or stashed
            if not marked and next_sequence_number() > frame.begun:
                refuse_opaque(output, f"unit {self.name!r} ({type(module).__name__})")
            visit.returns |= marked
            visit.end = root.tick()
            for stay in visit.guests:
                stay.end = visit.end
        recomputing = in_backward()
        with alone(root.device):
            root.frames.pop()
            for guest in frame.guests:
                guest.leave(root, None, recomputing)
            if self.parameters:
                self.leave(root, visit, recomputing)
            if not recomputing and not root.frames and root.caller is not None:
                root.end()
        dtype = self.policy.output_dtype
        if dtype is not None and not root.full_precision:
            output = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)
        return output

    def leave(self, root: Root, visit: Visit | None, recomputing: bool) -> None:
        """A call that read the full weights has returned."""
        self.calls -= 1
        if not self.calls and not self._to_run and not recomputing:
            root.forward_leaves(self, visit)
            self.leave_forward()

    def forward_failed(self, depth: int) -> None:
        """An exception passes through a call that began when ``depth`` others were under way: leave all in order."""
        if self.root is not None:
            with alone(self.root.device):
                self._leave_failed(self.root, depth)

    def _leave_failed(self, root: Root, depth: int) -> None:
        frames = root.frames[depth:]
        del root.frames[depth:]
        for unit in [u for frame in reversed(frames) for u in (*frame.guests, frame.unit)]:
            if unit.parameters and unit.calls:
                unit.calls -= 1
                if not unit.calls and not in_backward():
                    unit._to_run.clear()
                    unit.release()
        if not root.frames and root.caller is not None and not in_backward():
            root.abandon()

    def forget_calls(self) -> None:
        """The root call has failed: nothing of it is under way any more."""
        self.calls = 0
        self._to_run.clear()

    @property
    def forward_unfinished(self) -> bool:
        """Whether forward ran only some modules of a list unit."""
        return bool(self._to_run)

    def leave_forward(self) -> None:
        self._to_run.clear()
        assert self.root is not None
        if self._keeps_after_forward(self.root):
            self.show_sharded()
        else:
            if (
                self.neighbours is not None
                and self.settings.reshard_after_forward is not True
                and torch.is_grad_enabled()
            ):
                self.keep_secondary()
            self.release()

    def _keeps_after_forward(self, root: Root) -> bool:
        if self.ranks.keeps_full:
            self.kept = True
            return True
        reshard = self.settings.reshard_after_forward
        if torch.is_grad_enabled():
            return not (root.top is not self if reshard is None else bool(reshard))
        self.kept = (
            reshard is False
        )  # asked for, so kept for the next evaluation step too, until weights change
        return self.kept

    def _copy_weights(self, output: Any) -> Any:
        """Clone outputs that are views of the unit's weights, whose memory is about to go."""
        start = self.slab.address
        end = start + self.slab.nbytes

        def check(tensor: torch.Tensor) -> torch.Tensor:
            plain = plain_of(tensor)
            if type(plain) in (torch.Tensor, FullParameter) and start <= address_of(plain) < end:
                return tensor.clone()
            return tensor

        return map_tensors(check, output)

    def _refuse_weights(self, tensors: list[torch.Tensor], module: nn.Module) -> None:
        """Raise if a view of the unit's weights was put where it can't be exchanged for a copy."""
        start, end = self.slab.address, self.slab.address + self.slab.nbytes
        for tensor in tensors:
            plain = plain_of(tensor)
            if type(plain) is torch.Tensor and start <= address_of(plain) < end:
                raise RuntimeError(
                    f"Unit {self.name!r} ({type(module).__name__}) keeps a view of its weights, of shape "
                    f"{tuple(tensor.shape)}, in an attribute or an object, but their memory is released after forward. "
                    "Keep a clone, or return the view."
                )

    # -- backward --------------------------------------------------------------------------------------------------

    def before_backward(self, visit: Visit) -> None:
        """Backward has reached an output of a visit: gather the weights that it will read."""
        if visit not in self.visits:
            assert self.root is not None
            with annotate("pre_backward", self.range_name), alone(self.root.device):
                self._enter_backward(visit)

    def _enter_backward(self, visit: Visit) -> None:
        root = self.root
        assert root is not None
        self.refuse_unsharded("Backward through")
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"Backward with create_graph=True reached unit {self.name!r}: sharded parameters do not support double "
                "backward, because their memory is released after each use. Use first-order gradients only."
            )
        if visit.build != self.build:
            raise RuntimeError(
                f"Parameters of unit {self.name!r} were replaced by others of another shape or dtype since the forward "
                "that this backward belongs to. Run the forward again."
            )
        root.enter_backward()
        visit.open = visit.calls
        self.visits.add(visit)
        root.open_visits.append(visit)
        for host in visit.hosts:  # units may run inside one another
            host.before_backward()
        root.close_later_visits(visit)
        if self.parameters:
            self.entered = True
            if not visit.lasting:
                self._show_in_backward(root, visit)
        for guest in visit.guests:
            guest.unit.before_backward(guest)

    def _show_in_backward(self, root: Root, visit: Visit) -> None:
        self.notice_edits()
        valid = self.slab.leased and self.slab_is_current
        if self.settings.unshard_in_backward and not valid:
            self.issue(root.generation, look=False)
        root.prefetch_backward(visit)
        self.wait()
        self.show_full()

    def after_backward(self, visit: Visit) -> None:
        """Backward has produced the gradients of one call's inputs."""
        visit.open -= 1
        if visit.open == 0 and not visit.endless:
            assert self.root is not None
            with alone(self.root.device):
                self.close(visit)

    def close(self, visit: Visit) -> None:
        """A visit's backward is through: without others under way give the weights back and reduce the gradients."""
        if visit not in self.visits:
            return
        self.visits.discard(visit)
        self._unfinished.discard(visit)
        assert self.root is not None
        self.root.open_visits.remove(visit)
        self.root.close_visits_begun_after(visit.begin)
        if not self.visits and self.parameters:
            if not self.calls:  # else this backward ran inside the unit's own forward
                self.kept = self.ranks.keeps_full or not self.settings.reshard_after_backward
                if self.kept:
                    self.show_sharded()
                else:
                    self.release()
            if not self._unfinished:
                self.drop_secondary()
            self.reduce()
        for guest in visit.guests:
            guest.unit.close(guest)

    def recover(self) -> None:
        """Drop what an interrupted forward or backward left behind."""
        self.calls = 0
        self._to_run.clear()
        self.visits.clear()
        if self.stepping is not None:
            self.stepping.due = False
        self.arriving = self.late = False
        if self.parameters:
            self.entered = False
            for reduction in self.reductions:
                reduction.discard()
            self.held = max(self.held, self._held_before)
            self._held_before = Held.NOTHING
            self.release()
            self.drop_secondary()
