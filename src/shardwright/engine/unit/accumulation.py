"""A unit's gradients: held gradients, and the planned reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from shardwright.engine.base.home import Place
from shardwright.engine.base.offload import Host
from shardwright.engine.base.settings import Settings, Transport
from shardwright.engine.comm import separate, with_scatters
from shardwright.engine.compat.autograd import requires_grad_of
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.compat.profiling import annotate
from shardwright.engine.gradients.due import Due, Held, due
from shardwright.engine.gradients.reduction import Reduction
from shardwright.engine.layout import GradientDtypes, Packing, plan_packing
from shardwright.engine.tensors.parameter import hear_of_gradients
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.weights.weights import Weights


def ranks_of_scatters(ranks: Ranks, transport: Transport) -> Ranks:
    """The ranks of gradient reductions, with the user's collective or the separate group."""
    if transport.separate:
        ranks = ranks.with_scatters(separate)
    if transport.scatter is not None:
        ranks = ranks.with_scatters(partial(with_scatters, custom=transport.scatter))
    return ranks


MOST_PLANS = 4
"""For so many values of ``requires_grad`` a unit keeps the reductions. A step may change it and change it back."""


class Gradients:
    """The gradients of one build of a unit's memory.

    Attributes:
        dtypes: the gradient dtypes of each parameter.
        chooses_dtype: whether the user has set a dtype for ``.grad``.
        ranks: the ranks of the reductions.
        reductions: one for each packing; also those of an earlier ``requires_grad`` while they hold sums.
        held: which gradients of earlier micro-batches are held.
        arriving: whether gradients are on their way to the CPU's memory.
        overdue: whether these are of a backward that has ended.
    """

    def __init__(
        self, weights: Weights, dtypes: Sequence[GradientDtypes], ranks: Ranks, host: Host | None
    ) -> None:
        self._weights = weights
        self._host = host
        self.dtypes = list(dtypes)
        self.chooses_dtype = any(each.grad is not None for each in dtypes)
        self.ranks = ranks
        self.reductions: list[Reduction] = []
        self._plans: dict[tuple[bool, ...], list[Reduction]] = {}  #: by requires_grad, the newest last
        self.held = Held.NOTHING
        self._held_before = Held.NOTHING  #: at the begin of the running reduction
        self._dropped: set[int] = (
            set()
        )  #: ids of sharded parameters whose held gradients the user has dropped
        self._hears = False  #: whether the sharded parameters tell of assignments to ``.grad``
        self._trainable: tuple[bool, ...] | None = None
        self.arriving = False
        self.overdue = False

    # -- plan ----------------------------------------------------------------------------------------------------

    def follow_requires_grad(self, settings: Settings) -> bool:
        """Copy ``requires_grad`` from the sharded parameters. Returns whether it had changed."""
        with quick_attributes():
            trainable = tuple(map(requires_grad_of, self._weights.forms.shardeds))
        if trainable == self._trainable:
            return False
        self.finish(settings)
        for p, flag in zip(self._weights.parameters, trainable, strict=True):
            p.full.requires_grad_(flag)
        plan = self._plans.pop(trainable, None)
        if plan is None:
            plan = self._plan(trainable, settings.transport)
        # Held gradients from before the change are reduced beside the new ones.
        earlier = [r for r in self.reductions if r not in plan] if self.held else []
        for reduction in earlier:
            reduction.retired = True
        for reduction in plan:
            reduction.retired = False
        self._plans[trainable] = plan
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self.reductions = [*plan, *earlier]
        self._trainable = trainable  # set last, so that a failure above is repeated
        return True

    def plan_again(self, ranks: Ranks, settings: Settings) -> None:
        """Plan the reductions again after a change of the transport, between steps."""
        self.ranks = ranks
        self._trainable = None
        self.reductions = []
        self._plans.clear()
        self.follow_requires_grad(settings)

    @torch.inference_mode(False)
    def _plan(self, trainable: tuple[bool, ...], transport: Transport) -> list[Reduction]:
        packings = plan_packing(self._weights.copies.layout, trainable, self.dtypes)
        return [self._reduction(packing, transport) for packing in packings]

    def _reduction(self, packing: Packing, transport: Transport) -> Reduction:
        weights = self._weights
        # A hook stores its state by names of units, which only the model has.
        hook = transport.hook if weights.place is not None else None
        return Reduction(
            packing,
            weights.copies.layout,
            weights.parameters,
            self.ranks,
            weights.site.owner,
            hook,
            weights.site.owner.name,
            self._host,
        )

    # -- reduce --------------------------------------------------------------------------------------------------

    def reduce(self, place: Place, settings: Settings, needed: bool, completes: bool, fill: bool) -> bool:
        """Reduce the gradients, zeros where there are none, or hold them. Returns whether a reduction was begun."""
        self._leave_out_dropped()
        action = due(
            sync=settings.sync,
            completes=completes,
            finishes_late=self.ranks.finishes_late,
            held=self.held,
            needed=needed,
        )
        if action is Due.HOLD:
            self.held = action.leaves if self.reductions else Held.NOTHING
            for reduction in self.reductions:
                if reduction.has_gradients():
                    reduction.hold()
            self._hear_of_gradients()
            return False
        self._held_before, self.held = self.held, action.leaves if self.reductions else Held.NOTHING
        self._hear_of_gradients()
        if not self.reductions:
            return False
        place.home.reductions.make_room(place.number)
        announce = place.home.agreement.announce_reduction
        with annotate("post_backward_reduce", place.label):
            for reduction in self.reductions:
                announcer = partial(announce, place.number, reduction.fingerprint)
                division = settings.divide_by, settings.force_sum
                if action is Due.FINISH_SUMS:
                    reduction.start_late(*division, announcer)
                else:
                    reduction.start(action is Due.FINISH, *division, announcer, fill)
        return True

    def has_gradients(self) -> bool:
        """Whether a parameter has a full gradient."""
        return any([r.has_gradients() for r in self.reductions])

    def go_on(self, label: str) -> bool:
        """Issue the collectives after the reduce-scatter. Returns whether there were any."""
        rest = [reduction for reduction in self.reductions if reduction.goes_on]
        if not rest:
            return False
        with annotate("all_reduce", label):
            for reduction in rest:
                reduction.go_on()
        return True

    def collect(self) -> None:
        """Free the buffers of the running reduction if its collective has ended; the result is not delivered yet."""
        for reduction in self.reductions:
            reduction.collect()

    def finish(self, settings: Settings) -> None:
        """Wait for the running reduction, and deliver it."""
        for reduction in self.reductions:
            reduction.finish(settings.all_reduce_hook)
        self._held_before = Held.NOTHING
        self._drop_retired()

    def discard(self) -> None:
        """Drop a failed backward, and hold the earlier gradients again."""
        self.arriving = self.overdue = False
        for reduction in self.reductions:
            reduction.discard()
        self.held = max(self.held, self._held_before)
        self._held_before = Held.NOTHING
        self._hear_of_gradients()

    # -- what is held --------------------------------------------------------------------------------------------

    def _drop_retired(self) -> None:
        """Drop reductions of an earlier requires_grad if nothing is held any more."""
        if not self.held and any([r.retired for r in self.reductions]):
            self.reductions = [r for r in self.reductions if not r.retired]

    def forget(self, among: set[int] | None = None) -> None:
        """After ``zero_grad`` of the parameters with these ids (None: all): drop held sums and gradients' memory."""
        self.drop(among)
        self.release_unused()

    def drop(self, among: set[int] | None = None) -> None:
        """Drop the held gradients of the parameters with these ids (None: all), because the user has dropped them.

        If others of the unit stay, this is done when the held gradients are used next.
        """
        if not self.held:
            return
        shardeds = self._weights.forms.shardeds
        if among is not None:
            self._dropped.update(id(p) for p in shardeds if id(p) in among)
        if among is None or all(id(p) in self._dropped or not p.requires_grad for p in shardeds):
            for reduction in self.reductions:
                reduction.drop_held()
            self.held = Held.NOTHING
            self._dropped.clear()
            self._drop_retired()
            self._hear_of_gradients()

    def _leave_out_dropped(self) -> None:
        """Take the gradients that the user has dropped out of the held sums."""
        if self._dropped:
            dropped, self._dropped = self._dropped, set()
            for reduction in self.reductions:
                reduction.leave_out(dropped)

    def _hear_of_gradients(self) -> None:
        """Hear of assignments to ``.grad`` exactly while gradients are held."""
        if self._hears != bool(self.held):
            self._hears = bool(self.held)
            hear_of_gradients(self._weights.forms.shardeds, self._hears)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A context in which the held gradients are not reduced and not dropped."""
        held, self.held = self.held, Held.NOTHING
        try:
            yield
        finally:
            self.held = held

    def held_reductions(self) -> list[Reduction]:
        """Return the reductions if they hold gradients, without those that the user has dropped; else none."""
        self._leave_out_dropped()
        return self.reductions if self.held else []

    def take_held(self, others: list[Reduction], transport: Transport) -> None:
        """Take the held gradients of the earlier memory, for the same parameters."""
        self.held = Held.WHOLE
        self._hear_of_gradients()
        self.reductions = [r for r in self.reductions if not r.retired]
        packings = {r.packing: r for r in self.reductions}
        for other in others:
            mine = packings.get(other.packing)
            if mine is None:
                mine = self._reduction(other.packing, transport)
                mine.retired = True
                self.reductions.append(mine)
            mine.take_held(other)

    def release_unused(self) -> None:
        for reduction in self.reductions:
            reduction.release_unused()
        for plan in self._plans.values() if len(self._plans) > 1 else ():
            for reduction in plan:
                reduction.release_unused()

    # -- on their way to the host --------------------------------------------------------------------------------

    def begin_arrival(self) -> None:
        self.arriving = any(r.delivery.arriving for r in self.reductions)

    def leave_device(self) -> None:
        for reduction in self.reductions:
            reduction.delivery.leave_device()

    def has_arrived(self) -> bool:
        return all(r.delivery.arrived for r in self.reductions)

    def land(self) -> None:
        """Let the host wait for the gradients."""
        self.arriving = self.overdue = False
        for reduction in self.reductions:
            reduction.delivery.land()
