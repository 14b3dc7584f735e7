"""Contexts around an operation: dispatch modes, function modes, autocast, and transforms of ``torch.func``.

The engine asks which of them are active, and runs its own work outside of those that would change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from shardwright.engine.compat.probe import probe

#: Whether a transform of torch.func has wrapped a tensor.
is_wrapped: Callable[[torch.Tensor], bool] = probe(torch._C, "_functorch", "is_functorch_wrapped_tensor")
_is_batched = probe(torch._C, "_functorch", "is_legacy_batchedtensor")
_dispatch_mode = probe(torch._C, "_get_dispatch_mode")
_FAKE = probe(torch._C, "_TorchDispatchModeKey").FAKE

#: Inside this context reads of attributes of our tensor classes are as fast as for plain tensors.
quick_attributes = probe(torch._C, "DisableTorchFunctionSubclass")

#: Whether a transform of torch.func (grad, jvp, vmap, functionalize) is under way. To read the stack of transforms
#: instead would make that stack, which autograd then copies with every node of a graph.
transformed: Callable[[], bool] = probe(torch._C, "_are_functorch_transforms_active")
_any_autocast = probe(torch._C, "_is_any_autocast_enabled")
_pop_transform = probe(torch._C, "_functorch", "pop_dynamic_layer_stack")
_push_transform = probe(torch._C, "_functorch", "push_dynamic_layer_stack")
_unwrap_transformed = probe(torch._C, "_functorch", "get_unwrapped")
_dispatch_modes = probe(torch._C, "_len_torch_dispatch_stack")
_function_modes = probe(torch._C, "_len_torch_function_stack")
_pop_function_mode = probe(torch._C, "_pop_torch_function_stack")
_push_function_mode = probe(torch._C, "_push_on_torch_function_stack")
_no_dispatch = probe(torch._C, "_disabled_torch_dispatch_impl")
_disable_dispatch_modes = probe(_python_dispatch, "_disable_current_modes")
_dispatch_mode_stack = probe(_python_dispatch, "_get_current_dispatch_mode_stack")
_push_dispatch_mode = probe(_python_dispatch, "_push_mode")
_pop_dispatch_mode = probe(_python_dispatch, "_pop_mode")
_PROXY = probe(torch._C, "_TorchDispatchModeKey", "PROXY")
_CloneArgBeforeMutateMode = probe(torch.autograd, "graph", "_CloneArgBeforeMutateMode")


#: A tensor subclass with this goes by its ``__torch_dispatch__`` alone.
disabled_torch_function = probe(torch._C, "_disabled_torch_function_impl")


class _Nothing:
    """A context that does nothing. Both methods are C functions, so it takes half of ``nullcontext``'s time."""

    __enter__ = __exit__ = "".format


NOTHING: AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of all transforms of torch.func."""
    while is_wrapped(tensor):
        tensor = _unwrap_transformed(tensor)
    return tensor


def traced() -> bool:
    """Return whether make_fx records what runs now."""
    return bool(_dispatch_modes()) and any(map(_traces, _dispatch_mode_stack()))


def modes_are_active() -> bool:
    """Return whether a dispatch mode sees the operations of this thread."""
    return bool(_dispatch_modes())


def outside_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context inside which no dispatch mode sees the operations of this thread."""
    return _disable_dispatch_modes()  # type: ignore[no-any-return]


def infers_shapes(types: Iterable[type]) -> bool:
    """Return whether an operation runs on fake tensors, or inside the mode that makes them."""
    return FakeTensor in types or _dispatch_mode(_FAKE) is not None


def dispatches(kind: type) -> bool:
    """Return whether operations on tensors of this class go to its ``__torch_dispatch__``."""
    return kind.__torch_dispatch__ is not _no_dispatch  # type: ignore[attr-defined]


def alone(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context inside which operations do what they do by themselves, whatever surrounds the caller.

    It suspends transforms of torch.func, function modes, autocast on ``device``, and dispatch modes that trace, fake or
    copy. Other dispatch modes stay, because those that count operations or collectives must count these, too. Mostly
    nothing is active, and then this costs four checks.
    """
    if not (_dispatch_modes() or transformed() or _function_modes() or _any_autocast()):
        return NOTHING
    return _alone(device.type)


def _traces(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is _PROXY


def _changes_results(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None or isinstance(mode, _CloneArgBeforeMutateMode)


@contextmanager
def _alone(device: str) -> Iterator[None]:
    with ExitStack() as stack:
        while transformed():
            stack.callback(_push_transform, _pop_transform())
        while _function_modes():
            stack.callback(_push_function_mode, _pop_function_mode())
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            stack.callback(torch.set_autocast_enabled, device, True)
        modes = _dispatch_mode_stack()
        if any(map(_changes_results, modes)):
            stack.enter_context(_disable_dispatch_modes())
            for mode in modes:
                if not _changes_results(mode):
                    _push_dispatch_mode(mode)
                    stack.callback(_pop_dispatch_mode)
        yield


def is_transformed(tensor: Any) -> bool:
    """Return whether torch.func, or a vmap, has wrapped the tensor."""
    return isinstance(tensor, torch.Tensor) and (is_wrapped(tensor) or _is_batched(tensor))
