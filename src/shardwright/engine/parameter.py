"""One managed parameter in its two forms: sharded (what optimizers and checkpoints see) and full (what forward sees).

Both objects are made once. Which of them a module shows is decided by the unit; collectives are not known here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright._torch import local_of
from shardwright.layout import Run, Segment, TensorSpec
from shardwright.memory import Slab

#: Set on a parameter that a unit has taken over, so that tied weights and optimizers built too early are noticed.
TAKEN = "_shardwright_taken_by"
#: Set on a sharded parameter: a weak reference to its unit.
UNIT_OF = "_shardwright_unit_of"


@dataclass(frozen=True)
class Slot:
    """A name under which a module holds the parameter; tied weights have several."""

    module: weakref.ref[nn.Module]
    name: str
    #: The module's own registry, or None where its class intercepts assignment (LSTM keeps a second list).
    registry: dict[str, nn.Parameter | None] | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Slot:
        plain = type(module).__setattr__ in (nn.Module.__setattr__, object.__setattr__)
        return cls(weakref.ref(module), name, module._parameters if plain else None)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the module still has this parameter, or is gone."""
        if self.registry is not None:
            return self.registry.get(self.name) is parameter
        module = self.module()
        return module is None or module._parameters.get(self.name) is parameter

    def show(self, parameter: nn.Parameter) -> None:
        if self.registry is not None:
            self.registry[self.name] = parameter
        elif (module := self.module()) is not None:
            setattr(module, self.name, parameter)


class ManagedParameter:
    """A parameter of a unit.

    Attributes:
        name: the qualified name, for messages.
        sharded: ``nn.Parameter`` over a DTensor in the storage dtype; views the unit's shard.
        local: the plain local tensor behind ``sharded``.
        full: ``nn.Parameter`` in the compute dtype; views the unit's slab, readable only while that is leased.
        dim: the sharded dimension.
    """

    __slots__ = ("dim", "full", "local", "name", "shape", "sharded", "slots")

    def __init__(
        self,
        spec: TensorSpec,
        slots: tuple[Slot, ...],
        sharded: nn.Parameter,
        local: torch.Tensor,
        full: nn.Parameter,
    ) -> None:
        self.name = spec.name
        self.shape = spec.shape
        self.dim = spec.dim
        self.slots = slots
        self.sharded = sharded
        self.local = local
        self.full = full

    def show(self, form: nn.Parameter) -> None:
        for slot in self.slots:
            slot.show(form)

    def check_unreplaced(self) -> None:
        """Raise if the module's parameter is no longer the one whose shard is gathered."""
        if local_of(cast(DTensor, self.sharded)) is self.local and all(
            slot.holds(self.sharded) for slot in self.slots
        ):
            return
        raise RuntimeError(
            f"Parameter {self.name!r} was replaced after fully_shard: by an assignment, load_state_dict(assign=True) "
            "or a conversion such as .to() on a submodule. Its new value would be ignored. Change it in place, with "
            "copy_ or load_state_dict without assign, or before fully_shard."
        )


def local_view(
    flat: torch.Tensor, offset: int, rows: int, segment: Segment, spec: TensorSpec
) -> torch.Tensor:
    """The rows that a rank owns, as a view of its flat shard with the sharded dimension back in its place."""
    rest = spec.shape[: spec.dim] + spec.shape[spec.dim + 1 :]
    view = flat[offset : offset + rows * segment.row].view(rows, *rest)
    return view.movedim(0, spec.dim)


def full_view(slab: Slab, run: Run, segment: Segment, spec: TensorSpec) -> torch.Tensor:
    """The whole parameter as a view of the slab: contiguous for dimension 0, strided for the others."""
    rest = spec.shape[: spec.dim] + spec.shape[spec.dim + 1 :]
    offset = run.slab_bytes // run.compute_dtype.itemsize + segment.slab_offset
    return slab.view(run.compute_dtype, offset, (segment.size, *rest)).movedim(0, spec.dim)


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, spec: TensorSpec) -> DTensor:
    """``local`` as a DTensor of the parameter's global shape, without any communication."""
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(spec.dim)], run_check=False, shape=torch.Size(spec.shape), stride=stride
    )


def build(
    original: nn.Parameter,
    spec: TensorSpec,
    slots: tuple[Slot, ...],
    *,
    mesh: DeviceMesh,
    local: torch.Tensor,
    full: torch.Tensor,
    on_gradient: Callable[[torch.Tensor], None],
) -> ManagedParameter:
    """Make both forms, keep the original's attributes, and let ``on_gradient`` hear of every full gradient."""
    dtensor = as_dtensor(local, mesh, spec)
    sharded: Any = nn.Parameter(dtensor, requires_grad=original.requires_grad)
    full_parameter = nn.Parameter(full, requires_grad=original.requires_grad)
    for form in (sharded, full_parameter):
        for key, value in original.__dict__.items():
            form.__dict__.setdefault(key, value)
    if original.is_floating_point() or original.is_complex():
        full_parameter.requires_grad_(True)  # a hook needs it once; requires_grad follows the sharded form
        full_parameter.register_post_accumulate_grad_hook(on_gradient)
        full_parameter.requires_grad_(original.requires_grad)
    return ManagedParameter(spec, slots, sharded, local_of(sharded), full_parameter)
