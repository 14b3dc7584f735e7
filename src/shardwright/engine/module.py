"""What a sharded module becomes: :class:`FSDPModule`, its methods, and the class made in front of the user's.

The methods set what units do; the units do it. Methods of later versions are refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn

from shardwright.engine.root import UNIT, attach
from shardwright.engine.unit import Unit

_classes: dict[type, type] = {}


def fsdp_class(cls: type) -> type:
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})
    return _classes[cls]


def _refuse_deepcopy(self: nn.Module, memo: Any) -> NoReturn:
    raise NotImplementedError(
        f"deepcopy of a sharded {type(self).__name__} is not supported in this version. Copy the model before "
        "fully_shard, or build a second one and load the state dict."
    )


class UnshardHandle:
    """What :meth:`FSDPModule.unshard` returns with ``async_op=True``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait for the gather and show the full parameters. A second call does nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.parameters and unit.gathered:
            unit.wait()
            unit.show_full()


class FSDPModule:
    """What a module becomes by :func:`fully_shard`. Made by that function only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Container code such as ``Sequential.__getitem__`` builds ``type(self)(...)``: that is a plain module.
        original: Any = next(c for c in cls.__mro__ if c not in (cls, FSDPModule))
        self: Any = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not a forward hook with always_call: that one misses KeyboardInterrupt, after which users train on.
        unit: Unit = self.__dict__[UNIT]
        calls = unit.calls
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            unit.forward_failed(calls)
            raise

    def _fsdp_unit(self) -> Unit:
        return cast(Unit, getattr(self, UNIT))

    def _fsdp_units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._fsdp_unit()]
        found = [getattr(m, UNIT, None) for m in cast(nn.Module, self).modules()]
        return list(dict.fromkeys(u for u in found if u is not None))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit (not inner ones) in its compute dtype and show the full parameters.

        With ``async_op`` the gather is only issued; the returned handle's ``wait`` shows the parameters, and so does
        the module's next forward.
        """
        unit = self._fsdp_unit()
        if unit.parameters:
            root = unit.root if unit.root is not None else attach(cast(nn.Module, self))
            generation = root.generation if root.caller is not None else root.generation + 1
            if not unit.valid_for(generation):
                unit.issue(generation)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release this module's own full parameters and show the sharded ones."""
        unit = self._fsdp_unit()
        if unit.parameters:
            unit.release()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, backward keeps full gradients, in the reduce dtype, until a backward with True reduces the sum.

        Gradient accumulation without communication; it holds one full gradient of the model per rank.
        """
        for unit in self._fsdp_units(recurse):
            unit.requires_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """With False, the next backward leaves its last reduction under way instead of waiting for it."""
        unit = self._fsdp_unit()
        root = unit.root if unit.root is not None else attach(cast(nn.Module, self))
        root.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` from now on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
        for unit in self._fsdp_units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """With False, full parameters stay after backward until an optimizer steps: fewer gathers, more memory.

        Parameters edited by hand between forwards are not seen while they stay.
        """
        for unit in self._fsdp_units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False, backward does not gather this unit; only right for units whose backward needs no weights."""
        self._fsdp_unit().unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules' units when this one's forward begins, instead of the one that came next last time."""
        self._fsdp_unit().forward_prefetch = [weakref.ref(u) for u in _units_of(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules' units when this one's backward begins, instead of the one before it in forward."""
        self._fsdp_unit().backward_prefetch = [weakref.ref(u) for u in _units_of(modules)]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's gradient sums by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be positive, got {factor!r}")
        self._fsdp_unit().divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def reset_iter_state(self) -> None:
        """Drop what an exception in forward or backward left behind. The next forward does so by itself."""
        root = self._fsdp_unit().root
        if root is not None:
            root.recover()
            for unit in root.units():
                if unit.parameters:
                    unit.forget_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; also forgets held gradients and gives the gradients' memory back at once."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in self._fsdp_units(recurse=True):
            if unit.parameters:
                unit.forget_gradients()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``; first leaves a failed backward behind, which had full ones shown."""
        root = self._fsdp_unit().root
        if root is not None:
            root.recover_if_failed()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``.to``, ``.half`` and the like: allowed where they change no sharded parameter."""
        units = [u for u in self._fsdp_units(recurse) if u.parameters]
        for unit in units:
            for p in unit.parameters:
                if fn(p.local) is not p.local:
                    raise NotImplementedError(
                        f"Moving or casting a sharded module is not supported in this version: it would change "
                        f"parameter {p.name!r} ({p.local.dtype} on {p.local.device}). Do it before fully_shard."
                    )
        managed = {id(p.sharded) for u in units for p in u.parameters}
        for module in cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in managed:
                    with torch.no_grad():
                        parameter.data = fn(parameter.data)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self


def _refuse_later(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not supported in this version")

    method.__name__ = name
    method.__doc__ = "Not in this version."
    return method


for _name in (
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_requires_all_reduce",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
):
    setattr(FSDPModule, _name, _refuse_later(_name))


def _units_of(modules: list[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"only modules that fully_shard was applied to can be prefetched, got {type(module).__name__}"
            )
    return [module._fsdp_unit() for module in modules]
