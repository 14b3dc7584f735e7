"""A unit: the parameters that one ``fully_shard`` call owns. It composes their weights and their gradients.

``uses.py`` has the actions on a unit. The room ``model`` decides when they happen. See docs/architecture.md.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.build import Arguments, Built, cut_for
from shardwright.engine.base.home import Home, Place
from shardwright.engine.base.offload import Host, HostReads
from shardwright.engine.base.settings import ModelOptions, Settings
from shardwright.engine.base.site import UnitSite
from shardwright.engine.base.visit import Activity
from shardwright.engine.comm import Communicator, neighbours
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.gradients.due import Held
from shardwright.engine.gradients.reduction import Reduction
from shardwright.engine.gradients.stepping import Stepping
from shardwright.engine.layout import plan_unit
from shardwright.engine.memory import Owner, Slab
from shardwright.engine.tensors.edits.unset import carry_mark
from shardwright.engine.tensors.parameter import ManagedParameter, become
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.unit.accumulation import Gradients, ranks_of_scatters
from shardwright.engine.unit.values import Values
from shardwright.engine.unit.watch import ModuleWatch
from shardwright.engine.weights.unready import NOT_THROUGH_OUTPUTS
from shardwright.engine.weights.weights import Weights

_serials = itertools.count()


class Unit:
    """One ``fully_shard`` call. Without parameters it issues no collectives.

    Attributes:
        serial: its number in the order of the ``fully_shard`` calls.
        site: the place of its memory.
        arguments: the arguments of the call.
        settings: the user's settings; :meth:`change` replaces them.
        options: of the model whose root this unit is.
        state_host: the host that stores the optimizer's state if the unit is stepped on the device; else None.
        watch: its modules.
        values: which of its parameters have values.
        weights, gradients: of the parameters, in the last build of their memory.
        activity: running calls and backwards.
        stepping: the optimizers that step it in backward; else None.
        siblings: units of other meshes that own parameters of the same modules.
        main: for a sibling, the unit whose sibling it is.
        root: its model, after the first call.
        number: in the model.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        ranks: Ranks,
        arguments: Arguments,
        settings: Settings,
        ignored: Iterable[nn.Parameter],
        ignored_modules: Iterable[nn.Module],
    ) -> None:
        self.serial = next(_serials)
        self.arguments = arguments
        self.settings = settings
        self.options = ModelOptions()
        host, offload = None, arguments.offload
        if offload.optimizer and not ranks.comm.streams.asynchronous:
            host = Host(ranks.comm.streams, ranks.device, offload.pin_memory)
        self.state_host = None if offload.parameters else host
        to = settings.reshard_after_forward
        self.site = UnitSite(
            ranks,
            Owner(type(modules[0]).__name__),
            HostReads(host) if host is not None and offload.parameters else None,
            neighbours(ranks.comm, to) if type(to) is int else None,
            _gradient_listener(self, ranks.device),
            _data_listener(self),
        )
        self.watch = ModuleWatch(modules, ignored, ignored_modules)
        self.values = Values()
        self.activity = Activity()
        self.stepping: Stepping | None = None
        self.siblings: list[Unit] = []
        self.main: weakref.ref[Unit] | None = None
        self.root: Home | None = None
        self.number = -1
        nothing = plan_unit([], ranks.parts)
        self._own(Weights(self.site, settings.transport, nothing, [], Slab(0, ranks.device), []), [])

    def _own(self, weights: Weights, gradient_dtypes: Sequence[Any]) -> None:
        self.weights = weights
        scatters = ranks_of_scatters(self.site.ranks, self.settings.transport)
        self.gradients = Gradients(weights, gradient_dtypes, scatters, self.host)

    def own(self, built: Built) -> None:
        """Adopt parameters and their memory. The gradients begin empty."""
        before = self.weights
        weights = Weights(
            self.site,
            self.settings.transport,
            built.layout,
            built.shards,
            built.slab,
            built.parameters,
            before,
        )
        place = before.place
        if place is not None:
            weights.join(place)
        self._own(weights, built.gradient_dtypes)
        self.activity.entered = False
        self.gradients.follow_requires_grad(self.settings)

    def remake_later(self, reductions: list[Reduction]) -> None:
        """After a failure while the memory was made: let the next use make it again. Held gradients stay held."""
        self.watch.look_again_later()
        if reductions:
            self.gradients.held = Held.WHOLE
            self.gradients.reductions = reductions

    # -- what it consists of -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.site.owner.name

    @property
    def ranks(self) -> Ranks:
        return self.site.ranks

    @property
    def mesh(self) -> DeviceMesh:
        return self.site.ranks.mesh

    @property
    def comm(self) -> Communicator:
        """The communicator of the gather that fills the slab."""
        return self.site.ranks.comm

    @property
    def host(self) -> Host | None:
        """The host that has the shards; None if they are on the device."""
        return self.site.reads.host if self.site.reads is not None else None

    @property
    def parameters(self) -> list[ManagedParameter]:
        return self.weights.parameters

    @property
    def generation(self) -> int:
        """Number of times that the unit's memory was made."""
        return self.weights.generation

    def managed(self, sharded: torch.Tensor | None) -> ManagedParameter | None:
        """The parameter whose sharded form this is."""
        return next((p for p in self.weights.parameters if p.sharded is sharded), None)

    def without_values(self) -> dict[nn.Parameter, torch.Tensor]:
        """Sharded parameters without values, and for each its original from before sharding."""
        return self.values.missing(self.weights.parameters)

    def communicators(self) -> list[Communicator]:
        """All communicators of its gathers and reductions."""
        ranks, scatters, near = self.site.ranks, self.gradients.ranks, self.site.neighbours
        communicators = [*ranks.once, *ranks.gathers, *scatters.scatters, *scatters.late, *scatters.replicas]
        return communicators if near is None else [*communicators, near]

    # -- its model -----------------------------------------------------------------------------------------------

    def join(self, place: Place) -> None:
        """Become unit ``place.number`` of a model."""
        unnamed = self.root is None
        if not unnamed and self.parameters:
            self.release()
        self.root, self.number = place.home, place.number
        self.site.owner.name = place.name
        self.weights.join(place)
        if self.parameters:
            self.weights.compute_as(place.home.full_precision)
            if unnamed and self.settings.transport.hook is not None:
                self.gradients.plan_again(self.gradients.ranks, self.settings)

    def rejoin(self) -> None:
        """After the unit's memory or gathers were made again: use the precision of the model."""
        if self.root is not None:
            self.weights.compute_as(self.root.full_precision)

    # -- settings ------------------------------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Replace these of the :class:`Settings`."""
        self.settings = replace(self.settings, **changes)

    # -- weights -------------------------------------------------------------------------------------------------

    def refuse_unsharded(self, what: str) -> None:
        if self.watch.unsharded:
            raise RuntimeError(
                f"{what} unit {self.name!r} inside shardwright.unsharded, where modules have full parameters that do "
                "not belong to the unit. Leave the context first."
            )

    def release(self) -> None:
        """Show the sharded parameters and release the slab's memory."""
        self.weights.release()

    def drop_kept(self) -> None:
        """Drop kept copies of the weights and wait for gathers that read them, because the weights are about to
        change."""
        self.weights.drop_kept()

    def on_data_handed_out(self, full: torch.Tensor) -> None:
        """Note that user code gets the ``.data`` of a full parameter."""
        self.weights.on_data_handed_out(full)

    def assign_data(self, sharded: nn.Parameter, value: torch.Tensor) -> None:
        """``sharded.data = value``. The unit's next use changes the shard. Aliases of the old shard keep it."""
        p = self.managed(sharded)
        assert p is not None
        if self.activity.busy:
            p.take_values(value)
            return
        cut = p.cut if value.shape == p.cut.shape else cut_for(p, value, self.site, self.arguments)
        before = local_of(sharded)
        become(sharded, cut.wrap(cut.part_of(value)))
        # A plain tensor has values. A sharded one, as from ``to_empty`` of an inner module, may have none.
        if isinstance(value, (DTensor, RaggedTensor)):
            carry_mark(before, local_of(sharded))

    # -- gradients -----------------------------------------------------------------------------------------------

    def on_gradient(self, full: torch.Tensor) -> None:
        """A parameter's full gradient is complete, but backward has reached no output of the unit.

        Raises:
            RuntimeError: it read the weights when they were not gathered.
        """
        root = self.root
        assert root is not None
        root.enter_backward()
        if not self.activity.entered and not self.weights.ready:
            raise RuntimeError(
                f"Backward used unit {self.name!r} before its backward hook ran, so its weights are not gathered. "
                f"{NOT_THROUGH_OUTPUTS}"
            )


# Parameters hold these listeners, and the unit holds the parameters: they refer to it weakly.


_LARGE = 1 << 15  #: elements of a gradient that takes longer to compute than the host takes to free buffers


def _gradient_listener(unit: Unit, device: torch.device) -> Callable[[torch.Tensor], None]:
    """Called with each parameter whose full gradient is complete for this backward."""
    ref = weakref.ref(unit)
    # Reductions of the CPU's memory end on the host. Their buffers are freed between large gradients of the next unit,
    # so that they do not add to all of its gradients.
    large = _LARGE if device.type == "cpu" else sys.maxsize

    def on_gradient(full: torch.Tensor) -> None:
        unit = ref()
        if unit is None:
            return
        root = unit.root
        if root is None or not unit.activity.entered or root.task() is None:
            unit.on_gradient(full)
        if full.numel() >= large and unit.root is not None:
            unit.root.reductions.collect()

    return on_gradient


def _data_listener(unit: Unit) -> Callable[[torch.Tensor], None]:
    """Called with a full parameter when user code gets its ``.data``."""
    ref = weakref.ref(unit)

    def on_data_handed_out(full: torch.Tensor) -> None:
        unit = ref()
        if unit is not None:
            unit.on_data_handed_out(full)

    return on_data_handed_out
