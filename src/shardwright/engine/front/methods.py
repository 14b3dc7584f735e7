"""Methods of a sharded module that run as its forward does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwright.engine.assembly.find import UNIT
from shardwright.engine.front.module import FSDPModule, original_class
from shardwright.engine.model.calls import Calls, depth_of
from shardwright.engine.unit.unit import Unit


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` gather and release the unit's parameters as ``forward`` does.

        sw.register_fsdp_forward_method(model, "generate")

    A module that is not sharded stays unchanged, so the same code works for both.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{original_class(type(module)).__name__} has no method {method_name!r}")
    object.__setattr__(module, method_name, _ForwardMethod(module, getattr(module, method_name)))


def call_as_forward(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the weights of the unit of ``module``, a sharded module, as its forward is called."""
    unit: Unit = module.__dict__[UNIT]
    depth, calls = depth_of(unit), Calls(unit)
    try:
        args, kwargs = calls.before_forward(module, args, kwargs)
        return calls.after_forward(module, args, function(*args, **kwargs))
    except BaseException:
        calls.forward_failed(depth)
        raise


class _ForwardMethod:
    """A method of a sharded module that runs as its forward does. Refers to the module weakly; a copy has its own."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        del self.__dict__["__wrapped__"]  # it would keep the module alive
        self._module = weakref.ref(module)
        self._function = getattr(method, "__func__", method)
        self._bound = getattr(method, "__self__", None) is module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        function = functools.partial(self._function, module) if self._bound else self._function
        return call_as_forward(module, function, *args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = memo[id(self._module())]
        method = self._function.__get__(module) if self._bound else self._function
        return _ForwardMethod(module, method)
