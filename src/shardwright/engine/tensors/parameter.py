"""One managed parameter in its two forms: sharded (what optimizers and checkpoints see) and full (what forward sees).

Both objects are made once per unit layout. The unit decides which form a module shows. This file knows no collectives.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine.compat.autograd import grad_of, set_grad
from shardwright.engine.compat.callers import (
    called_by_compiler,
    called_by_parameter,
    called_by_split_backward,
    called_by_stager,
)
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.modes import dispatches
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.compat.tensors import is_made_of_tensors, moved_into, set_class, tree_leaves
from shardwright.engine.tensors.cut import Cut
from shardwright.engine.tensors.edits.unset import unmark
from shardwright.engine.tensors.extension import Extension, is_attached, is_extended
from shardwright.engine.tensors.numbers.hooks import forget_hooks
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.rows.tensor import EDITED, ShardedCopy, ShardedTensor, as_class
from shardwright.engine.tensors.same_object import (
    BODY,
    HOLDS,
    TAKEN,
    Exchanged,
    acting_class,
    acts,
    base_of,
    full_class,
    keep_object,
)
from shardwright.engine.tensors.sharded import OF_THIS_TENSOR, Sharded

#: Set on a sharded parameter: a weak reference to its unit.
UNIT_OF = "_shardwright_unit_of"
#: Set on a full parameter: the function to call when user code gets its ``.data``.
ON_DATA = "_shardwright_on_data"
#: Set on a full parameter: the sharded parameter that it replaces in modules.
STANDS_FOR = "_shardwright_stands_for"
#: True on classes of deferred tensors (``shardwright.init``). These have a hash ``origin``.
DEFERRED = "_shardwright_deferred"
_NOT_COPIED = {
    UNIT_OF,
    TAKEN,
    STANDS_FOR,
    *OF_THIS_TENSOR,
    "_is_param",
    *BODY,
}  #: attributes of a parameter that its sharded and full forms do not get


class Managed(Sharded):
    """A sharded parameter. It knows its unit, so that assignments to ``.data`` reach the unit."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        alias: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if unit_of(self) is not None:
            alias._local_tensor = local_of(self)  # type: ignore[attr-defined]  # by which edits are noticed
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        unit = unit_of(self)
        if unit is None:
            become(self, value)
            return
        with torch.no_grad():
            unit.assign_data(self, value)

    def data_ptr(self) -> int:
        if called_by_stager():
            return 0
        unit = unit_of(self)
        if unit is not None and unit.root is not None and unit.root.caller is not None:
            raise RuntimeError(
                f"A kernel asked for the memory of a parameter of unit {unit.name!r}, of shape {tuple(self.shape)}, "
                "while a call of the model runs outside of that unit. This rank has only a part of the parameter. "
                "Call the kernel inside the forward of the unit's module."
            )
        return self._local_tensor.data_ptr()

    def detach(self) -> torch.Tensor:
        alias = super().detach()
        if not torch.compiler.is_compiling() and called_by_parameter():
            # As expected. It has no unit until one adopts it.
            alias = moved_into(type(self), alias) if acts(self) else as_class(type(self), alias)
        return alias

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        if called_by_split_backward():
            raise RuntimeError(
                "A zero-bubble pipeline schedule asked a stage for its parameters. The module of the stage is not "
                "sharded, only modules inside it, so their gradients would be lost. Apply fully_shard to the whole "
                "module of the stage, too."
            )
        return super().view_as(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        result = nn.Parameter(self._copy(), requires_grad=self.requires_grad)
        memo[id(self)] = result = moved_into(type(self), result) if acts(self) else result
        for key, value in self.__dict__.items():
            if key != UNIT_OF and key not in BODY:
                result.__dict__[key] = copy.deepcopy(value, memo)
        return result  # without gradient, as copies of plain parameters are


class ShardedParameter(Managed, ShardedTensor):  # type: ignore[metaclass]
    """The parameter that is cut in rows."""

    __slots__ = ()

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> DTensor:
        return as_class(ShardedParameter, DTensor.__tensor_unflatten__(*parts))  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self._as_dtensor(), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def _copy(self) -> DTensor:
        return self._as_dtensor(clone=True)


class RaggedParameter(Managed, RaggedTensor):  # type: ignore[misc]
    """The parameter that is cut between granules."""

    __slots__ = ()

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> RaggedTensor:
        return as_class(RaggedParameter, RaggedTensor.__tensor_unflatten__(*parts))  # type: ignore[no-any-return]


def _assign_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    set_grad(parameter, value)
    unit = unit_of(parameter)
    if unit is not None:
        unit.gradients.drop({id(parameter)})


@functools.cache
def _holding_class(kind: type) -> Any:
    """Return the class of a sharded parameter whose unit holds gradients of micro-batches, which are not in ``.grad``.

    An assignment to ``.grad`` replaces the gradients so far, so the unit must drop those that it holds. Parameters have
    this class only for that time, because a property makes every access to ``.grad`` slower.
    """
    grad = property(grad_of, _assign_gradient, lambda p: _assign_gradient(p, None))
    names = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "grad": grad,
        HOLDS: True,
    }
    made: Any = type(kind)(kind.__name__, (kind,), names)
    made.__slots__ = kind.__slots__  # type: ignore[attr-defined]  # torch's stager of asynchronous checkpoints copies these
    return made


def hear_of_gradients(parameters: Iterable[torch.Tensor], hear: bool) -> None:
    """Let sharded parameters tell their unit of assignments to ``.grad``, or no longer."""
    for p in parameters:
        kind = type(p)
        if hasattr(kind, HOLDS) != hear:
            set_class(p, _holding_class(kind) if hear else kind.__bases__[0])


def become(sharded: Any, new: Any) -> None:
    """Give the object ``sharded`` the content of ``new``, which is sharded in the same way."""
    # From now on a parameter that was made from a view of another one has a separate local tensor.
    sharded.__dict__.pop(EDITED, None)
    kind: Any = RaggedTensor if isinstance(new, RaggedTensor) else ShardedTensor
    kind.become(sharded, new)  # the class of a parameter that no unit has yet may be DTensor


# torch's stager of asynchronous checkpoints copies only attributes in the class's own slots.
for _cls in (ShardedTensor, ShardedCopy, ShardedParameter):
    _cls.__slots__ = DTensor.__slots__  # type: ignore[assignment]


class Full(torch.Tensor):
    """A full parameter that reports reads of ``.data`` to its unit, because edits through it move no version
    counter."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        if not called_by_compiler():  # the compiler reads it once and changes nothing
            self.__dict__[ON_DATA](self)
        alias: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if isinstance(self, DTensor):
            alias._local_tensor = local_of(self)  # type: ignore[attr-defined]
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(
                f"A full weight of shape {tuple(self.shape)} and {self.dtype} cannot be replaced by a tensor of "
                f"shape {tuple(value.shape)} and {value.dtype} while its unit is in use. Assign to the sharded "
                "parameter between steps."
            )
        with torch.no_grad():
            self.copy_(value)  # earlier graphs view the same memory in the slab, and must now raise an error

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        own = grad_of(self)
        if own is None and not called_by_compiler():
            self._check_no_gradient("read")
        return own

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._check_no_gradient("changed")
        set_grad(self, value)

    def _check_no_gradient(self, done: str) -> None:
        """Raise if a running forward reads or changes the gradient so far, which the sharded parameter has."""
        sharded: Any = self.__dict__.get(STANDS_FOR)
        unit = unit_of(sharded) if sharded is not None else None
        if unit is None or not unit.activity.calls:
            return
        if done == "changed" or unit.gradients.held or grad_of(sharded) is not None:
            raise RuntimeError(
                f"The gradient of a parameter of unit {unit.name!r}, of shape {tuple(self.shape)}, was {done} while "
                "its forward runs, when modules have the full weight and no gradients. Use .grad of the model's "
                "parameters() before or after the forward; p.grad.full_tensor() is the whole gradient."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy, since torch saves the whole memory that a tensor views.
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


class FullParameter(Full, nn.Parameter):
    """The full form of a parameter that is only data-parallel: all of it."""

    __slots__ = ()


class FullDTensor(Full, DTensor):
    """The full form of a tensor-parallel parameter: all of this rank's tensor-parallel part."""

    __slots__ = ()

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> DTensor:
        """Return a tensor of this class, as torch.compile expects when its graph runs."""
        result = DTensor.__tensor_unflatten__(*parts)
        result.__class__ = FullDTensor
        return result


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory: for a DTensor the local tensor."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def in_place_view(local: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return the full parameter as an alias of its shard, which is all of it. Both have one version counter."""
    return local.detach().view(cut.spec.shape)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Return whether it is deferred or on the meta device, so that its values come later."""
    return tensor.is_meta or getattr(type(plain_of(tensor)), DEFERRED, False)


def refuse_while_deferring(doing: str) -> None:
    """Raise RuntimeError inside ``deferred_init``, where new tensors are deferred."""
    if getattr(type(torch.empty(0, device="cpu")), DEFERRED, False):
        raise RuntimeError(
            f"{doing} was called inside deferred_init, which records operations and does not run them. Call it after "
            "the context."
        )


#: Pairs of equal meshes that are two objects, by their ids. torch gives the parameters of a later model the mesh of an
#: earlier one, and its comparison of meshes is slow for a loop over the parameters of each step.
_equal_meshes: dict[tuple[int, int], tuple[weakref.ref[DeviceMesh], weakref.ref[DeviceMesh]]] = {}


def is_cut_like(gradient: torch.Tensor, parameter: Any) -> bool:
    """Return whether a gradient of a sharded parameter is cut as the parameter is."""
    if isinstance(parameter, RaggedTensor):
        return isinstance(gradient, RaggedTensor) and (
            gradient.spec is parameter.spec or gradient.spec == parameter.spec
        )
    if not isinstance(gradient, DTensor):
        return False
    own, of_parameter = gradient._spec, parameter._spec
    if own.placements != of_parameter.placements:
        return False
    one, other = own.mesh, of_parameter.mesh
    if one is other:
        return True
    known = _equal_meshes.get((id(one), id(other)))
    if known is not None and known[0]() is one and known[1]() is other:
        return True
    if one == other:
        _equal_meshes[id(one), id(other)] = weakref.ref(one), weakref.ref(other)
        return True
    return False


def unit_of(parameter: torch.Tensor) -> Any:
    """Return the unit of a sharded parameter, or None if it has none (any more)."""
    ref = parameter.__dict__.get(UNIT_OF)
    return ref() if ref is not None else None


@dataclass(frozen=True)
class Slot:
    """A module and the name under which it holds the parameter. Tied weights have several slots."""

    module: weakref.ref[nn.Module]
    name: str
    #: The module's own registry, or None where its class intercepts assignment (LSTM keeps a second list).
    registry: dict[str, nn.Parameter | None] | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Slot:
        plain = type(module).__setattr__ in (nn.Module.__setattr__, object.__setattr__)
        return cls(weakref.ref(module), name, module._parameters if plain else None)

    def parameter_there(self) -> nn.Parameter | None:
        """Return what the module has now under this name, or None if it has nothing there or no longer exists."""
        module = self.module()
        return None if module is None else module._parameters.get(self.name)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the module still has this parameter, or no longer exists."""
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
        sharded: ``nn.Parameter`` over a DTensor or RaggedTensor in the storage dtype; views the unit's shard.
        cut: how it is cut.
        local: the plain local tensor behind ``sharded``.
        full: ``nn.Parameter`` in the compute dtype. It views the unit's slab and is readable only while that is leased,
            or it is the shard itself (:attr:`in_place`). A tensor-parallel parameter has a DTensor.
        view: the plain tensor behind ``full``.
        slots: the places where modules hold it; other units may add slots that borrow it.
    """

    __slots__ = ("cut", "extension", "full", "lent_over", "local", "name", "sharded", "slots", "spec", "view")

    def __init__(
        self,
        cut: Cut,
        slots: list[Slot],
        sharded: nn.Parameter,
        local: torch.Tensor,
        full: nn.Parameter,
    ) -> None:
        self.name = cut.spec.name
        self.spec = cut.spec
        self.cut = cut
        self.slots = slots
        self.sharded = sharded
        self.local = local
        self.full = full
        self.view = plain_of(full)
        self.extension: Extension | None = None
        self.lent_over = False  #: whether a tensor that is no parameter replaces it now

    def show(self, form: nn.Parameter) -> None:
        for slot in self.slots:
            if not (self.lent_over and not isinstance(slot.parameter_there(), nn.Parameter)):
                slot.show(form)

    def stand_in(self) -> torch.Tensor | None:
        """Return a tensor that is no parameter and that replaces this one in its module."""
        tensors = (slot.parameter_there() for slot in self.slots)
        return next((t for t in tensors if t is not None and not isinstance(t, nn.Parameter)), None)

    @property
    def replaced(self) -> bool:
        """Whether the module's parameter is no longer the one whose shard is gathered."""
        if local_of(self.sharded) is not self.local:  # type: ignore[arg-type]
            return True
        if self.extension is None and is_attached(self.local):
            return True
        return any(not slot.holds(self.sharded) for slot in self.slots)

    def take_values(self, source: torch.Tensor) -> None:
        """Copy this rank's part of ``source``, of this shape and sharded or not, into the shard."""
        self.local.copy_(self.cut.part_of(source))
        unmark(self.local)

    def fitted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, cut like the parameter. Users replace gradients by whole ones and by others' cuts.

        This communicates only if ``gradient`` is cut in another way, so every rank must call it.
        """
        if is_cut_like(gradient, self.sharded):
            return gradient
        part = self.cut.part_of(gradient)
        return self.cut.wrap(part.clone(memory_format=torch.contiguous_format))  # type: ignore[no-any-return]

    def keep_object(self, original: nn.Parameter, owner: str) -> Exchanged | None:
        """Let ``original``, from which this was built, be the sharded parameter, if possible."""
        label = f"{self.name!r} of unit {owner!r}"
        self.sharded, exchanged = keep_object(original, self.sharded, label, not has_no_values(original))
        self.full.__dict__[STANDS_FOR] = self.sharded
        return exchanged

    def adopt_full(self, tensor: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Set the full form of an extended parameter after its first gather."""
        self.full = self.view = listen(nn.Parameter(tensor), on_gradient, self.sharded.requires_grad)
        self.full.__dict__[STANDS_FOR] = self.sharded

    @property
    def in_place(self) -> bool:
        """Whether the full form is the shard itself, because one rank has all of it in this dtype."""
        return storage_key(self.view) == storage_key(self.local)

    @property
    def counters(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose version counters move with edits of the full form, and with none of the shard."""
        if self.in_place:
            return ()
        return (self.full,) if self.view is self.full else (self.full, self.view)

    def write_back(self, gathered: torch.Tensor | None = None) -> None:
        """Write edits of the full form into this rank's shard.

        Elements that equal ``gathered`` (default: the shard, cast) are not written, since the gather may have rounded
        them.
        """
        if self.extension is not None:
            raise RuntimeError(
                f"Parameter {self.name!r} was changed in place while it was full, but {type(self.local).__name__} "
                "defines its own all-gather, so the change cannot be written to the shard. Change it between steps."
            )
        full = self.cut.of_full(self.view.detach())
        local = self.local.to(full.device)
        same = full == (local.to(full.dtype) if gathered is None else gathered)
        if same.all():
            return
        with torch.no_grad():
            self.local.copy_(torch.where(same, local, full))


def build(
    original: nn.Parameter,
    cut: Cut,
    slots: list[Slot],
    *,
    local: torch.Tensor,
    full: torch.Tensor,
    on_gradient: Callable[[torch.Tensor], None],
    on_data: Callable[[torch.Tensor], None],
) -> ManagedParameter:
    """Make both forms, keep the original's attributes, and call ``on_gradient`` with every full gradient.

    A parameter that is already sharded stays the same object. Others do so by :meth:`ManagedParameter.keep_object`.
    """
    sharded: Any = nn.Parameter(cut.wrap(local), requires_grad=original.requires_grad)
    kind = RaggedParameter if isinstance(sharded, RaggedTensor) else ShardedParameter
    base = base_of(type(original))
    if stays_sharded(original, sharded):
        become(original, sharded)
        sharded = original
        set_class(sharded, acting_class(kind, base) if acts(sharded) else kind)
    else:
        forget_hooks(original)  # it cut gradients as the old form was sharded
        sharded.__class__ = kind
    if is_extended(local):  # this object, or its class, of which making a parameter takes an alias
        sharded._local_tensor = local
    shown = full if cut.parallel is None else cut.parallel.wrap(full)
    full_parameter: Any = nn.Parameter(shown, requires_grad=original.requires_grad)
    attributes = _attributes_of(original)
    for form in (sharded, full_parameter):
        for key, value in attributes.items():
            form.__dict__.setdefault(key, value)
    if original.is_floating_point() or original.is_complex():
        listen(full_parameter, on_gradient, original.requires_grad)
    full_parameter.__dict__[ON_DATA] = on_data
    full_parameter.__dict__[STANDS_FOR] = sharded
    full_parameter.__class__ = full_class(FullParameter, base) if shown is full else FullDTensor
    return ManagedParameter(cut, slots, sharded, local_of(sharded), full_parameter)


def stays_sharded(original: Any, sharded: Any) -> bool:
    """Return whether ``original`` is sharded in the same way, so that it can become ``sharded`` by its data alone."""
    same_kind = isinstance(original, RaggedTensor if isinstance(sharded, RaggedTensor) else DTensor)
    # A tensor that has memory cannot take the place of one on the meta device.
    return same_kind and not original.is_meta and bool(original.device_mesh == sharded.device_mesh)


def _attributes_of(original: nn.Parameter) -> dict[str, Any]:
    """Return the attributes of a parameter that its sharded and full forms get, too.

    Without those that would keep the memory of the whole parameter alive: aliases of it, and, where the parameter is of
    a class of tensors that are made of others, these others. The part of this rank has its own.
    """
    whole: Any = plain_of(original)
    names: list[str] = whole.__tensor_flatten__()[0] if is_made_of_tensors(whole) else []
    made_of_others = bool(names) or is_extended(whole)
    parts = [whole, *(getattr(whole, name) for name in names)]
    memories = {storage_key(part) for part in parts if not dispatches(type(part))}

    def keeps_whole(value: Any) -> bool:
        return any(
            (made_of_others and leaf.numel() >= whole.numel())
            or (not dispatches(type(leaf)) and storage_key(leaf) in memories)
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        )

    left_out = _NOT_COPIED.union(names)
    return {
        key: value
        for key, value in original.__dict__.items()
        if key not in left_out and not keeps_whole(value)
    }


def listen(
    full: nn.Parameter, on_gradient: Callable[[torch.Tensor], None], requires_grad: bool
) -> nn.Parameter:
    full.requires_grad_(True)  # a hook needs this once; later it follows the sharded form
    full.register_post_accumulate_grad_hook(on_gradient)
    full.requires_grad_(requires_grad)
    return full
