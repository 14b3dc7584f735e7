"""``deferred_init``: within it, what makes tensors makes deferred ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright._torch import fill_truncated_normal
from shardwright.init.recorder import RECORDER, UNNAMED, DeferredTensor

_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
_thread: int | None = None  #: in which a context is active


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build models without memory: what initialises them is recorded, and carried out by :func:`materialize`.

        with sw.deferred_init():
            model = Model(config)

    Any model, unmodified. Its parameters and buffers have shapes, dtypes and devices and can be tied, converted,
    initialised, sharded and given to optimizers, inside the context and after it. Whatever reads a value (``item``,
    ``tolist``, ``numpy``, a branch) gets the right one: what it depends on is computed for it. ``torch.get_rng_state``
    draws for it what was recorded so far.

    From the first random operation on, generators hold placeholder states until :func:`materialize` leaves them as
    the plain build would have. Numbers drawn between the context and ``materialize`` would not be those of the plain
    build, so then ``materialize`` raises. Seeding or restoring a generator in between is fine.

    Tensors made outside keep their memory; what the constructor reads of them must not change before ``materialize``.
    """
    global _thread
    if _thread is not None:
        if _thread != threading.get_ident():
            raise RuntimeError(
                "deferred_init is active in another thread, and generators are common to all. Build one model after "
                "the other."
            )
        yield
        return
    _thread = threading.get_ident()
    RECORDER.live()
    try:
        with _patched(), _Naming(), _Recording():
            yield
    finally:
        _thread = None


class _Recording(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not RECORDER.recording:
            return func(*args, **(kwargs or {}))
        return RECORDER.dispatch(func, args, kwargs or {})


class _Naming(TorchFunctionMode):
    """Tells the recorder whether an operation was told a device, which operations themselves always are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        named = device is not None and device is not UNNAMED
        if func in _MOVES:
            named = named or func is not torch.Tensor.to or any(_is_device(a) for a in args[1:])
        before, RECORDER.named = RECORDER.named, named
        try:
            return func(*args, **kwargs)
        finally:
            RECORDER.named = before


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and value is not UNNAMED


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Functions that no mode sees: readers of generators' states, and the initialiser that loops until it is done."""
    with contextlib.ExitStack() as undo:
        for owner in (torch, torch.random):
            for name in ("get_rng_state", "initial_seed"):
                _replace(undo, owner, name, _settled)
        if torch.cuda.is_available():
            for owner in (torch.cuda, torch.cuda.random):
                for name in ("get_rng_state", "initial_seed"):
                    _replace(undo, owner, name, _settled)
        _replace(undo, nn.init, fill_truncated_normal, _whole)
        _replace(undo, nn.Parameter, "__new__", _of_no_other_class)
        for lazy in (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer):
            _replace(undo, lazy, "__new__", _unrecorded)
        yield


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, change(original))


def _settled(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        RECORDER.settle(RECORDER.streams.waiting())
        return original(*args, **kwargs)

    return read


def _of_no_other_class(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = original(cls, data, *args, **kwargs)
        if isinstance(result, DeferredTensor) and cls is not nn.Parameter:
            raise NotImplementedError(
                f"deferred_init cannot build a {cls.__name__}: of subclasses of nn.Parameter the class would be lost. "
                "Build the module that has it outside the context, or give it a plain nn.Parameter."
            )
        return result

    return new


def _unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Parameters of lazy modules have no memory yet; their first forward makes them as in the plain build."""

    def new(*args: Any, **kwargs: Any) -> Any:
        with RECORDER.paused():
            return original(*args, **kwargs)

    return new


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def fill(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensor, DeferredTensor):
            return original(tensor, mean, std, a, b, generator=generator)  # type: ignore[no-any-return]
        return RECORDER.record_whole(original, tensor, (mean, std, a, b), generator)

    return fill
