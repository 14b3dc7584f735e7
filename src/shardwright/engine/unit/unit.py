"""A unit: the parameters that one ``fully_shard`` call owns. It composes their weights and their gradients.

What is done with it is in ``uses.py``. When, is decided in the room ``model``. docs/architecture.md has the whole.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright._torch import local_of
from shardwright.comm import Communicator, neighbours
from shardwright.engine.assembly.build import Arguments, Built, cut_for
from shardwright.engine.base.home import Home, Place
from shardwright.engine.base.offload import Host, HostReads
from shardwright.engine.base.settings import ModelOptions, Settings
from shardwright.engine.base.site import Site
from shardwright.engine.base.visit import Activity
from shardwright.engine.gradients.due import Held
from shardwright.engine.gradients.reduction import Reduction
from shardwright.engine.gradients.stepping import Stepping
from shardwright.engine.tensors.parameter import ManagedParameter, become
from shardwright.engine.tensors.ragged import RaggedTensor
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.tensors.unset import carry_mark
from shardwright.engine.unit.accumulation import Gradients, ranks_of_scatters
from shardwright.engine.unit.values import Values
from shardwright.engine.unit.watch import Watch
from shardwright.engine.weights.weights import Weights
from shardwright.layout import plan_unit
from shardwright.memory import Owner, Slab

_serials = itertools.count()


class Unit:
    """One ``fully_shard`` call. There may be no parameters: then nothing is ever issued for this unit.

    Attributes:
        serial: in the order of the ``fully_shard`` calls.
        site: where its memory is.
        arguments: what the call was given.
        settings: by the user; :meth:`change` replaces them.
        options: of the model whose root this unit is.
        state_host: where an optimizer that steps the unit on the device keeps its state, if that is not the device.
        watch: its modules.
        values: what is known of the values of its parameters.
        weights, gradients: of the parameters, as their memory was made last.
        activity: calls and backwards under way.
        stepping: where optimizers step it in backward.
        siblings: units of other meshes that own parameters of the same modules.
        main: of such a unit the one that has it as a sibling.
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
        self.site = Site(
            ranks,
            Owner(type(modules[0]).__name__),
            HostReads(host) if host is not None and offload.parameters else None,
            neighbours(ranks.comm, to) if type(to) is int else None,
            _gradient_listener(self),
            _data_listener(self),
        )
        self.watch = Watch(modules, ignored, ignored_modules)
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
        """Take parameters and their memory; gradients begin again."""
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
        """Making the memory has failed half-way: let the next use do it again, and hold what was held."""
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
        """That of the gather which fills the slab."""
        return self.site.ranks.comm

    @property
    def host(self) -> Host | None:
        """Where the shards lie, if not on the device."""
        return self.site.reads.host if self.site.reads is not None else None

    @property
    def parameters(self) -> list[ManagedParameter]:
        return self.weights.parameters

    @property
    def generation(self) -> int:
        """How often the unit's memory was made."""
        return self.weights.generation

    def managed(self, sharded: torch.Tensor | None) -> ManagedParameter | None:
        """The parameter whose sharded form this is."""
        return next((p for p in self.weights.parameters if p.sharded is sharded), None)

    def without_values(self) -> dict[nn.Parameter, torch.Tensor]:
        """Sharded parameters that nobody has given values yet, and what each was before it was sharded."""
        return self.values.missing(self.weights.parameters)

    def communicators(self) -> list[Communicator]:
        """All over which it gathers and reduces."""
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
        """After the unit's memory was made, or its gathers: compute as the model does."""
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
        """Show the sharded parameters and give the slab's memory back."""
        self.weights.release()

    def drop_kept(self) -> None:
        """The weights are about to change: keep no copy of them, and let no gather go on reading them."""
        self.weights.drop_kept()

    def on_data_handed_out(self, full: torch.Tensor) -> None:
        """The ``.data`` of a full parameter is handed out."""
        self.weights.on_data_handed_out(full)

    def assign_data(self, sharded: nn.Parameter, value: torch.Tensor) -> None:
        """``sharded.data = value``. The shard follows when the unit is next used; what aliased the old one keeps it."""
        p = self.managed(sharded)
        assert p is not None
        if self.activity.busy:
            p.take_values(value)
            return
        cut = p.cut if value.shape == p.cut.shape else cut_for(p, value, self.site, self.arguments)
        before = local_of(sharded)
        become(sharded, cut.wrap(cut.part_of(value)))
        # Else it has values; ``to_empty`` of a module within gives these.
        if isinstance(value, (DTensor, RaggedTensor)):
            carry_mark(before, local_of(sharded))

    # -- gradients -----------------------------------------------------------------------------------------------

    def on_gradient(self, full: torch.Tensor) -> None:
        """A parameter's full gradient is complete, though backward has reached no output of the unit.

        Raises:
            RuntimeError: it read the weights when they were not gathered.
        """
        root = self.root
        assert root is not None
        root.enter_backward()
        if not self.activity.entered and not self.weights.ready:
            raise RuntimeError(
                f"Backward used unit {self.name!r} before its backward hook ran, so its weights are not gathered. "
                "Return every tensor that backward starts from as an output of the unit, in tuples, lists, dicts or "
                "dataclasses, or keep it in an attribute of one of the unit's modules."
            )


# Parameters hold these listeners, and the unit holds the parameters: they refer to it weakly.


def _gradient_listener(unit: Unit) -> Callable[[torch.Tensor], None]:
    """Called with each parameter whose full gradient is complete for this backward."""
    ref = weakref.ref(unit)

    def on_gradient(full: torch.Tensor) -> None:
        unit = ref()
        if unit is not None and not (
            unit.activity.entered and unit.root is not None and unit.root.in_backward
        ):
            unit.on_gradient(full)

    return on_gradient


def _data_listener(unit: Unit) -> Callable[[torch.Tensor], None]:
    """Called with a full parameter whose ``.data`` is handed out."""
    ref = weakref.ref(unit)

    def on_data_handed_out(full: torch.Tensor) -> None:
        unit = ref()
        if unit is not None:
            unit.on_data_handed_out(full)

    return on_data_handed_out
